"""One engine for the tests of a module, and file systems over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from lakefs.plugins.fsspec.connections import disconnect
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine; connections to it are closed before it ends."""
    folder: Path = tmp_path_factory.mktemp("lake")
    with serving(folder) as engine:
        yield engine
        LakeFileSystem.clear_instance_cache()
        disconnect()


@pytest.fixture
def fs(served: Served) -> LakeFileSystem:
    """The file system of the module's engine."""
    made: LakeFileSystem = LakeFileSystem(server=served.server)
    return made


@pytest.fixture
def bucket(fs: LakeFileSystem) -> Iterator[str]:
    """A new bucket, which is removed with all that is in it."""
    name = f"b-{uuid4().hex[:12]}"
    fs.mkdir(name)
    yield name
    if fs.exists(name):
        fs.rm(name, recursive=True)
