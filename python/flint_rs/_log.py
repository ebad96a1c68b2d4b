"""Says what a person should know: the logger `flint_rs`.

It writes to standard error until the application has handlers of its own.
"""

import logging
import sys

logger = logging.getLogger("flint_rs")


class _Stderr(logging.Handler):
    """Writes to what is standard error now, unless the application's own handlers hear of it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        if not logging.getLogger().handlers and sys.stderr is not None:
            sys.stderr.write(f"flint-rs: {self.format(record)}\n")


if not logger.handlers:
    logger.addHandler(_Stderr())
    logger.setLevel(logging.INFO)
