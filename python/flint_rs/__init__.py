"""Runs Recursive's Flint mixture-of-experts model on one machine.

Example:
    >>> import flint_rs
    >>> with flint_rs.Flint(flint_rs.SMALL_MODEL) as flint:
    ...     print(flint.generate("def quicksort(items):", max_tokens=64, seed=1).text)
"""

from pathlib import Path

from flint_rs._core import (
    CancelledError,
    CheckpointError,
    ClosedError,
    DeviceArray,
    DeviceError,
    Event,
    FlintError,
    InvalidValueError,
    Logprob,
    Result,
    SamplingParams,
    Stream,
    Timings,
    TokenLogprobs,
    UnavailableError,
    Usage,
    __version__,
    convert,
    describe,
    inspect,
    plan,
)
from flint_rs._flint import Flint

#: The small Flint that ships with the package.
SMALL_MODEL: Path = Path(__file__).parent / "models" / "flint-small.gguf"

__all__ = [
    "SMALL_MODEL",
    "CancelledError",
    "CheckpointError",
    "ClosedError",
    "DeviceArray",
    "DeviceError",
    "Event",
    "Flint",
    "FlintError",
    "InvalidValueError",
    "Logprob",
    "Result",
    "SamplingParams",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
    "__version__",
    "convert",
    "describe",
    "inspect",
    "plan",
]
