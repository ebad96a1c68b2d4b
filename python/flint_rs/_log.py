"""Says what a person should know, at level INFO of the logger `flint_rs`.

An application that configured `logging` gets it by its own levels and handlers; otherwise it goes to standard error, as
from a program, unless the logger's level was set higher.
"""

import contextlib
import logging
import sys

logger = logging.getLogger("flint_rs")


def say(message: str) -> None:
    """One line."""
    if logger.hasHandlers():
        logger.info("%s", message)
    elif logger.level <= logging.INFO:
        write(f"flint-rs: {message}\n")


def write(text: str) -> None:
    """Puts text on standard error, or nowhere when that is full or closed: no result is worth less for it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
