"""A progress bar on a terminal, and nothing elsewhere."""

import contextlib
import sys
import time
from types import TracebackType

from flint_rs._log import say, write

_WIDTH = 30
# Work that takes longer is announced where no bar is seen.
_PATIENCE_SECONDS = 2.0


class Bar:
    """Draws on standard error while its `with` block runs; call it with what is done and what there is.

    Args:
        label: What is going on.
        announced: Whether a log line says what is done of how many bytes, and how long the rest may take, once it
            turns out to be long.
    """

    def __init__(self, label: str, announced: bool = False) -> None:
        self._label = label
        self._start: float | None = None
        self._announced = not announced
        self._drawn = ""
        self._visible = False
        with contextlib.suppress(OSError, ValueError):  # closed
            self._visible = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total`, in any unit."""
        self._announce(done, total)
        share = min(done / total, 1.0) if total else 1.0
        filled = int(share * _WIDTH)
        line = f"{self._label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%}"
        if self._visible and line != self._drawn:
            write(f"\r{line}")
            self._drawn = line

    def _announce(self, done: int, total: int) -> None:
        if self._announced or self._visible:
            return
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        passed = now - self._start
        if passed >= _PATIENCE_SECONDS and 0 < done < total:
            rest = passed * (total - done) / done
            say(f"{self._label}: {done / 1e9:.1f} of {total / 1e9:.1f} GB after {passed:.0f} s, {rest:.0f} s to go")
            self._announced = True

    def wipe(self) -> None:
        """Takes it off the terminal; a later call draws it anew."""
        if self._drawn:
            write(f"\r{' ' * len(self._drawn)}\r")
            self._drawn = ""

    def __enter__(self) -> "Bar":
        """Starts without drawing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wipes it."""
        self.wipe()
