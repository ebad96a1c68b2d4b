"""The Python API on a GPU. Needs the package, pytest, NumPy and torch, and nothing else of these tests.

On a machine without a usable GPU each test is skipped, and says why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import flint_rs
import numpy as np
import pytest
from flint_rs import Flint


def why_not() -> str:
    """Why there is no GPU to test on; empty where there is one."""
    try:
        Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=1, context_tokens=64).close()
    except (flint_rs.UnavailableError, flint_rs.DeviceError) as error:
        return str(error)
    return ""


REASON = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]

TEXT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n"
PROMPTS = [
    TEXT,
    "import numpy as np\n",
    "fn main() {",
    "The tokenizer",
    "x",
    "class Stack:\n    def push(self",
    "#",
    "for",
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Flint]:
    with Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=4) as flint:
        yield flint


@pytest.fixture(scope="module")
def cpu() -> Iterator[Flint]:
    with Flint(flint_rs.SMALL_MODEL, device="cpu") as flint:
        yield flint


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_auto_takes_the_gpu_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flint_rs"), Flint(flint_rs.SMALL_MODEL, max_sequences=2) as flint:
        assert flint.device.startswith("device cuda: ")
        assert "path general, because" in flint.device
        assert flint.context_tokens == flint.config["context_length"]
        assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
            ("flint_rs", "INFO", flint.device)
        ]


def test_logits_are_those_of_the_cpu(gpu: Flint, cpu: Flint) -> None:
    ids = cpu.tokenize(TEXT * 6)
    assert gpu.tokenize(TEXT * 6) == ids
    found, expected = log_softmax(gpu.logits(ids)), log_softmax(cpu.logits(ids))
    # Both round to BF16 between operations, in other orders of addition: tests/gpu_model.rs bounds it against fp32.
    divergence = (np.exp(expected) * (expected - found)).sum(axis=-1)
    assert divergence.mean() < 1e-3
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.97
    assert gpu.score(ids) == pytest.approx(cpu.score(ids), abs=0.2)
    assert gpu.score(ids) == pytest.approx([found[i, ids[i + 1]] for i in range(len(ids) - 1)], abs=1e-4)


def test_greedy_text_follows_the_cpus(gpu: Flint, cpu: Flint) -> None:
    shared = 0
    for prompt in PROMPTS:
        ours, theirs = gpu.generate(prompt, **GREEDY), cpu.generate(prompt, **GREEDY)
        assert ours.text == gpu.detokenize(ours.token_ids)
        equal = [a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True)]
        shared += equal.index(False) if False in equal else len(equal)
    # A near tie may fall either way, and all after it is another text.
    assert shared > 0.4 * 40 * len(PROMPTS)


def test_a_list_runs_together_and_changes_nothing(gpu: Flint) -> None:
    options = {"seed": 5, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    alone = [gpu.generate(prompt, **options) for prompt in PROMPTS]
    together = gpu.generate(PROMPTS, **options)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.logprobs for result in together] == [result.logprobs for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]
    events = list(gpu.stream(PROMPTS[0], **options))
    assert [event.token_id for event in events] == alone[0].token_ids
    assert "".join(event.text for event in events) == alone[0].text


def test_many_prompts_of_many_lengths_run_together(gpu: Flint) -> None:
    # The small model takes the general path, whose kernels are the same for any number of rows.
    prompts = [TEXT[: 10 + 7 * i] + str(i) for i in range(60)]
    each = [{"seed": i, "max_tokens": 5 + i % 30, "ignore_eos": True} for i in range(60)]
    alone = [gpu.generate(prompt, **options).token_ids for prompt, options in zip(prompts, each, strict=True)]
    with Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=40, context_tokens=1024) as flint:
        found: dict[int, list[int]] = {}

        def work(i: int) -> None:
            found[i] = flint.generate(prompts[i], **each[i]).token_ids

        threads = [threading.Thread(target=work, args=(i,)) for i in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(60)] == alone


def test_streams_of_threads_do_not_touch_each_other(gpu: Flint) -> None:
    expected = {prompt: gpu.generate(prompt, seed=3, max_tokens=60).token_ids for prompt in PROMPTS}
    found: dict[str, list[int]] = {}

    def work(prompt: str) -> None:
        found[prompt] = [event.token_id for event in gpu.stream(prompt, seed=3, max_tokens=60)]

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_sampling_is_that_of_the_logits(gpu: Flint) -> None:
    ids = gpu.tokenize(TEXT)
    result = gpu.generate(ids, temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    rows = log_softmax(gpu.logits(ids + result.token_ids))
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    chosen = [entry.chosen for entry in (*result.prompt_logprobs, *result.logprobs)]
    assert [entry.token_id for entry in chosen] == ids[1:] + result.token_ids
    for row, entry in zip(rows, chosen, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=0.02)
    penalised = gpu.generate(ids, temperature=0, max_tokens=60, ignore_eos=True, frequency_penalty=2.0)
    assert penalised.token_ids != gpu.generate(ids, temperature=0, max_tokens=60, ignore_eos=True).token_ids


def test_stops(gpu: Flint) -> None:
    text = gpu.generate(TEXT, **GREEDY).text
    stop = text[20:24]
    result = gpu.generate(TEXT, **GREEDY, stop=[stop])
    assert (result.text, result.finish_reason) == (text[: text.index(stop)], "stop")
    assert gpu.generate(TEXT, max_tokens=1).usage.completion_tokens == 1


def test_an_error_of_one_request_leaves_the_others(gpu: Flint) -> None:
    bad = {"allowed_token_ids": [5], "banned_token_ids": [5]}
    others = [gpu.stream(prompt, **GREEDY) for prompt in PROMPTS[:2]]
    with pytest.raises(ValueError, match="allowed_token_ids with banned_token_ids"):
        gpu.generate(TEXT, **bad)
    assert all(len(list(stream)) == 40 for stream in others)


def test_a_cancelled_stream_makes_room(gpu: Flint) -> None:
    streams = [gpu.stream(TEXT, max_tokens=2000, ignore_eos=True) for _ in range(4)]
    for stream in streams:
        next(stream)
    waiting = gpu.stream("x", max_tokens=3, ignore_eos=True)
    streams[0].cancel()
    del streams[1]
    assert len(list(waiting)) == 3
    assert list(streams[0]) == []
    for stream in streams:
        stream.cancel()


def test_the_end_of_the_context() -> None:
    with Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=2, context_tokens=100) as flint:
        assert flint.context_tokens == 100
        results = flint.generate([[1] * 95, [2] * 99, [3] * 10], temperature=0, ignore_eos=True)
        assert [result.usage.completion_tokens for result in results] == [5, 1, 90]
        with pytest.raises(ValueError, match="at most 99 tokens, to leave room for one in a context of 100, found 100"):
            flint.generate([1] * 100)
        assert flint.score([1] * 100).shape == (99,)


def free_memory() -> int:
    """Bytes of the card, which no other process may use meanwhile."""
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    return torch.cuda.mem_get_info()[0]


def test_memory_is_told_and_given_back() -> None:
    before = free_memory()
    dims = {"num_hidden_layers": 4, "vocab_size": 4096, "max_position_embeddings": 16384}
    with Flint.synthetic(dims=dims, device="cuda", max_sequences=8) as flint:
        held = before - free_memory()
        told = sum(flint.memory.values())
        assert told <= held <= told + (1 << 30)
    assert free_memory() >= before - (64 << 20)


def test_device_arrays(gpu: Flint) -> None:
    torch = pytest.importorskip("torch")
    ids = gpu.tokenize(TEXT)
    expected = gpu.logits(ids)
    array = gpu.logits(ids, on_device=True)
    assert array.shape == expected.shape
    assert array.__dlpack_device__() == (2, 0)
    interface = array.__cuda_array_interface__
    assert (interface["version"], interface["typestr"], interface["shape"]) == (3, "<f4", expected.shape)
    tensor = torch.from_dlpack(array)
    assert (tensor.data_ptr(), tensor.device.type, tensor.dtype) == (interface["data"][0], "cuda", torch.float32)
    assert (tensor.cpu().numpy() == expected).all()
    assert (torch.as_tensor(array, device="cuda").data_ptr(), tensor.stride()) == (
        tensor.data_ptr(),
        (expected.shape[1], 1),
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        assert (torch.from_dlpack(array).cpu().numpy() == expected).all()
    del array
    assert (tensor.cpu().numpy() == expected).all()


def test_a_stream_keeps_no_call_of_its_reader_waiting() -> None:
    options = {"seed": 3, "max_tokens": 1500, "ignore_eos": True}
    with Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=1) as flint:
        with flint.stream(TEXT, **options) as stream:
            token_ids = [next(stream).token_id]
            assert flint.score(flint.tokenize(TEXT)).size > 1
            token_ids += [event.token_id for event in stream]
        assert token_ids == flint.generate(TEXT, **options).token_ids


def test_device_arrays_in_cupy(gpu: Flint) -> None:
    cupy = pytest.importorskip("cupy")
    ids = gpu.tokenize(TEXT)
    array = gpu.logits(ids, on_device=True)
    for taken in (cupy.asarray(array), cupy.from_dlpack(array)):
        assert taken.data.ptr == array.__cuda_array_interface__["data"][0]
        assert (cupy.asnumpy(taken) == gpu.logits(ids)).all()


def test_device_arrays_outlive_their_model_and_are_freed() -> None:
    torch = pytest.importorskip("torch")
    before = free_memory()
    flint = Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=1)
    ids = flint.tokenize(TEXT * 20)
    expected, array = flint.logits(ids), flint.logits(ids, on_device=True)
    flint.close()
    tensor = torch.from_dlpack(array)
    del array, flint
    assert (tensor.cpu().numpy() == expected).all()
    held = before - free_memory()
    assert held >= tensor.numel() * 4
    del tensor
    assert free_memory() >= before - (64 << 20)


def test_capsules(gpu: Flint) -> None:
    array = gpu.logits([1, 2], on_device=True)
    for version, name in (
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((2, 1), "dltensor_versioned"),
    ):
        assert f'"{name}"' in repr(array.__dlpack__(max_version=version))
    for stream in (None, -1, 1, 2, 12345678):
        array.__dlpack__(stream=stream)
    array.__dlpack__(dl_device=(2, 0), copy=False)
    for arguments in ({"stream": 0}, {"stream": -2}, {"stream": "s"}, {"dl_device": (1, 0)}, {"copy": True}):
        with pytest.raises(BufferError, match=next(iter(arguments))):
            array.__dlpack__(**arguments)


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_synthetic_weights_are_the_same_on_every_device(form: Any) -> None:
    dims = {"num_hidden_layers": 3, "vocab_size": 2048, "max_position_embeddings": 2048}
    ids = list(range(1, 60))
    with Flint.synthetic(7, dims, form, device="cuda") as gpu, Flint.synthetic(7, dims, form, device="cpu") as cpu:
        assert "path fast" in gpu.device
        found, expected = log_softmax(gpu.logits(ids)), log_softmax(cpu.logits(ids))
        assert (np.exp(expected) * (expected - found)).sum(axis=-1).mean() < 1e-2
        prompts = [[i, i + 1, i + 2] for i in range(1, 21)]
        options = {"max_tokens": 25, "seed": 1}
        together = gpu.generate(prompts, **options)
        assert [r.token_ids for r in together] == [gpu.generate(p, **options).token_ids for p in prompts]


# Of Python 3.12: forking with threads is what is tested.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_close_and_fork() -> None:
    flint = Flint(flint_rs.SMALL_MODEL, device="cuda", max_sequences=1)
    child = os.fork()
    if child == 0:
        try:
            flint.generate("x")
        except flint_rs.UnavailableError:
            del flint
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stream = flint.stream(TEXT, max_tokens=2000, ignore_eos=True)
    next(stream)
    flint.close()
    for use in (lambda: flint.generate("x"), lambda: flint.logits([1]), lambda: list(stream)):
        with pytest.raises(flint_rs.ClosedError):
            use()
