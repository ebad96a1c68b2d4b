"""The command line, as a script sees it."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import flint_rs
import gguf
import pytest

COMMAND = [sys.executable, "-m", "flint_rs.cli"]


# Where there is a GPU too, the results are compared with the CPU's.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}


def run(*arguments: object, stdin: bytes | None = b"") -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *(part if isinstance(part, bytes) else str(part) for part in arguments)]
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False, env=CPU)
    return subprocess.CompletedProcess(command, result.returncode, result.stdout.decode(), result.stderr.decode())


def fails(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on standard error beside that of the device, nothing on standard output."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("flint-rs: device ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("flint-rs: error: ")
    for word in words:
        assert word in lines[0]


def test_generate(gguf_path: Path) -> None:
    options = ("--model", gguf_path, "--temperature", 0, "--max-tokens", 20, "--ignore-eos")
    with flint_rs.Flint(gguf_path, device="cpu") as flint:
        expected = flint.generate("the other", temperature=0, max_tokens=20, ignore_eos=True)
    for arguments, stdin in (
        (("the other", *options), b""),
        (("generate", "the other", *options), b""),
        ((*options, "the other"), b""),
        (("generate", *options), b"the other"),
        (("-", *options), b"the other"),
    ):
        result = run(*arguments, stdin=stdin)
        assert result.returncode == 0, result.stderr
        assert result.stdout.removesuffix("\n") == expected.text.removesuffix("\n")
        assert "tokens/s" in result.stderr
        assert "first after" in result.stderr
    assert run("the other", *options, "--quiet").stderr == ""


def test_generate_json(gguf_path: Path) -> None:
    result = run("the other", "--model", gguf_path, "--json", "--seed", 4, "--max-tokens", 5, "--logprobs", 1)
    value = json.loads(result.stdout)
    with flint_rs.Flint(gguf_path, device="cpu") as flint:
        expected = flint.generate("the other", seed=4, max_tokens=5, logprobs=1)
    assert (value["text"], value["token_ids"], value["seed"]) == (expected.text, expected.token_ids, 4)
    assert expected.logprobs is not None
    assert value["logprobs"][0]["top"][0]["token_id"] == expected.logprobs[0].top[0].token_id
    assert value["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert value["timings"]["load"] > 0


def test_every_sampling_parameter_is_an_option() -> None:
    text = run("generate", "--help").stdout
    for name in dir(flint_rs.SamplingParams):
        if not name.startswith("_"):
            assert f"--{name.replace('_', '-')}" in text


def test_sampling_options_arrive(gguf_path: Path) -> None:
    with flint_rs.Flint(gguf_path, device="cpu") as flint:
        the = flint.tokenize("the")[0]
    options = ("--model", gguf_path, "--max-tokens", 6, "--quiet", "--ignore-eos")
    assert run("in", *options, "--allowed-token-ids", the).stdout == "the" * 6 + "\n"
    assert run("in", *options, "--logit-bias", f"{the}=100").stdout == "the" * 6 + "\n"
    # Another token may be " the", so ids are compared.
    banned = run("in", *options, "--logit-bias", f"{the}=100", "--banned-token-ids", the, "--json").stdout
    assert the not in json.loads(banned)["token_ids"]
    stopped = run("in", *options, "--logit-bias", f"{the}=100", "--stop", "het", "--include-stop-str-in-output")
    assert stopped.stdout == "thethet"[:6] + "\n" or stopped.stdout == "thet\n"


def test_plan(gguf_path: Path) -> None:
    text = run("plan", gguf_path, "--sequences", 2, "--context-tokens", 128)
    assert text.returncode == 0, text.stderr
    for word in ("general, because", "2 x 128 tokens", "general_attention", "step of 2 at position 127"):
        assert word in text.stdout
    fails(run("plan", gguf_path, "--sequences", 257), 2, "sequences", "1 to 256", "257")
    assert flint_rs.plan(gguf_path, sequences=2, context_tokens=128) == text.stdout
    for context in (0, -1, 513, 2**64):
        fails(run("plan", gguf_path, f"--context-tokens={context}"), 2, "context_tokens: ", str(context))


def test_inspect(gguf_path: Path) -> None:
    text = run("inspect", gguf_path)
    assert text.returncode == 0, text.stderr
    for word in ("BF16", "F32", "sliding", "<|user|>", "window 17"):
        assert word in text.stdout
    facts = json.loads(run("inspect", gguf_path, "--json").stdout)
    assert facts == flint_rs.inspect(gguf_path)
    with flint_rs.Flint(gguf_path, device="cpu") as flint:
        assert facts["config"] == flint.config
        assert [token["id"] for token in facts["tokenizer"]["end_tokens"]] == flint.end_token_ids
    assert {kind["dtype"] for kind in facts["tensors"]} == {"BF16", "F32"}


def test_convert(gguf_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    result = run("convert", gguf_path, target, "--type", "nvfp4")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "\r" not in result.stderr, "no bar when standard error is no terminal"
    types = {tensor.tensor_type for tensor in gguf.GGUFReader(target).tensors}
    assert gguf.GGMLQuantizationType.NVFP4 in types
    assert run("the", "--model", target, "--max-tokens", 3).returncode == 0
    size = target.stat().st_size
    fails(run("convert", gguf_path, target, "--type", "bf16"), 2, "dst", "small.gguf")
    assert target.stat().st_size == size
    assert run("convert", gguf_path, target, "--type", "bf16", "--overwrite").returncode == 0
    assert target.stat().st_size > size
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_perplexity(gguf_path: Path, tmp_path: Path) -> None:
    text = "the other ring\n" * 40
    file = tmp_path / "text.txt"
    file.write_text(text)
    with flint_rs.Flint(gguf_path, device="cpu") as flint:
        ids = flint.tokenize(text)
        scores = [float(x) for start in range(0, len(ids), 50) for x in flint.score(ids[start : start + 50])]
    expected = math.exp(-sum(scores) / len(scores))
    for source, stdin in ((file, b""), ("-", text.encode())):
        result = run("perplexity", source, "--model", gguf_path, "--window", 50, stdin=stdin)
        words = result.stdout.split()
        assert float(words[1]) == pytest.approx(expected, rel=1e-4)
        assert f"{len(scores)} tokens" in result.stdout
    fails(run("perplexity", file, "--model", gguf_path, "--window", 1), 2, "window", "512")
    file.write_text("")
    fails(run("perplexity", file, "--model", gguf_path), 2, "text.txt")
    fails(run("perplexity", "", "--model", gguf_path), 1, "No such file", "''")


@pytest.mark.parametrize(
    "command", [(), ("generate",), ("inspect",), ("plan",), ("convert",), ("perplexity",)], ids=str
)
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.returncode == 0
    assert f"example: flint-rs {' '.join(command)}".rstrip() in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"flint-rs {flint_rs.__version__}\n"


def test_wrong_usage(gguf_path: Path, tmp_path: Path) -> None:
    fails(run("generate", "--no-such-option"), 2, "--no-such-option")
    fails(run("convert", "a", "b", "--type", "q4"), 2, "q4")
    fails(run("inspect"), 2, "FILE")
    fails(run("the", "--model", gguf_path, "--temperature", "hot"), 2, "--temperature", "hot")
    fails(run("the", "--model", gguf_path, "--temperature=-1"), 2, "temperature", "-1")
    fails(run("the", "--model", gguf_path, "--logit-bias", "x"), 2, "ID=BIAS")
    fails(run("the", "--model", gguf_path, "--logprobs", "1"), 2, "--json")
    fails(run("the", "--model", gguf_path, "--threads", "0"), 2, "threads")
    fails(run(b"the \xff", "--model", gguf_path), 2, "prompt", "lone surrogate '\\udcff' at position 4")
    fails(run("", "--model", gguf_path), 2, "prompt")
    fails(run("1", "--model", gguf_path, "--synthetic", "nvfp4"), 2, "--synthetic", "--model")
    fails(run("the", "--model", gguf_path, "--context-tokens", "0"), 2, "context_tokens")
    fails(run("the", "--model", tmp_path / "none.gguf"), 1, "none.gguf")
    fails(run("inspect", __file__), 1, "test_cli.py")
    fails(run("-", "--model", gguf_path, stdin=b"\xff"), 2, "standard input", "UTF-8", "0xff")


def test_a_closed_pipe_ends_quietly(gguf_path: Path) -> None:
    command = [*COMMAND, "the other", "--model", str(gguf_path), "--max-tokens", "400", "--ignore-eos", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
    assert child.returncode == 0


def test_interrupted(slow_path: Path) -> None:
    command = [*COMMAND, "the other", "--model", str(slow_path), "--device", "reference", "--max-tokens", "400"]
    with subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        start = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert time.monotonic() - start < 2
    assert child.returncode == 130
    assert err == b""


def test_interrupted_again_while_it_ends(slow_path: Path) -> None:
    # Wherever the second one comes: while it waits for its thread, returns, or Python ends.
    for pause in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08):
        command = [*COMMAND, "the other", "--model", str(slow_path), "--device", "reference", "--ignore-eos"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.read(1)
            for _ in range(2):
                child.send_signal(signal.SIGINT)
                time.sleep(pause)
            _, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (130, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_leaves_no_part_of_a_file(slow_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [*COMMAND, "convert", str(slow_path), str(tmp_path / "a.gguf"), "--type", "nvfp4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while not list(tmp_path.iterdir()):
            assert child.poll() is None
            time.sleep(0.001)
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (128 + number, b"")
    assert list(tmp_path.iterdir()) == []


def test_text_is_utf8_whatever_the_locale(gguf_path: Path) -> None:
    with flint_rs.Flint(gguf_path, device="cpu") as flint:
        ids = flint.tokenize("é漢")
        params = flint_rs.SamplingParams(max_tokens=20, seed=3, ignore_eos=True, allowed_token_ids=ids)
        expected = flint.generate("é漢", params).text
    options = ["--model", str(gguf_path), "--device", "cpu", "--max-tokens", "20", "--quiet", "--seed", "3"]
    found = subprocess.run(
        [*COMMAND, "-", *options, "--ignore-eos", "--allowed-token-ids", *map(str, ids)],
        input="é漢".encode(),
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )
    assert (found.returncode, found.stderr) == (0, b"")
    assert found.stdout.decode().removesuffix("\n") == expected
    assert not expected.isascii()


def test_a_terminal_sees_a_bar(gguf_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "perplexity", "-", "--model", str(gguf_path), "--window", "4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs) as child:
        os.close(theirs)
        out, _ = child.communicate(b"the other ring\n" * 10, timeout=60)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert child.returncode == 0
    assert b"perplexity" in out
    assert "scoring [" in drawn
    assert drawn.endswith(" \r"), "wiped in the end"


def test_the_shipped_model_is_the_default() -> None:
    assert flint_rs.SMALL_MODEL.is_file()
    result = run("def main():", "--max-tokens", 8, "--seed", 1, "--json")
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["usage"]["completion_tokens"] >= 1
    with flint_rs.Flint(flint_rs.SMALL_MODEL, device="cpu") as flint:
        assert value["token_ids"] == flint.generate("def main():", max_tokens=8, seed=1).token_ids


def test_closed_standard_streams(gguf_path: Path) -> None:
    def shell(redirection: str) -> subprocess.CompletedProcess[str]:
        command = f'"$0" -m flint_rs.cli - --model "$1" --max-tokens 2 {redirection}'
        arguments = ["sh", "-c", command, sys.executable, gguf_path]
        return subprocess.run(arguments, input="the", capture_output=True, text=True, timeout=60, check=False)

    fails(shell(">&-"), 1, "standard output is closed")
    fails(shell("<&-"), 2, "prompt")
    assert shell("2>&-").returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_error_costs_no_result(gguf_path: Path) -> None:
    def shell(arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", f'"$0" -m flint_rs.cli {arguments} 2>/dev/full', sys.executable, gguf_path]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=60, check=False, stdin=subprocess.DEVNULL
        )

    text = shell('the --model "$1" --max-tokens 5 --ignore-eos --seed 3')
    assert (text.returncode, len(text.stdout) > 0) == (0, True)
    result = shell('the --model "$1" --max-tokens 5 --ignore-eos --seed 3 --json')
    assert result.returncode == 0
    assert json.loads(result.stdout)["text"] == text.stdout.removesuffix("\n")
    assert shell('the --model "$1" --threads 0').returncode == 2
    assert shell("--no-such-option").returncode == 2


def test_text_that_is_not_utf8_is_named(gguf_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"ab\xff")
    fails(run("perplexity", path, "--model", gguf_path), 2, "bad.txt", "UTF-8", "0xff", "position 2")


def test_convert_refuses_a_destination_before_it_works(gguf_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    fails(run("convert", gguf_path, folder, "--type", "bf16", "--overwrite"), 2, "dst", "folder.gguf")
    fails(run("convert", gguf_path, tmp_path / "none" / "a.gguf", "--type", "bf16"), 1, "No such file", "none")
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "nowhere")
    fails(run("convert", gguf_path, link, "--type", "bf16"), 2, "dst", "link.gguf")
