"""What the Python API promises, apart from the numbers that the model computes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import flint_rs
import numpy as np
import pytest
import reference
import torch
from flint_rs import Flint, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def test_generate_one_and_many(flint: Flint) -> None:
    ids = flint.tokenize("the other")
    one = flint.generate("the other", **GREEDY)
    assert isinstance(one, flint_rs.Result)
    assert flint.generate(ids, **GREEDY).token_ids == one.token_ids
    assert flint.generate(np.array(ids), **GREEDY).token_ids == one.token_ids
    many = flint.generate(["the other", "in"], **GREEDY)
    assert [result.token_ids for result in many] == [one.token_ids, flint.generate("in", **GREEDY).token_ids]
    assert [result.text for result in flint.generate([ids], **GREEDY)] == [one.text]


def test_result_fields(flint: Flint) -> None:
    result = flint.generate(
        "the other", SamplingParams(max_tokens=8, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=1)
    )
    prompt = flint.tokenize("the other")
    assert result.text == flint.detokenize(result.token_ids)
    assert result.finish_reason == "length"
    assert result.usage == flint.generate("the other", max_tokens=8, ignore_eos=True).usage
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(prompt), 8)
    assert result.seed == 3
    assert result.logprobs is not None
    assert [entry.chosen.token_id for entry in result.logprobs] == result.token_ids
    assert all(len(entry.top) == 2 and entry.top[0].rank == 1 for entry in result.logprobs)
    assert result.prompt_logprobs is not None
    assert [entry.chosen.token_id for entry in result.prompt_logprobs] == prompt[1:]
    times = result.timings
    assert times.load > 0
    assert 0 < times.prefill <= times.time_to_first_token
    assert times.tokens_per_second == pytest.approx(7 / times.decode)
    assert flint.generate("in", max_tokens=1).timings.tokens_per_second is None
    assert flint.generate("in", max_tokens=1).logprobs is None


def test_logprobs_are_those_of_the_logits(flint: Flint) -> None:
    prompt = flint.tokenize("the other")
    result = flint.generate(prompt, **GREEDY, logprobs=3, prompt_logprobs=0)
    rows = torch.log_softmax(torch.from_dlpack(flint.logits(prompt + result.token_ids)), dim=-1).numpy()
    chosen = [entry.chosen for entry in (*(result.prompt_logprobs or ()), *(result.logprobs or ()))]
    for row, entry in zip(rows, chosen, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=0.05)
    assert flint.score(prompt) == pytest.approx(
        [entry.chosen.logprob for entry in result.prompt_logprobs or ()], abs=1e-4
    )


def test_stream_equals_generate(flint: Flint) -> None:
    options = {"seed": 11, "max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    result = flint.generate("the other", **options)
    stream = flint.stream("the other", **options)
    assert stream.result is None
    events = list(stream)
    assert [event.token_id for event in events] == result.token_ids
    assert "".join(event.text for event in events) == result.text
    assert [event.logprobs for event in events] == result.logprobs
    assert [event.finish_reason for event in events] == [None] * 29 + ["length"]
    assert stream.result is not None
    assert (stream.result.text, stream.result.usage, stream.result.seed) == (result.text, result.usage, 11)
    assert list(stream) == []


def test_progress_of_prompts(slow_flint: Flint) -> None:
    # The reference path takes blocks of 512, so the first call comes before any of them.
    for start in (
        lambda progress: slow_flint.generate([[1] * 40, [2] * 30], max_tokens=1, progress=progress),
        lambda progress: list(slow_flint.stream([1] * 70, max_tokens=1, progress=progress)),
    ):
        seen: list[tuple[int, int]] = []
        began = time.monotonic()
        start(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen
        assert all(done < total == 70 for done, total in seen)
        # About 20 times a second, as documented.
        assert 1 <= len(seen) <= 25 * (time.monotonic() - began)
        assert sorted(seen) == seen

        def stop(done: int, total: int) -> None:
            raise RuntimeError(done, total)

        with pytest.raises(RuntimeError):
            start(stop)
    # Which would look like the end of the stream.
    ends = iter(()).__next__
    with pytest.raises(RuntimeError, match="progress raised StopIteration") as raised:
        list(slow_flint.stream([1] * 70, max_tokens=1, progress=lambda *_: ends()))
    assert isinstance(raised.value.__cause__, StopIteration)
    assert slow_flint.generate([1], max_tokens=1, progress=lambda *_: None).usage.prompt_tokens == 1
    # Also of a prompt that is too short for a call.
    for start in (slow_flint.generate, slow_flint.stream):
        with pytest.raises(TypeError, match="progress: expected None or a callable, found 5"):
            start([1], max_tokens=1, progress=5)  # type: ignore[call-overload]


def test_astream_equals_stream(flint: Flint) -> None:
    async def collect() -> list[flint_rs.Event]:
        return [event async for event in flint.astream("the other", seed=5, max_tokens=20)]

    assert asyncio.run(collect()) == list(flint.stream("the other", seed=5, max_tokens=20))


def test_astream_leaves_the_loop_free_and_ends_when_cancelled(slow_flint: Flint) -> None:
    async def watch() -> tuple[int, float]:
        ticks = 0

        async def read() -> None:
            async for _ in slow_flint.astream("the other", max_tokens=400, ignore_eos=True):
                pass

        task = asyncio.create_task(read())
        while ticks < 20:
            await asyncio.sleep(0.01)
            ticks += 1
        assert not task.done()
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ticks, time.monotonic() - start

    ticks, seconds = asyncio.run(watch())
    assert ticks == 20
    assert seconds < 2


def test_seeds(flint: Flint) -> None:
    first = flint.generate("the", max_tokens=40, ignore_eos=True)
    again = flint.generate("the", max_tokens=40, ignore_eos=True, seed=first.seed)
    other = flint.generate("the", max_tokens=40, ignore_eos=True, seed=first.seed ^ 1)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def test_threads_share_an_object(flint: Flint) -> None:
    prompts = [f"the {word}" for word in ("in", "er", "re", "12", "other", "ret")]
    options = {"max_tokens": 24, "ignore_eos": True, "seed": 9}
    expected = {prompt: flint.generate(prompt, **options).token_ids for prompt in prompts}
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda prompt=prompt: found.update({prompt: flint.generate(prompt, **options).token_ids})
        )
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_gil_is_free_while_it_works(slow_flint: Flint) -> None:
    done = threading.Event()

    def work() -> None:
        slow_flint.generate("the other", max_tokens=20, ignore_eos=True)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def workers() -> int:
    """Threads of this process that work for a call; those of a pool have other names."""
    names = []
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append(name.read_text().strip())
    return names.count("flint-rs")


def wait_for_workers(count: int) -> None:
    """The system lists a thread for a moment after it was joined."""
    deadline = time.monotonic() + 2
    while workers() != count:
        assert time.monotonic() < deadline, f"{workers()} workers, not {count}"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["cancel", "with", "drop"])
def test_a_stream_ends_its_work(slow_flint: Flint, how: str) -> None:
    wait_for_workers(0)  # the one that loaded the model may still be on its way out
    stream = slow_flint.stream("the other", max_tokens=400, ignore_eos=True)
    with stream if how == "with" else contextlib.nullcontext():
        next(stream)
        wait_for_workers(1)
        if how == "cancel":
            stream.cancel()
    if how == "drop":
        del stream
    else:
        assert list(stream) == []
        assert stream.result is None
    wait_for_workers(0)


def test_a_stream_in_a_circle_ends_with_it(slow_flint: Flint) -> None:
    class Reader:
        def __init__(self) -> None:
            self.stream = slow_flint.stream([1] * 20, max_tokens=400, ignore_eos=True, progress=self.show)

        def show(self, done: int, total: int) -> None:
            pass

    wait_for_workers(0)
    reader = Reader()
    next(reader.stream)
    wait_for_workers(1)
    del reader
    gc.collect()
    wait_for_workers(0)


def test_cancel_from_another_thread_ends_a_waiting_reader(slow_flint: Flint) -> None:
    stream = slow_flint.stream(list(range(200)), max_tokens=400, ignore_eos=True)
    timer = threading.Timer(0.2, stream.cancel)
    timer.start()
    start = time.monotonic()
    events = list(stream)
    assert time.monotonic() - start < 2.2
    assert len(events) < 400
    timer.join()


def test_use_after_close(gguf_path: Path) -> None:
    flint = Flint(gguf_path, device="cpu")
    stream = flint.stream("the other", max_tokens=500, ignore_eos=True)
    flint.close()
    flint.close()
    for use in (
        lambda: flint.generate("the"),
        lambda: flint.stream("the"),
        lambda: flint.tokenize("the"),
        lambda: flint.detokenize([1]),
        lambda: flint.logits([1]),
        lambda: flint.score([1, 2]),
        lambda: flint.config,
        lambda: flint.memory,
        lambda: flint.__enter__(),
        lambda: list(stream),
    ):
        with pytest.raises(flint_rs.ClosedError, match="closed"):
            use()


def test_close_ends_running_work(slow_path: Path) -> None:
    flint = Flint(slow_path, device="reference")
    timer = threading.Timer(0.3, flint.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(flint_rs.ClosedError):
        flint.generate("the other", max_tokens=400, ignore_eos=True)
    assert time.monotonic() - start < 2.3
    timer.join()


FORK = """
import os, sys, warnings
import flint_rs
warnings.simplefilter("ignore")  # later Pythons warn of forking with threads, which is what is tested
flint = flint_rs.Flint(sys.argv[1], device="cpu")
stream = flint.stream("the other", max_tokens=100, ignore_eos=True)
next(stream)
if os.fork() == 0:
    for use in (lambda: flint.generate("the"), lambda: next(stream), lambda: flint.close(), lambda: flint.config):
        try:
            use()
        except flint_rs.UnavailableError as error:
            assert "fork" in str(error), error
        else:
            os._exit(3)
    del stream, flint
    # What the errors advise.
    with flint_rs.Flint(sys.argv[1], device="cpu") as anew:
        assert anew.generate("the", max_tokens=2).usage.completion_tokens >= 1
    flint_rs.convert(sys.argv[1], sys.argv[2], type="nvfp4")
    os._exit(7)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7, status
assert flint.generate("the", max_tokens=2).usage.completion_tokens >= 1
assert len(list(stream)) == 99
print("both fine")
"""


def test_after_fork(gguf_path: Path, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", FORK, gguf_path, tmp_path / "converted.gguf"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.stdout, child.stderr) == ("both fine\n", "")


def test_what_the_code_of_a_value_raises_is_not_hidden(flint: Flint) -> None:
    class Stubborn:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            raise KeyboardInterrupt

        def __index__(self) -> int:
            raise KeyboardInterrupt

        def __float__(self) -> float:
            raise KeyboardInterrupt

    for use in (
        lambda: flint.generate([1, Stubborn()]),
        lambda: flint.logits([Stubborn()]),
        lambda: SamplingParams(temperature=Stubborn()),  # type: ignore[arg-type]
        lambda: SamplingParams(seed=Stubborn()),  # type: ignore[arg-type]
    ):
        with pytest.raises(KeyboardInterrupt):
            use()


def test_tokenize(flint: Flint) -> None:
    source = reference.tokenizer()
    assert flint.tokenize("the other 12\n") == source.encode("the other 12\n").ids
    assert flint.detokenize(flint.tokenize("naïve 漢字")) == "naïve 漢字"
    user = source.token_to_id("<|user|>")
    assert flint.tokenize("<|user|>in", control=True)[0] == user
    assert user not in flint.tokenize("<|user|>in")
    assert user in flint.end_token_ids
    assert flint.chat_template is None


def test_config_and_memory(flint: Flint, gguf_path: Path) -> None:
    shape = reference.SHAPES[0]
    assert flint.config["hidden_size"] == shape.hidden
    assert flint.config["vocab_size"] == reference.VOCAB_SIZE
    assert flint.config["rms_norm_eps"] == reference.config(shape).rms_norm_eps
    assert [layer["mlp"] for layer in flint.config["layers"]] == ["dense", "dense", "moe", "moe", "moe"]
    assert [layer["attention"] for layer in flint.config["layers"]] == ["full", "full", "sliding", "sliding", "full"]
    assert [layer["rope"] for layer in flint.config["layers"]] == [False, False, True, True, False]
    assert flint.memory.keys() == {"weights_bytes", "kv_max_bytes", "workspace_bytes"}
    assert 0 < flint.memory["weights_bytes"] <= gguf_path.stat().st_size
    # Keys and values of BF16: two layers see the whole context, the last too, and two a window.
    full = 3 * 512 * shape.kv_heads * shape.head_dim * 2 * 2
    assert full < flint.memory["kv_max_bytes"] <= 2 * full
    assert flint.path == gguf_path


def test_logits_are_plain_arrays(flint: Flint) -> None:
    logits = flint.logits([1, 2, 3])
    assert (logits.dtype, logits.shape) == (np.float32, (3, reference.VOCAB_SIZE))
    assert logits.flags.c_contiguous
    assert logits.flags.writeable
    assert torch.from_dlpack(logits).data_ptr() == logits.ctypes.data
    assert flint.score([1, 2, 3]).shape == (2,)


ARGUMENTS = [
    ({"path_or_repo": 5}, TypeError, "path_or_repo"),
    ({"device": "tpu"}, ValueError, "device.*tpu"),
    ({"device": 1}, TypeError, "device"),
    ({"dtype": "float16"}, ValueError, "dtype.*float16"),
    ({"dtype": None}, TypeError, "dtype"),
    ({"threads": 0}, ValueError, r"^threads: expected None or 1 to \d+, the cores .*, found 0$"),
    ({"threads": 2**20}, ValueError, rf"^threads: expected None or 1 to \d+, the cores .*, found {2**20}$"),
    ({"threads": -1}, ValueError, r"^threads: .*, found -1$"),
    ({"threads": "two"}, TypeError, "threads"),
    ({"threads": 2, "device": "reference"}, ValueError, "threads.*reference"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), ARGUMENTS, ids=str)
def test_constructor_arguments(gguf_path: Path, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Flint(**{"path_or_repo": gguf_path, "device": "cpu", **arguments})


PROMPTS: list[tuple[Any, type[Exception], str]] = [
    (5, TypeError, "prompt"),
    (None, TypeError, "prompt"),
    (b"bytes", TypeError, "prompt"),
    ("", ValueError, "prompt"),
    ([], ValueError, "prompt"),
    (["in", ""], ValueError, r"prompt\[1\]"),
    (["in", 5], TypeError, r"prompt\[1\]"),
    ([[1], []], ValueError, r"prompt\[1\]"),
    ([1, "a"], TypeError, r"prompt\[1\]"),
    ([1, -1], ValueError, r"prompt\[1\]"),
    ([1, 2**40], ValueError, r"prompt\[1\]"),
    ([1, 5000], ValueError, r"prompt\[1\].*5000"),
    ([[1, 2], [3, 5000]], ValueError, r"prompt\[1\]\[1\].*5000"),
    ([1.5, 2], TypeError, r"prompt\[0\]"),
    ([1] * 513, ValueError, "prompt.*513"),
    ([1] * 512, ValueError, "prompt.*511.*512"),
    ([1, 2**64], ValueError, r"^prompt\[1\]: expected a token id from 0 to 2\*\*32 - 1, found 18446744073709551616$"),
    ("in\ud800", ValueError, r"^prompt: .* UTF-8 .*, found the lone surrogate '\\ud800' at position 2$"),
    (["in", "\udc80"], ValueError, r"^prompt\[1\]: .*, found the lone surrogate '\\udc80' at position 0$"),
]


@pytest.mark.parametrize(("prompt", "error", "text"), PROMPTS, ids=lambda value: str(value)[:30])
def test_prompts(flint: Flint, prompt: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        flint.generate(prompt, max_tokens=1)


PARAMETERS: list[tuple[str, Any, type[Exception]]] = [
    ("temperature", -0.1, ValueError),
    ("temperature", math.nan, ValueError),
    ("temperature", math.inf, ValueError),
    ("temperature", "hot", TypeError),
    ("top_k", -2, ValueError),
    ("top_k", 1.5, TypeError),
    ("top_k", 2**70, ValueError),
    ("top_p", 0, ValueError),
    ("top_p", 1.01, ValueError),
    ("min_p", -0.1, ValueError),
    ("min_p", 1.1, ValueError),
    ("repetition_penalty", 0, ValueError),
    ("frequency_penalty", 2.1, ValueError),
    ("presence_penalty", -2.1, ValueError),
    ("logit_bias", {1: 101}, ValueError),
    ("logit_bias", {5000: 1}, ValueError),
    ("logit_bias", [1], TypeError),
    ("allowed_token_ids", [], ValueError),
    ("allowed_token_ids", [5000], ValueError),
    ("allowed_token_ids", "in", TypeError),
    ("banned_token_ids", [5000], ValueError),
    ("seed", -1, ValueError),
    ("seed", 2**64, ValueError),
    ("seed", "s", TypeError),
    ("max_tokens", 0, ValueError),
    ("max_tokens", -1, ValueError),
    ("max_tokens", 1.0, TypeError),
    ("min_tokens", -1, ValueError),
    ("stop", "text", TypeError),
    ("stop", [""], ValueError),
    ("stop", [1], TypeError),
    ("stop_token_ids", [5000], ValueError),
    ("include_stop_str_in_output", 1, TypeError),
    ("ignore_eos", None, TypeError),
    ("logprobs", -1, ValueError),
    ("logprobs", 100_000, ValueError),
    ("prompt_logprobs", -1, ValueError),
    ("no_such_parameter", 1, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), PARAMETERS, ids=str)
def test_sampling_parameters(flint: Flint, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        flint.generate("the", **{name: value})


def test_ranges_are_said_whole(flint: Flint) -> None:
    for name, value, accepted in (
        ("top_k", 2**70, "an integer from -1 to 2**63 - 1"),
        ("temperature", 1e300, "a finite number of at least 0"),
        ("max_tokens", 2**64, "None or an integer from 1 to 2**64 - 1"),
        ("max_tokens", -5, "None or an integer from 1 to 2**64 - 1"),
        ("min_tokens", 2**64, "an integer from 0 to 2**64 - 1"),
        ("seed", -1, "None or an integer from 0 to 2**64 - 1"),
        ("logprobs", 2**64, "None or an integer from 0 to 20"),
        ("stop_token_ids", [2**32], "a list of token ids from 0 to 2**32 - 1"),
    ):
        with pytest.raises(flint_rs.InvalidValueError) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"{name}: expected {accepted}, found {value}"
    with pytest.raises(flint_rs.InvalidValueError, match=r"^token_ids\[1\]: expected a token id from 0 .* found -1$"):
        flint.score([1, -1])


def test_lone_surrogates_are_named(flint: Flint) -> None:
    for use, name in (
        (lambda: flint.tokenize("a\ud800"), "text"),
        (lambda: flint.stream("a\ud800"), "prompt"),
        (lambda: SamplingParams(stop=["a\ud800"]), "stop"),
        (lambda: Flint("a\ud800.gguf", device="cpu"), "path"),
    ):
        with pytest.raises(flint_rs.InvalidValueError, match=f"^{name}: expected text that UTF-8 can write, found "):
            use()


def test_params_and_keywords_exclude_each_other(flint: Flint) -> None:
    with pytest.raises(TypeError, match="params"):
        flint.generate("the", SamplingParams(), seed=1)
    with pytest.raises(TypeError, match="params"):
        flint.generate("the", {"seed": 1})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="prompt"):
        flint.stream(["the", "in"])  # type: ignore[arg-type]


def test_sampling_params_is_a_value() -> None:
    params = SamplingParams(temperature=0.3, stop=["a"], logit_bias={3: 0.1}, top_k=-1)
    assert (params.temperature, params.top_p, params.stop, params.logit_bias) == (0.3, 0.95, ["a"], {3: 0.1})
    assert params == SamplingParams(temperature=0.3, stop=["a"], logit_bias={3: 0.1}, top_k=-1)
    assert params != SamplingParams()
    assert eval(repr(params), {"SamplingParams": SamplingParams}) == params
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


def test_errors_of_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf") as raised:
        Flint(tmp_path / "none.gguf")
    assert raised.value.filename == str(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(flint_rs.CheckpointError, match=r"broken\.gguf"):
        Flint(broken)
    assert issubclass(flint_rs.CheckpointError, ValueError)
    assert issubclass(flint_rs.CheckpointError, flint_rs.FlintError)


def test_import_is_light() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import flint_rs; seconds = time.perf_counter() - start\n"
        "print(seconds); print(*sorted({'torch', 'asyncio', 'huggingface_hub', 'transformers'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(3)
    ]
    # The quickest of three: what it takes, not what else this machine was doing.
    assert min(float(run[0]) for run in runs) < 0.3
    assert runs[0][1] == ""


def test_a_sequence_that_claims_to_be_huge(flint: Flint) -> None:
    huge = range(10**12)
    for use in (
        lambda: flint.logits(huge),
        lambda: flint.generate(huge),
        lambda: flint.detokenize(huge),
        lambda: flint_rs.SamplingParams(banned_token_ids=huge),
    ):
        with pytest.raises(flint_rs.InvalidValueError, match="found 1000000000000 items"):
            use()


def test_an_error_shows_no_more_than_a_line_of_a_value() -> None:
    with pytest.raises(TypeError, match=r"^temperature: .* \.\.\.$") as caught:
        flint_rs.SamplingParams(temperature=[8171] * 100_000)
    assert len(str(caught.value)) < 300


def test_a_numpy_that_cannot_be_imported_is_an_error(gguf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no such luck')")
    code = f"""
import flint_rs
with flint_rs.Flint({str(gguf_path)!r}, device="cpu") as flint:
    for call in (flint.logits, flint.score):
        try:
            call([1, 2])
        except ImportError as error:
            print(error)
    print(flint.generate([1], max_tokens=2, ignore_eos=True).usage.completion_tokens)
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout.split("\n")[:3]) == (0, ["no such luck", "no such luck", "2"]), (
        result.stderr
    )
