"""Native reads and hot files on one mount: native threads answer nothing of a file that mappings may write to."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from lakefs.limits import MIB
from tests.mount.mounts import LakeMounts, lake

pytestmark = [pytest.mark.slow, pytest.mark.fuse]

SIZE: Final = 3 * MIB + 12_345


@pytest.fixture(scope="module")
def forced() -> Iterator[LakeMounts]:
    """A mount on which every file is hot at its first open."""
    with TemporaryDirectory(prefix="lake-") as path, lake(Path(path), "-o", "hot_forced", any_way=False) as mounted:
        if found := re.search(r"no hot files.*", mounted.mounts[0].log.read_text()):
            pytest.skip(found.group())
        yield mounted


def test_a_handle_that_was_read_shows_what_a_mapping_writes_beside_readers(forced: LakeMounts) -> None:
    path = forced.folders[0] / "x"
    path.write_bytes(bytes(SIZE))
    reading, writing = os.open(path, os.O_RDONLY), os.open(path, os.O_RDWR)
    for _ in range(3):
        assert os.pread(writing, 4096, 8192) == bytes(4096)
    with mmap.mmap(writing, SIZE) as memory:
        memory[8192:8195] = b"new"
        assert os.pread(reading, 3, 8192) == os.pread(writing, 3, 8192) == b"new"
    os.close(writing)
    os.close(reading)
    assert path.read_bytes()[8190:8197] == b"\0\0new\0\0"


def test_what_a_mapping_wrote_to_a_removed_file_shows_in_no_other_file_of_its_content(forced: LakeMounts) -> None:
    here, content = forced.folders[0], os.urandom(SIZE)
    for name in ("removed", "other"):
        (here / name).write_bytes(content)
    reading, writing = os.open(here / "removed", os.O_RDONLY), os.open(here / "removed", os.O_RDWR)
    with mmap.mmap(writing, SIZE) as memory:
        (here / "removed").unlink()
        memory[MIB : MIB + 7] = b"unnamed"
        assert os.pread(reading, 7, MIB) == b"unnamed"
    os.close(writing)
    os.close(reading)
    assert (here / "other").read_bytes() == content
