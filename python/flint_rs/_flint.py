"""`Flint`: the core's `Model`, with downloads, a progress bar and an asynchronous stream."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flint_rs import hub
from flint_rs._core import Event, Model, SamplingParams
from flint_rs._progress import Bar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from typing import Literal

    from typing_extensions import Self, Unpack

    from flint_rs._options import SamplingOptions


class Flint(Model):
    """A Flint, ready to run.

    Loading shows a progress bar on a terminal. Threads may share an object; each generation has its own state. Leaving
    the `with` block closes it.

    Args:
        path_or_repo: A GGUF file, a folder of safetensors, or a repository (see `flint_rs.hub`).
        device: `"cpu"`: threads and SIMD. `"reference"`: the specification that all else is tested against, slow.
            `"auto"`: the fastest that this version has, which is `"cpu"`. `"cuda"` is refused by this version.
        dtype: Of activations. `"bfloat16"` rounds where Flint's own implementation rounds, `"float32"` nowhere.
        threads: Of the CPU; `None` takes one a core.

    Raises:
        CheckpointError: If the file breaks its format or is no Flint.
        OSError: If the file cannot be read.
        InvalidValueError: If an argument is outside what is accepted.
        UnavailableError: If the device or the repository is not available.
    """

    def __new__(
        cls,
        path_or_repo: str | os.PathLike[str],
        device: Literal["auto", "cpu", "reference", "cuda"] = "auto",
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        threads: int | None = None,
    ) -> Self:
        """Loads the checkpoint."""
        path = hub.resolve(path_or_repo)
        with Bar(f"loading {path.name}") as bar:
            return super().__new__(cls, path, device, dtype, threads, bar)

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

        stream = await asyncio.to_thread(self.stream, prompt, params, **options)
        try:
            while (event := await asyncio.to_thread(next, stream, None)) is not None:
                yield event
        finally:
            stream.cancel()
