"""Ctrl-C stops loading, prefill and decode within two seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import reference

# One write a line: print() writes a word and its newline apart, and an interrupt can come between them.
START = """
import os
import sys
import flint_rs
def say(word):
    os.write(1, word.encode() + b"\\n")
def report(done, total):
    say("working")
path = sys.argv[1]
try:
"""
WORK = {
    "prefill": """
    flint = flint_rs.Flint(path, device="reference")
    say("working")
    flint.logits(list(range(250)) * 2)
""",
    "decode": """
    with flint_rs.Flint(path, device="reference").stream("the other", max_tokens=480, ignore_eos=True) as stream:
        for _ in stream:
            say("working")
""",
    "generate": """
    flint = flint_rs.Flint(path, device="reference")
    say("working")
    flint.generate(["the other"] * 9, max_tokens=400, ignore_eos=True)
""",
}
END = """
    say("ended")
except KeyboardInterrupt:
    say("interrupted")
"""


def interrupt(code: str, path: Path) -> float:
    """Runs `code`, interrupts it once it works, and returns the seconds until it ended."""
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "working\n"
        time.sleep(0.1)
        start = time.monotonic()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        seconds = time.monotonic() - start
    assert out.splitlines()[-1] == "interrupted", out
    assert err == ""
    return seconds


@pytest.mark.parametrize("work", WORK)
def test_work(slow_path: Path, work: str) -> None:
    assert interrupt(START + WORK[work] + END, slow_path) < 2


def test_load(tmp_path: Path) -> None:
    """A file of 12 GB, of which the disk holds only the header: all its blocks have to be checked."""
    path = tmp_path / "sparse.gguf"
    shape = reference.Shape(3, 1024, 16, 2, 64, 1024, 4096, 4, 1024, 1024, 33)
    write_sparse_gguf(path, shape)
    load = """
    flint_rs._core.Model(path, "cpu", "bfloat16", None, 8, None, report)
"""
    assert interrupt(START + load + END, path) < 2


def write_sparse_gguf(path: Path, shape: reference.Shape) -> None:
    """A Flint of NVFP4 zeros that takes no room on the disk."""
    writer = gguf.GGUFWriter(path, "flint")
    reference.add_config(writer, reference.config(shape))
    reference.add_tokenizer(writer)
    d, heads, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def tensor(name: str, *dims: int, packed: bool = False) -> None:
        kind = gguf.GGMLQuantizationType.NVFP4 if packed else gguf.GGMLQuantizationType.F32
        block, size = gguf.GGML_QUANT_SIZES[kind]
        row = dims[-1] // block * size
        dtype, dims = (np.uint8, (*dims[:-1], row)) if packed else (np.float32, dims)
        n_bytes = int(np.prod(dims)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(name, dims, np.dtype(dtype), n_bytes, raw_dtype=kind)

    tensor("token_embd.weight", reference.VOCAB_SIZE, d)
    tensor("output_norm.weight", d)
    tensor("output.weight", reference.VOCAB_SIZE, d)
    for i in range(shape.layers):
        name = f"blk.{i}"
        for norm in ("attn_norm", "ffn_norm"):
            tensor(f"{name}.{norm}.weight", d)
        tensor(f"{name}.attn_q.weight", heads, d)
        tensor(f"{name}.attn_k.weight", kv, d)
        tensor(f"{name}.attn_v.weight", kv, d)
        tensor(f"{name}.attn_output.weight", d, heads)
        for norm in ("attn_q_norm", "attn_k_norm"):
            tensor(f"{name}.{norm}.weight", shape.head_dim)
        tensor(f"{name}.attn_sinks.weight", shape.heads)
        if i < 2:
            tensor(f"{name}.ffn_gate.weight", shape.dense, d)
            tensor(f"{name}.ffn_up.weight", shape.dense, d)
            tensor(f"{name}.ffn_down.weight", d, shape.dense)
            continue
        tensor(f"{name}.ffn_gate_inp.weight", shape.experts, d)
        tensor(f"{name}.ffn_gate_exps.weight", shape.experts, shape.expert, d, packed=True)
        tensor(f"{name}.ffn_up_exps.weight", shape.experts, shape.expert, d, packed=True)
        tensor(f"{name}.ffn_down_exps.weight", shape.experts, d, shape.expert, packed=True)
        tensor(f"{name}.ffn_gate_shexp.weight", shape.shared, d)
        tensor(f"{name}.ffn_up_shexp.weight", shape.shared, d)
        tensor(f"{name}.ffn_down_shexp.weight", d, shape.shared)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    infos = writer.tensors[0].values()
    length = sum(-(-info.nbytes // 32) * 32 for info in infos)
    writer.close()
    with path.open("r+b") as file:
        data_start = -(-file.seek(0, 2) // 32) * 32
        file.truncate(data_start + length)
