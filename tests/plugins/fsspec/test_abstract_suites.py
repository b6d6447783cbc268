"""fsspec's own suites for file systems, all of them, against the lake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsspec.tests import abstract

from lakefs.plugins.fsspec.file_system import LakeFileSystem


class LakeFixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    """The lake, a bucket of the test's own, and paths joined by `/`."""

    @pytest.fixture
    def fs(self, served: Any) -> LakeFileSystem:
        made: LakeFileSystem = LakeFileSystem(server=served.server)
        return made

    @pytest.fixture
    def fs_path(self, bucket: str) -> str:
        return bucket

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)


class TestCopy(abstract.AbstractCopyTests, LakeFixtures):  # type: ignore[misc]
    pass


class TestGet(abstract.AbstractGetTests, LakeFixtures):  # type: ignore[misc]
    pass


class TestPut(abstract.AbstractPutTests, LakeFixtures):  # type: ignore[misc]
    pass


class TestPipe(abstract.AbstractPipeTests, LakeFixtures):  # type: ignore[misc]
    pass


class TestOpen(abstract.AbstractOpenTests, LakeFixtures):  # type: ignore[misc]
    pass
