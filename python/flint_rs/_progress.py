"""A progress bar on a terminal, and nothing elsewhere."""

import sys
from types import TracebackType

_WIDTH = 30


class Bar:
    """Draws on standard error while its `with` block runs; call it with what is done and what there is.

    Args:
        label: What is going on.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._drawn = ""
        self._visible = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total`, in any unit."""
        share = min(done / total, 1.0) if total else 1.0
        filled = int(share * _WIDTH)
        line = f"{self._label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%}"
        if self._visible and line != self._drawn:
            sys.stderr.write(f"\r{line}")
            sys.stderr.flush()
            self._drawn = line

    def wipe(self) -> None:
        """Takes it off the terminal; a later call draws it anew."""
        if self._drawn:
            sys.stderr.write(f"\r{' ' * len(self._drawn)}\r")
            sys.stderr.flush()
            self._drawn = ""

    def __enter__(self) -> "Bar":
        """Starts without drawing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wipes it."""
        self.wipe()
