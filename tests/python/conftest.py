"""Small random checkpoints, written by the references."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import flint_rs
import pytest
import reference

# A shell that runs the tests in the background has them ignore SIGINT, which processes started here would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Slow enough on the reference path that work is going on when a test interrupts it, and far from done when that is seen
# late: about 80 million weights a token, 30 ms of a core.
SLOW = reference.Shape(6, 1024, 8, 2, 64, 2048, 4, 4, 1024, 1024, 33)


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Flint."""
    model = reference.random_flint(reference.SHAPES[0], seed=7)
    return reference.write_flint_gguf(model, tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def slow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Flint whose generation takes long."""
    model = reference.random_flint(SLOW, seed=7)
    return reference.write_flint_gguf(model, tmp_path_factory.mktemp("slow") / "slow.gguf")


@pytest.fixture
def flint(gguf_path: Path) -> Iterator[flint_rs.Flint]:
    """The tiny Flint, open."""
    with flint_rs.Flint(gguf_path, device="cpu") as model:
        yield model


@pytest.fixture
def slow_flint(slow_path: Path) -> Iterator[flint_rs.Flint]:
    """The slow Flint, open on the reference path."""
    with flint_rs.Flint(slow_path, device="reference") as model:
        yield model
