"""`Flint`: the core's `Model`, with downloads, a progress bar and an asynchronous stream."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flint_rs import hub
from flint_rs._core import Event, InvalidValueError, Model, SamplingParams
from flint_rs._log import say
from flint_rs._progress import Bar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from typing import Literal, TypeVar

    from typing_extensions import Self, Unpack

    from flint_rs._options import SamplingOptions

    _Model = TypeVar("_Model", bound=Model)


def _report(model: _Model, device: str) -> _Model:
    """Says what computes, unless the caller chose the CPU."""
    if device in ("auto", "cuda"):
        say(model.device)
    return model


def synthetic_source(
    seed: int, dims: Mapping[str, Any] | str | os.PathLike[str] | None, format: str
) -> tuple[int, str, str, bool]:
    """What the core makes a synthetic model from."""
    if isinstance(dims, (str, os.PathLike)) and os.fspath(dims):
        return seed, Path(dims).read_text(encoding="utf-8"), format, True
    if dims is None or isinstance(dims, Mapping):
        values = dict(dims or {})
        try:
            return seed, json.dumps(values, allow_nan=False), format, False
        except (TypeError, ValueError) as error:
            msg = f"dims: expected values that JSON can write, found {reprlib.repr(values)}: {error}"
            raise (TypeError if isinstance(error, TypeError) else InvalidValueError)(msg) from None
    msg = f"dims: expected None, a dict with keys of a config.json, or the path of one, found {dims!r}"
    raise TypeError(msg)


class Flint(Model):
    """A Flint, ready to run.

    Loading shows a progress bar on a terminal. Where the device is left open, or is the GPU, loading also says in one
    line which one it took and why, at level INFO of the logger `flint_rs`: on standard error, or by the levels and
    handlers of an application that configured `logging`. `logging.getLogger("flint_rs").setLevel("WARNING")` keeps it
    quiet. Threads may share an object; each generation has its own state. Leaving the `with` block closes it.

    Args:
        path_or_repo: A GGUF file, a folder of safetensors, or a repository (see `flint_rs.hub`).
        device: `"auto"`: the GPU when one is usable, which takes a driver, a card and enough memory, else the CPU.
            `"cuda"`: the first GPU; an error when it is not usable. `"cpu"`: threads and SIMD. `"reference"`: the
            specification that all else is tested against, slow.
        dtype: Of activations. `"bfloat16"` rounds where Flint's own implementation rounds, `"float32"` nowhere, which
            the CPU alone does.
        threads: Of the CPU, at most one a core, which `None` takes.
        max_sequences: Sequences that the GPU runs at a time, 1 to 256, and sets memory aside for; more wait for a
            place. A stream that nobody reads has its place for as long as it is open, but once others wait, only until
            its last token. While at most 8 run, what each gives is the same to the last bit in any company. A step of
            9 to 256 adds in another order, the same for all of these numbers: a near tie may then fall otherwise.
        context_tokens: Most tokens of a sequence, prompt and output together. `None` takes the model's context length,
            cut to what fits the GPU's memory, which the line above then says.

    Raises:
        CheckpointError: If the file breaks its format or is no Flint.
        OSError: If the file cannot be read.
        InvalidValueError: If an argument is outside what is accepted.
        UnavailableError: If the device or the repository is not available.
        DeviceError: If the GPU fails.
    """

    def __new__(
        cls,
        path_or_repo: str | os.PathLike[str],
        device: Literal["auto", "cuda", "cpu", "reference"] = "auto",
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        threads: int | None = None,
        max_sequences: int = 8,
        context_tokens: int | None = None,
    ) -> Self:
        """Loads the checkpoint."""
        path = hub.resolve(path_or_repo)
        with Bar(f"loading {path.name}") as bar:
            model = super().__new__(cls, path, device, dtype, threads, max_sequences, context_tokens, bar)
        return _report(model, device)

    @classmethod
    def synthetic(
        cls,
        seed: int = 0,
        dims: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        format: Literal["nvfp4", "bf16"] = "nvfp4",
        device: Literal["auto", "cuda", "cpu", "reference"] = "auto",
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        threads: int | None = None,
        max_sequences: int = 8,
        context_tokens: int | None = None,
    ) -> Self:
        """A Flint of random weights, made on the device: for benches. Its text means nothing and it has no tokenizer.

        The published size is 23 GB as NVFP4 and 80 GB as BF16; a few cores of a CPU take 15 s to a minute to make
        23 GB, a GPU about a second.

        Prompts are token ids; `Event.text` and `Result.text` are empty; `tokenize` and `detokenize` raise
        `UnavailableError`. The same seed gives the same weights on every device.

        Args:
            seed: Of the weights.
            dims: Keys of a config.json, or the path of one, that replace those of the published 40B model, such as
                `{"num_hidden_layers": 5}`. Keys that change nothing here, such as `eos_token_id`, are an error, and
                passed over in a file.
            format: Of the matrices.
            device: As for a checkpoint. The CPU takes what its memory holds.
            dtype: As for a checkpoint.
            threads: As for a checkpoint.
            max_sequences: As for a checkpoint.
            context_tokens: As for a checkpoint.

        Raises:
            InvalidValueError: If an argument is outside what is accepted.
            OSError: If `dims` is a file that cannot be read.
            UnavailableError: If the device or the memory is not available.
            DeviceError: If the GPU fails.
        """
        source = synthetic_source(seed, dims, format)
        with Bar("making weights", announced=True) as bar:
            model = super().__new__(cls, source, device, dtype, threads, max_sequences, context_tokens, bar)
        return _report(model, device)

    async def astream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> AsyncGenerator[Event, None]:
        """Streams without blocking the event loop.

        Closing the generator (`aclose`) or cancelling the task that iterates ends the work.

        Args:
            prompt: A text, or token ids.
            params: How to sample; or give its fields as keywords.
            **options: The fields of `SamplingParams`.

        Yields:
            One event a token.
        """
        import asyncio  # costs more than the rest of the import together

        stream = await asyncio.to_thread(self.stream, prompt, params, None, **options)
        try:
            while (event := await asyncio.to_thread(next, stream, None)) is not None:
                yield event
        finally:
            stream.cancel()
