"""The Rust core. Import its names from `flint_rs`."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import CapsuleType, Self, Unpack, disjoint_base

from flint_rs._options import SamplingOptions

__all__ = [
    "CancelledError",
    "CheckpointError",
    "ClosedError",
    "DeviceArray",
    "DeviceError",
    "Event",
    "FlintError",
    "InvalidValueError",
    "Logprob",
    "Model",
    "Result",
    "SamplingParams",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
    "__version__",
    "check_synthetic_request",
    "convert",
    "describe",
    "inspect",
    "plan",
]

__version__: str

class FlintError(Exception):
    """Base of the errors of flint_rs. Errors of the operating system stay what they are in Python: `OSError`."""

class CheckpointError(FlintError, ValueError):
    """A file breaks its format or is not the Flint that this version runs."""

class InvalidValueError(FlintError, ValueError):
    """An argument is outside what is accepted; the message names it."""

class UnavailableError(FlintError, RuntimeError):
    """Something that this machine, build or process does not have."""

class DeviceError(FlintError, RuntimeError):
    """A call to the GPU failed."""

class CancelledError(FlintError, RuntimeError):
    """The work was cancelled before it ended."""

class ClosedError(FlintError, RuntimeError):
    """The model was used after it was closed."""

@final
class SamplingParams:
    """How the tokens of a request are chosen and when it ends. Names and order of operations follow vLLM's.

    The defaults are those that Flint's makers recommend.

    Attributes:
        temperature: Divides the logits; 0 is greedy (ties: lowest id). At least 0.
        top_k: Keeps the k largest logits; 0 or -1 keeps all.
        top_p: Keeps the smallest set of most likely tokens whose mass reaches this. In (0, 1].
        min_p: Drops tokens less likely than this share of the most likely one. In [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in prompt or output. Above 0.
        frequency_penalty: Subtracted once for each time a token stands in the output. In [-2, 2].
        presence_penalty: Subtracted from tokens that stand in the output. In [-2, 2].
        logit_bias: Added to logits, by token id; in [-100, 100].
        allowed_token_ids: If given, only these tokens can be chosen.
        banned_token_ids: These tokens are never chosen.
        seed: Makes the request reproducible; drawn and reported when `None`.
        max_tokens: Most tokens to generate; `None`: until prompt and output fill the context.
        min_tokens: End tokens and stops are held off until so many tokens stand.
        stop: Strings that end the text.
        stop_token_ids: Token ids that end the text, beside the model's own.
        include_stop_str_in_output: Keeps the stop string in the text.
        ignore_eos: Goes on after an end token.
        logprobs: Reports the chosen token's log-probability and those of so many most likely tokens.
        prompt_logprobs: The same for each prompt token after the first.

    Raises:
        InvalidValueError: If a value is outside its range.
        TypeError: If a value is of the wrong type.
    """

    def __new__(
        cls,
        *,
        temperature: float = 1.0,
        top_k: int = 20,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = {},
        allowed_token_ids: Sequence[int] | None = None,
        banned_token_ids: Sequence[int] = (),
        seed: int | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Self: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> dict[int, float]: ...
    @property
    def allowed_token_ids(self) -> list[int] | None: ...
    @property
    def banned_token_ids(self) -> list[int]: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def stop(self) -> list[str]: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @property
    def include_stop_str_in_output(self) -> bool: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def prompt_logprobs(self) -> int | None: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Logprob:
    """A token's log-probability under the raw distribution of the model.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        rank: 1 for the most likely token.
    """

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        chosen: The token that stands there.
        top: The most likely tokens, best first.
    """

    @property
    def chosen(self) -> Logprob: ...
    @property
    def top(self) -> list[Logprob]: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Event:
    """One generated token of a stream.

    Attributes:
        token_id: The token.
        text: The text that became certain with it: whole characters, nothing that may still belong to a stop string.
        logprobs: If the request asked for log-probabilities.
        finish_reason: On the last event: `"stop"` after an end token, stop token or stop string, or `"length"`.
    """

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprobs(self) -> TokenLogprobs | None: ...
    @property
    def finish_reason(self) -> Literal["stop", "length"] | None: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Usage:
    """Token counts.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens generated, an end token included.
    """

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Timings:
    """Where the time went, in seconds.

    Attributes:
        load: Loading the model, once.
        prefill: Reading the prompt, up to the first token.
        decode: All tokens after the first.
        time_to_first_token: From the start of the request to the first token.
        tokens_per_second: Tokens after the first, by `decode`; `None` when there was only one.
    """

    @property
    def load(self) -> float: ...
    @property
    def prefill(self) -> float: ...
    @property
    def decode(self) -> float: ...
    @property
    def time_to_first_token(self) -> float: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Result:
    """A finished generation.

    Attributes:
        text: The generated text.
        token_ids: The generated tokens, an end token included.
        finish_reason: `"stop"` after an end token, stop token or stop string, or `"length"`.
        usage: Token counts.
        logprobs: One entry a generated token, if the request asked.
        prompt_logprobs: One entry a prompt token after the first, if the request asked.
        seed: The seed in use: the request's own, or the one that was drawn.
        timings: Where the time went.
    """

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> Literal["stop", "length"]: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def timings(self) -> Timings: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Stream:
    """An iterator of events. The work ends with `cancel`, with its `with` block, or when the object is dropped.

    The work runs ahead of the reader by a few events only.
    """

    def __iter__(self) -> Self: ...
    def __next__(self) -> Event: ...
    def cancel(self) -> None:
        """Ends the work; the iterator then ends too. May be called at any time, from any thread."""

    @property
    def result(self) -> Result | None:
        """The whole generation, once its last event was read; `None` before, and for ever when it was cancelled."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class DeviceArray:
    """A float32 array `[T, V]` in a GPU's memory, which lives as long as this object or anyone who took it.

    `torch.from_dlpack` and `cupy.asarray` take it without a copy. Its values are complete when the object exists, so no
    stream has to wait for another. It may outlive the `Flint` that made it.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens, and logits of each."""

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """A capsule of DLPack 1.0, or of the form before it where `max_version` asks for no more.

        Raises:
            BufferError: If `stream` is no CUDA stream, `dl_device` another device, or `copy` true.
        """

    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

@disjoint_base
class Model:
    """What `flint_rs.Flint` is built on; use that class.

    Work runs on threads of its own, without the GIL. Ctrl-C in the main thread stops it and raises
    `KeyboardInterrupt`. Every method raises `ClosedError` after `close`, which also ends work that is going on, and
    `UnavailableError` in a process that was forked from the one that loaded the model.
    """

    def __new__(
        cls,
        source: str | os.PathLike[str] | tuple[int, str, str, bool],
        device: str,
        dtype: str,
        threads: int | None,
        max_sequences: int,
        context_tokens: int | None,
        progress: Callable[[int, int], object] | None,
    ) -> Self: ...
    # A str is a Sequence[str] too; the first overload takes it.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Result]:
        """Generates after a prompt, or after each of several: together on a GPU, one after the other on the CPU.

        Args:
            prompt: A text, token ids, or a list of either. Control tokens spelled in a text are plain text; give token
                ids from `tokenize(..., control=True)` where they are meant.
            params: How to sample; or give its fields as keywords.
            progress: Called about 20 times a second, while prompts are read, with the tokens read and the tokens in
                all. A prompt that is read sooner has no call.
            **options: The fields of `SamplingParams`.

        Returns:
            One result for one prompt, a list for a list.

        Raises:
            InvalidValueError: If a prompt is empty, leaves no room for a token in the context, or holds an unknown id
                or a lone surrogate; if a parameter is out of range.
        """

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Starts to generate, and returns an iterator of events, one a token.

        Args:
            prompt: A text, or token ids.
            params: How to sample; or give its fields as keywords.
            progress: As for `generate`, while the first event is waited for.
            **options: The fields of `SamplingParams`.

        Raises:
            InvalidValueError: As for `generate`.
        """

    def tokenize(self, text: str, control: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text.
            control: Whether a control token spelled in the text becomes its id, or stays plain text.
        """

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included. Bytes that are no UTF-8 become U+FFFD."""

    @overload
    def logits(self, token_ids: Sequence[int], on_device: Literal[False] = False) -> NDArray[np.float32]: ...
    @overload
    def logits(self, token_ids: Sequence[int], on_device: Literal[True]) -> DeviceArray:
        """Logits after each token, `[T, V]` of float32.

        Args:
            token_ids: The text.
            on_device: Whether they stay in the GPU's memory, for `torch.from_dlpack` or `cupy.asarray`.

        Raises:
            InvalidValueError: If the text is empty, too long, or holds an unknown id; if `on_device` is asked of a CPU.
            DeviceError: If the GPU's memory does not hold them, or the GPU fails.
        """

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Natural log-probability of each token after the first, given those before it, `[T - 1]`."""

    @property
    def config(self) -> dict[str, Any]:
        """The dimensions, and the kind of each layer."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory.

        `weights_bytes`: weights, mapped from the file where its form allows. `kv_max_bytes`: what a sequence of
        `context_tokens` holds beside them; on a GPU what is set aside for all sequences. `workspace_bytes`: the most
        that one step holds beside both.
        """

    @property
    def device(self) -> str:
        """What computes, in one line for a person; where that was left open, also why."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of a sequence, prompt and output together.

        The model's context length, or less by the argument or by the GPU's memory.
        """

    @property
    def end_token_ids(self) -> list[int]:
        """Ids that end a turn, ascending."""

    @property
    def chat_template(self) -> str | None:
        """The jinja source that renders messages, if the checkpoint has one."""

    @property
    def path(self) -> Path | None:
        """Where the checkpoint was read from; `None` for a synthetic model."""

    def close(self) -> None:
        """Ends all work and lets go of the checkpoint. Closing again does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

def check_synthetic_request(
    source: tuple[int, str, str, bool], context_tokens: int | None, prompt: Sequence[int], params: SamplingParams
) -> None:
    """What is wrong with a request to a synthetic model, before it is made: for the command line.

    Raises:
        InvalidValueError: As `generate` would.
    """

def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds, from its headers: files, config, parameters, tensor types, tokenizer, chat template.

    Args:
        path: A GGUF file, or a folder of safetensors.

    Raises:
        CheckpointError: If it is no Flint.
    """

def describe(path: str | os.PathLike[str]) -> str:
    """The same as `inspect`, for a person."""

def plan(path: str | os.PathLike[str], sequences: int = 1, context_tokens: int | None = None) -> str:
    """What an H200 would do with a checkpoint, from its headers: path, memory, and the kernels of a step.

    Args:
        path: A GGUF file, or a folder of safetensors.
        sequences: How many at a time, 1 to 256.
        context_tokens: Most tokens of each; the model's context length when `None`.

    Raises:
        CheckpointError: If it is no Flint.
        InvalidValueError: If `sequences` or `context_tokens` is out of range.
        UnavailableError: If no kernels run a model of these dimensions.
    """

def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    type: Literal["nvfp4", "bf16"],
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes a Flint GGUF. It has its name only once it is complete.

    The embedding becomes BF16; router, norms and sinks F32. NVFP4 that stays NVFP4 is copied bit for bit.

    Args:
        src: A GGUF file, or a folder of safetensors.
        dst: The file to write; its name ends in `.gguf`.
        type: Of projections, experts and LM head.
        overwrite: Whether to replace a file that has the name already.
        progress: Called about 20 times a second with the bytes written and the bytes in all.

    Raises:
        CheckpointError: If `src` is no Flint, or a tensor of it cannot be of the type.
        InvalidValueError: If `dst` exists, or is part of `src`.
    """
