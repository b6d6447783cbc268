"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.served import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One engine for all tests of a module; each test uses buckets of its own."""
    # Not pytest's folder: a socket's path must be short.
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder)) as engine:
        yield engine


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    with TemporaryDirectory(prefix="lake-") as path:
        yield Path(path)
