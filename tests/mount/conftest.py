"""Fixtures of the mount's tests: a mount of a new store, for all tests of a module."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from tests.mount.commits import Sizes, keep_versions, version_sizes
from tests.mount.mounts import LakeMounts, lake

_numbers = itertools.count()


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    with TemporaryDirectory(prefix="lake-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def mounts(short_folder: Path) -> Iterator[LakeMounts]:
    """Run a store's engine and two mounts of the store."""
    with lake(short_folder, mounts=2) as mounted:
        yield mounted


@pytest.fixture
def here(mounts: LakeMounts, request: pytest.FixtureRequest) -> Path:
    """A new folder on the first mount, for this test alone."""
    folder = mounts.folders[0] / f"{next(_numbers)} {str(request.node.name)[:60]}"
    folder.mkdir()
    return folder


@pytest.fixture
def there(mounts: LakeMounts, here: Path) -> Path:
    """The same folder, on the second mount."""
    return mounts.folders[1] / here.name


@pytest.fixture(scope="module")
def versions(mounts: LakeMounts) -> Iterator[BlockingEngine]:
    """Connect to the engine of the mounts, whose bucket keeps versions."""
    keep_versions(mounts.served)
    with connect_blocking(mounts.served.server) as engine:
        yield engine


@pytest.fixture
def sizes(versions: BlockingEngine) -> Sizes:
    """Give the lengths of a file's versions."""
    return lambda path: version_sizes(versions, path)
