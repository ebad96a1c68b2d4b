"""Says what a person should know, at level INFO of the logger `flint_rs`.

An application that configured `logging` gets it by its own levels and handlers; otherwise it goes to standard error, as
from a program, unless the logger's level was set higher.
"""

import logging
import sys

logger = logging.getLogger("flint_rs")


def say(message: str) -> None:
    """One line."""
    if logger.hasHandlers():
        logger.info("%s", message)
    elif logger.level <= logging.INFO and sys.stderr is not None:
        sys.stderr.write(f"flint-rs: {message}\n")
