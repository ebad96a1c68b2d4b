"""Which device computes, what is said about it, and models of random weights: as far as no GPU is needed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flint_rs
import numpy as np
import pytest
from flint_rs import Flint
from flint_rs._progress import Bar

# A driver that is there finds no card with this.
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "sliding_window": 17,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=HIDDEN)


def test_auto_falls_back_to_the_cpu_and_says_why(gguf_path: Path) -> None:
    code = (
        "import flint_rs, sys\n"
        "print(flint_rs.Flint(sys.argv[1]).generate('the', max_tokens=2, ignore_eos=True).finish_reason)"
    )
    result = python(code, gguf_path)
    assert result.stdout == "length\n"
    assert result.stderr.startswith("flint-rs: device cpu: device cuda is not available: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_chosen_cpu_says_nothing(gguf_path: Path, device: str) -> None:
    result = python("import flint_rs, sys; print(flint_rs.Flint(*sys.argv[1:]).device)", gguf_path, device)
    assert (result.stdout, result.stderr) == (f"device {device}\n", "")


def test_the_line_is_a_log_record(gguf_path: Path) -> None:
    quiet = (
        "import flint_rs, logging, sys; logging.getLogger('flint_rs').setLevel('WARNING'); flint_rs.Flint(sys.argv[1])"
    )
    assert python(quiet, gguf_path).stderr == ""
    own = (
        "import flint_rs, logging, sys\n"
        "logging.basicConfig(format='mine %(name)s %(levelname)s %(message)s', level='INFO')\n"
        "flint_rs.Flint(sys.argv[1])"
    )
    lines = python(own, gguf_path).stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("mine flint_rs INFO device cpu: ")
    assert python(own.replace("INFO", "WARNING"), gguf_path).stderr == "", "the application's level counts"


def test_cuda_without_a_gpu_says_what_was_found_and_needed(gguf_path: Path) -> None:
    code = (
        "import flint_rs, sys\n"
        "try: flint_rs.Flint(sys.argv[1], device='cuda')\n"
        "except flint_rs.UnavailableError as error: print(error)"
    )
    result = python(code, gguf_path)
    assert result.stdout.startswith("device cuda is not available: ")
    assert "libcuda" in result.stdout or "no CUDA-capable device" in result.stdout
    assert result.stderr == ""
    command = [sys.executable, "-m", "flint_rs.cli", "the", "--model", str(gguf_path), "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=HIDDEN)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("flint-rs: error: device cuda is not available: ")


def test_float32_is_the_cpus(gguf_path: Path) -> None:
    with pytest.raises(flint_rs.UnavailableError, match="float32"):
        Flint(gguf_path, device="cuda", dtype="float32")
    with Flint(gguf_path, device="auto", dtype="float32") as flint:
        assert flint.device.startswith("device cpu: device cuda is not available: its activations are bfloat16")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_sequences": 0}, ValueError, "max_sequences.*1 to 256.*0"),
        ({"max_sequences": 257}, ValueError, "max_sequences.*1 to 256.*257"),
        ({"max_sequences": None}, TypeError, "max_sequences"),
        ({"context_tokens": 0}, ValueError, "context_tokens"),
        ({"context_tokens": 513}, ValueError, "context_tokens.*512.*513"),
        ({"context_tokens": "all"}, TypeError, "context_tokens"),
        ({"threads": 2, "device": "cuda"}, ValueError, "threads.*cuda"),
    ],
    ids=str,
)
def test_arguments(gguf_path: Path, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Flint(gguf_path, **arguments)


def test_the_context_can_be_shorter_than_the_models(gguf_path: Path) -> None:
    with Flint(gguf_path, device="cpu") as whole, Flint(gguf_path, device="cpu", context_tokens=20) as flint:
        assert (whole.context_tokens, flint.context_tokens) == (512, 20)
        assert flint.memory["kv_max_bytes"] < whole.memory["kv_max_bytes"]
        result = flint.generate([1] * 15, ignore_eos=True)
        assert (result.usage.completion_tokens, result.finish_reason) == (5, "length")
        assert flint.generate([1] * 19, ignore_eos=True).usage.completion_tokens == 1
        # Prompt and output together are no longer than the context, and a prompt leaves room for one token.
        for use in (lambda: flint.generate([1] * 20), lambda: flint.stream([1] * 20)):
            with pytest.raises(ValueError, match=r"prompt: .* 19 tokens, to leave room for one .* 20, found 20 tokens"):
                use()
        assert flint.score([1] * 20).shape == (19,)
        for use in (lambda: flint.logits([1] * 21), lambda: flint.score([1] * 21)):
            with pytest.raises(ValueError, match=r"token_ids: expected 1 to 20 tokens.*21"):
                use()


def test_device_arrays_need_a_gpu(gguf_path: Path) -> None:
    with Flint(gguf_path, device="cpu") as flint:
        with pytest.raises(ValueError, match="on_device"):
            flint.logits([1], on_device=True)
        with pytest.raises(TypeError, match="on_device"):
            flint.logits([1], on_device="yes")  # type: ignore[call-overload]
        assert flint.logits([1], on_device=False).shape == flint.logits([1]).shape


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_synthetic(form: Any, tmp_path: Path) -> None:
    with Flint.synthetic(3, TINY, form, device="cpu") as flint:
        assert isinstance(flint, Flint)
        assert (flint.config["hidden_size"], flint.config["context_length"], flint.path) == (128, 256, None)
        assert (flint.end_token_ids, flint.chat_template, repr(flint)) == ([], None, "<Flint synthetic>")
        result = flint.generate([1, 2, 3], **GREEDY, logprobs=1, prompt_logprobs=0)
        assert (result.text, len(result.token_ids), result.finish_reason) == ("", 12, "length")
        assert [event.token_id for event in flint.stream([1, 2, 3], **GREEDY)] == result.token_ids
        assert np.isfinite(flint.logits([1, 2, 3])).all()
        file = tmp_path / "config.json"
        # A whole config.json has keys that mean nothing here.
        file.write_text(json.dumps({**TINY, "eos_token_id": 3, "torch_dtype": "bfloat16"}))
        with (
            Flint.synthetic(3, file, form, device="cpu") as same,
            Flint.synthetic(4, TINY, form, device="cpu") as other,
        ):
            assert same.generate([1, 2, 3], **GREEDY).token_ids == result.token_ids
            assert other.generate([1, 2, 3], **GREEDY).token_ids != result.token_ids


def test_synthetic_has_no_text() -> None:
    with Flint.synthetic(dims=TINY, device="cpu") as flint:
        for use in (
            lambda: flint.tokenize("the"),
            lambda: flint.detokenize([1]),
            lambda: flint.generate("the"),
            lambda: flint.stream("the"),
        ):
            with pytest.raises(flint_rs.UnavailableError, match="no tokenizer; give and take token ids"):
                use()
        with pytest.raises(ValueError, match=r"stop.*without a tokenizer"):
            flint.generate([1], stop=["a"])


def test_synthetic_arguments(tmp_path: Path) -> None:
    for arguments, error, text in (
        ({"dims": {"hidden_size": 0}}, ValueError, r'dims\["hidden_size"\].*0'),
        ({"dims": {"width": 3}}, ValueError, r'dims\["width"\]'),
        ({"dims": {**TINY, "hidden_size": 100}}, ValueError, r'^dims\["hidden_size"\]: .* multiple of 64.* found 100$'),
        ({"dims": {**TINY, "eos_token_id": 3}}, ValueError, r'^dims\["eos_token_id"\]: .* found 3$'),
        (
            {"dims": {**TINY, "hidden_size": -1}},
            ValueError,
            r'^dims\["hidden_size"\]: expected 1 to 1048576, found -1$',
        ),
        ({"seed": 2**64}, ValueError, r"^seed: .* 0 to 2\*\*64 - 1, found 18446744073709551616$"),
        ({"threads": 2**63}, ValueError, r"^threads: .* 1 to \d+.*, found 9223372036854775808$"),
        ({"context_tokens": -3}, ValueError, r"^context_tokens: .* 1 to the model's context length, found -3$"),
        ({"max_sequences": 2**70}, ValueError, r"^max_sequences: .* 1 to 256, found 1180591620717411303424$"),
        ({"dims": tmp_path / "none.json"}, FileNotFoundError, "none.json"),
        ({"dims": 5}, TypeError, "dims.*5"),
        ({"dims": {"hidden_size": object()}}, TypeError, "^dims: expected values that JSON can write, found {'hidden"),
        ({"dims": {"rope_theta": float("nan")}}, ValueError, "^dims: expected values that JSON can write, found .*nan"),
        ({"format": "q4"}, ValueError, "format.*q4"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": "s"}, TypeError, "seed"),
    ):
        with pytest.raises(error, match=text):
            Flint.synthetic(**{"dims": TINY, "device": "cpu", **arguments})
    # A model of 3 TB: refused before any of it is made.
    with pytest.raises(flint_rs.UnavailableError, match=r"memory for the weights.*GB are free"):
        Flint.synthetic(dims={"num_hidden_layers": 4000}, device="cpu")


def test_synthetic_on_the_command_line() -> None:
    command = [sys.executable, "-m", "flint_rs.cli", "generate", "the", "--synthetic", "nvfp4", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "token ids" in result.stderr
    # Before 23 GB are made, which takes longer than this waits.
    for arguments, text in (
        (["1 150144"], "prompt[1]: expected a token id below 150144, found 150144"),
        (["1 2", "--context-tokens", "2"], "prompt: expected at most 1 tokens, to leave room for one"),
        (["1 2", "--stop", "a"], "stop: "),
        (["1 2", "--stop-token-ids", "200000"], "stop_token_ids: expected token ids below 150144, found 200000"),
    ):
        command[4:5] = arguments[:1]
        result = subprocess.run([*command, *arguments[1:]], capture_output=True, text=True, timeout=15, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (2, "", f"flint-rs: error: {result.stderr[17:]}")
        assert text in result.stderr


def test_long_work_is_announced_where_no_bar_is_seen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "flint_rs")
    # `pytest -s` leaves a terminal there.
    monkeypatch.setattr("sys.stderr", io.StringIO())
    now = 100.0
    monkeypatch.setattr("flint_rs._progress.time.monotonic", lambda: now)
    for announced, expected in ((True, ["making weights: 5.8 of 23.0 GB after 15 s, 45 s to go"]), (False, [])):
        caplog.clear()
        with Bar("making weights", announced=announced) as bar:
            for seconds, done in ((0.0, 0), (1.9, 10**9), (15.0, 5_750_000_000), (30.0, 11_500_000_000)):
                now = 100.0 + seconds
                bar(done, 23 * 10**9)
        assert caplog.messages == expected


def test_making_weights_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Bar, "__call__", lambda _bar, done, total: seen.append((done, total)))
    # 0.5 GB, for some calls in between.
    dims = {**TINY, "num_hidden_layers": 40, "hidden_size": 1024, "num_experts": 64, "moe_intermediate_size": 1024}
    with Flint.synthetic(dims=dims, device="cpu") as flint:
        total = flint.memory["weights_bytes"]
    assert seen == sorted(seen)
    assert {all_bytes for _, all_bytes in seen} == {seen[0][1]}
    assert 0.9 * total < seen[0][1] <= total
    assert any(0 < done < all_bytes for done, all_bytes in seen)
