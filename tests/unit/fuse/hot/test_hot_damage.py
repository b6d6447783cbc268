"""Hot files whose memory is broken: nobody is given their bytes, nothing of them is stored, and the mount goes on."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from typing import NoReturn, cast

import pytest
import trio
import trio.testing

from fuse.hot import hot_file
from fuse.hot.budget import Budget
from fuse.hot.hot_file import HotFile
from fuse.hot.hot_set import LOOK_S, HotRules, HotSet
from fuse.hot.memory_files import MemoryFiles
from fuse.state.mount import Mount
from lakefs.host.memory_limits import Available
from lakefs.host.offload import InlineOffload
from lakefs.limits import GIB, GRANULE_BYTES
from tests.descriptors import open_descriptors

SIZE = 3 * GRANULE_BYTES


@pytest.fixture
def files() -> Iterator[MemoryFiles]:
    try:
        made = MemoryFiles(64 << 20)
    except OSError as error:
        pytest.skip(f"this user may not make a file system: {error.strerror}")
    yield made
    made.close()


def filled(files: MemoryFiles, content: bytes) -> HotFile:
    """Return a hot file with this content."""
    hot = HotFile(b"blob", files.new())
    hot.begin_filling(len(content))
    hot.add(content)
    hot.end_filling()
    return hot


def spoil(hot: HotFile, offset: int) -> None:
    """Change a byte as broken memory does."""
    with open(f"/proc/self/fd/{hot.descriptor}", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\1", offset)


def test_damage_of_a_file_that_was_written_to_is_no_mapping_s_write(files: MemoryFiles) -> None:
    """True while none could have written: with a handle that may be mapped nobody can tell."""
    hot = filled(files, bytes(SIZE))
    staged: list[int] = []
    hot.write(0, b"new", lambda offset, data: staged.append(offset))
    spoil(hot, GRANULE_BYTES + 5)
    with pytest.raises(OSError, match="damaged"):
        hot.write(GRANULE_BYTES, b"new", lambda offset, data: staged.append(offset))
    assert staged == [0]
    hot.is_let_go = True  # what a mapping wrote there could not be stored: such a granule is no damage
    hot.write(GRANULE_BYTES, b"new", lambda offset, data: staged.append(offset))
    assert staged == [0, GRANULE_BYTES, GRANULE_BYTES]
    hot.close()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_writer_does_not_store_damaged_memory_as_if_a_mapping_had_written_it(
    files: MemoryFiles, is_mapped: bool
) -> None:
    hot = filled(files, bytes(SIZE))
    staged: list[tuple[int, bytes]] = []

    def stage(offset: int, data: bytes | bytearray | memoryview) -> None:
        staged.append((offset, bytes(data)))

    hot.may_be_mapped = is_mapped
    spoil(hot, GRANULE_BYTES + 5)
    if is_mapped:
        hot.write(GRANULE_BYTES, b"new", stage)
        assert staged[0] == (GRANULE_BYTES, bytes(5) + b"\1" + bytes(GRANULE_BYTES - 6))
    else:
        with pytest.raises(OSError, match="damaged") as found:
            hot.write(GRANULE_BYTES, b"new", stage)
        assert found.value.errno == errno.EIO
        with pytest.raises(OSError, match="damaged"):
            hot.truncate(GRANULE_BYTES + 7, stage, lambda size: stage(size, b""))
        assert staged == []
        assert hot.is_damaged
        assert not hot.is_written
    hot.close()


def test_a_hot_file_that_cannot_be_made_keeps_no_descriptor(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, flags: int) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = open_descriptors()
    monkeypatch.setattr(hot_file, "reopened", fail)
    with pytest.raises(OSError, match="Too many"):
        HotFile(b"blob", files.new())
    assert open_descriptors() == before


class _Ground:
    """Part of a mount that a hot set needs to look after its files."""

    def __init__(self) -> None:
        self.offload = InlineOffload()
        self.end_by = math.inf


class _Kernel:
    def open_backing(self, descriptor: int) -> int:
        return 1

    def close_backing(self, backing_id: int) -> None:
        pass

    def pass_through(self, handle: int, backing_id: int, *, direct: bool) -> None:
        pass


def test_memory_that_the_kernel_cannot_read_is_damage_and_does_not_end_the_mount(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def run() -> None:
        budget = Budget(GIB, lambda: 100 * GIB, lambda: [Available(50 * GIB, 100 * GIB)])
        hot_set = HotSet(cast(Mount, _Ground()), files, _Kernel(), budget, HotRules(check_s=10 * LOOK_S))
        hot = filled(files, bytes(SIZE))
        hot_set._add(hot)
        monkeypatch.setattr(hot, "differing", fail)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hot_set.run)
            await trio.sleep(5 * LOOK_S)
            assert hot_set.file_count == 1
            with monkeypatch.context() as patched:
                patched.setattr(hot_set, "look_after", fail)
                await trio.sleep(2 * LOOK_S)
            await trio.sleep(10 * LOOK_S)
            assert hot.is_damaged
            assert hot_set.file_count == 0
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.001))
