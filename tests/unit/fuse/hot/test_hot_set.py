"""The hot set with a kernel that only takes note: what becomes hot, to whom it is given, what has to go."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
import trio
import trio.testing

from fuse.hot import hot_set
from fuse.hot.budget import Budget
from fuse.hot.hot_file import HotFile
from fuse.hot.hot_set import HotRules, HotSet
from fuse.hot.memory_files import MemoryFiles
from fuse.state.inodes import Inode, InodeTable
from fuse.state.mount import Mount
from fuse.state.stat_fields import OBJECT, Attributes
from lakefs.errors import ChunkDamaged
from lakefs.host.memory_limits import Available
from lakefs.host.offload import InlineOffload
from lakefs.limits import GIB, MIB
from lakefs.names import Name

SIZE = 2 * MIB


class Kernel:
    """Backings that only take note."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.passed: list[tuple[int, int, bool]] = []
        self._next = 0

    def open_backing(self, descriptor: int) -> int:
        self._next += 1
        self.open[self._next] = descriptor
        return self._next

    def close_backing(self, backing_id: int) -> None:
        del self.open[backing_id]

    def pass_through(self, handle: int, backing_id: int, *, direct: bool) -> None:
        assert backing_id in self.open
        self.passed.append((handle, backing_id, direct))


class Ground:
    """A hot set over a mount that has inodes and a nursery, and no engine: `content` is what fills read."""

    def __init__(self, nursery: trio.Nursery, files: MemoryFiles, rules: HotRules, limit_bytes: int) -> None:
        self.background = nursery
        self.offload = InlineOffload()
        self.table = InodeTable(Attributes(1))
        self.kernel = Kernel()
        self.free_bytes = 50 * GIB
        self.fills: list[Name] = []
        self.error: Exception | None = None
        self.end_by = math.inf
        self.forgotten: list[Inode] = []
        bucket = self.table.create(self.table.root, "b", Attributes(1))
        self._bucket = bucket
        budget = Budget(limit_bytes, lambda: 100 * GIB, lambda: [Available(self.free_bytes, 100 * GIB)])
        self.hot = HotSet(cast(Mount, self), files, self.kernel, budget, rules)

    async def forget_pages(self, inode: Inode) -> None:
        self.forgotten.append(inode)

    def inode(self, name: str, blob: bytes, size: int = SIZE) -> Inode:
        inode = self.table.create(self._bucket, name, Attributes(OBJECT, size, blob=blob))
        inode.lookups = 1
        return inode

    async def fill(self, mount: Mount, name: Name, blob: bytes, hot: HotFile) -> None:
        self.fills.append(name)
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        hot.begin_filling(SIZE)
        hot.add(blob[:1] * SIZE)
        hot.end_filling()

    async def seen_twice(self, inode: Inode) -> None:
        """Open it twice, and let a fill that begins end."""
        for _ in range(2):
            await self.hot.seen(inode)
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture(scope="module")
def files() -> MemoryFiles:
    try:
        made = MemoryFiles(64 << 20)
    except OSError as error:
        pytest.skip(f"this user may not make a file system: {error.strerror}")
    return made


def on_ground(
    files: MemoryFiles,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[Ground], Awaitable[None]],
    rules: HotRules | None = None,
    limit_bytes: int = 3 * SIZE,
) -> None:
    """Run a test with a clock that jumps."""

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            ground = Ground(nursery, files, rules or HotRules(), limit_bytes)
            monkeypatch.setattr(hot_set, "fill", ground.fill)
            await test(ground)
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.001))


@pytest.mark.parametrize("change", ["is_written", "may_be_mapped"])
def test_a_file_that_may_have_other_bytes_is_given_to_nobody_and_filled_anew(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async def test(ground: Ground) -> None:
        first, second = ground.inode("x", b"1"), ground.inode("y", b"1")
        await ground.seen_twice(first)
        hot = ground.hot.given(first)
        assert hot is not None
        setattr(hot, change, True)
        assert ground.hot.given(second) is None
        await ground.seen_twice(second)
        new = ground.hot.given(second)
        assert new is not None
        assert new is not hot
        assert ground.hot.held(first) is None
        assert ground.hot.file_count == 1

    on_ground(files, monkeypatch, test)


def test_it_is_filled_once_at_the_second_open_within_ten_minutes(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(ground: Ground) -> None:
        inode = ground.inode("x", b"1")
        await ground.hot.seen(inode)
        await trio.sleep(601)
        await ground.hot.seen(inode)
        await trio.sleep(1)
        assert ground.fills == []
        assert ground.hot.given(inode) is None
        for _ in range(4):
            await ground.hot.seen(inode)
        await trio.sleep(1)
        assert ground.fills == [("b", "x")]
        assert ground.forgotten == [inode]
        await ground.seen_twice(ground.inode("small", b"2", SIZE - 1))
        await ground.seen_twice(ground.inode("large", b"3", 3 * SIZE + 1))
        assert len(ground.fills) == 1

    on_ground(files, monkeypatch, test)


def test_two_are_filled_at_a_time(files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ground: Ground) -> None:
        under_way = [0]

        async def slow(mount: Mount, name: Name, blob: bytes, hot: HotFile) -> None:
            under_way.append(under_way[-1] + 1)
            await trio.sleep(1)
            await ground.fill(mount, name, blob, hot)
            under_way.append(under_way[-1] - 1)

        monkeypatch.setattr(hot_set, "fill", slow)
        inodes = [ground.inode(str(number), b"%d" % number) for number in range(5)]
        for inode in inodes:
            for _ in range(2):
                await ground.hot.seen(inode)
        await trio.sleep(10)
        assert max(under_way) == 2
        assert all(ground.hot.given(inode) is not None for inode in inodes)

    on_ground(files, monkeypatch, test, limit_bytes=10 * SIZE)


def test_it_is_given_to_one_inode_at_a_time(files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ground: Ground) -> None:
        first, second = ground.inode("x", b"1"), ground.inode("y", b"1")
        await ground.seen_twice(first)
        hot = ground.hot.given(first)
        assert hot is not None
        ground.hot.opened(hot, 7, os.O_RDONLY)
        ground.hot.opened(hot, 8, os.O_RDWR)
        assert ground.kernel.passed == [(7, hot.backing, False), (8, hot.backing, True)]
        assert ground.hot.held(first) is hot
        assert ground.hot.given(second) is None
        for flags in (os.O_RDONLY, os.O_RDWR):
            ground.hot.closed(hot, flags)
        hot.may_be_mapped = False  # as the look at the last close finds
        assert ground.hot.held(first) is None
        assert ground.hot.given(second) is hot
        ground.hot.opened(hot, 9, os.O_RDONLY)
        assert ground.hot.given(first) is None

    on_ground(files, monkeypatch, test)


def test_what_was_written_to_is_nobody_elses_and_goes(files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ground: Ground) -> None:
        first, second = ground.inode("x", b"1"), ground.inode("y", b"1")
        await ground.seen_twice(first)
        hot = ground.hot.given(first)
        assert hot is not None
        ground.hot.opened(hot, 7, os.O_WRONLY)
        hot.write(0, b"new", lambda offset, data: None)
        ground.hot.closed(hot, os.O_WRONLY)
        assert ground.hot.given(second) is None
        ground.hot.look_after()
        assert ground.kernel.open == {}
        assert ground.hot.file_count == 0
        await ground.seen_twice(second)
        assert ground.hot.given(second) is not None

    on_ground(files, monkeypatch, test)


def test_the_one_opened_longest_ago_makes_room_and_those_in_use_stay(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(ground: Ground) -> None:
        inodes = [ground.inode(str(number), b"%d" % number) for number in range(5)]
        for inode in inodes[:3]:
            await ground.seen_twice(inode)
        hot = ground.hot.given(inodes[0])
        assert hot is not None
        ground.hot.opened(hot, 7, os.O_RDONLY)
        await ground.seen_twice(inodes[3])
        found = [ground.hot.given(inode) is not None for inode in inodes]
        assert found == [True, False, True, True, False]
        assert ground.hot.used_bytes <= 3 * SIZE
        assert ground.hot.counts.evicted == 1

    on_ground(files, monkeypatch, test)


def test_all_that_is_not_in_use_goes_when_memory_is_scarce(files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ground: Ground) -> None:
        first, second = ground.inode("x", b"1"), ground.inode("y", b"2")
        await ground.seen_twice(first)
        await ground.seen_twice(second)
        hot = ground.hot.given(first)
        assert hot is not None
        ground.hot.opened(hot, 7, os.O_RDONLY)
        ground.background.start_soon(ground.hot.run)
        ground.free_bytes = 5 * GIB
        await trio.sleep(5)
        assert ground.hot.file_count == 1
        await ground.seen_twice(ground.inode("z", b"3"))
        assert len(ground.fills) == 2
        assert ground.hot.counts.refused == 1
        ground.hot.closed(hot, os.O_RDONLY)
        await trio.sleep(5)
        assert ground.hot.file_count == 0
        assert ground.kernel.open == {}

    on_ground(files, monkeypatch, test)


def test_no_error_of_a_fill_is_anybodys_and_another_is_made(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(ground: Ground) -> None:
        inode = ground.inode("x", b"1")
        for error in (ChunkDamaged("damaged"), OSError(28, "full"), RuntimeError("a bug")):
            ground.error = error
            await ground.seen_twice(inode)
            assert ground.hot.given(inode) is None
            assert ground.hot.used_bytes == 0
        ground.error = None
        await ground.seen_twice(inode)
        assert ground.hot.given(inode) is not None
        assert ground.hot.counts.failed == 3

    on_ground(files, monkeypatch, test)


@pytest.mark.parametrize("in_use", [False, True])
def test_damage_is_found_within_the_hour_and_given_to_nobody(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    async def test(ground: Ground) -> None:
        inode, other = ground.inode("x", b"1"), ground.inode("y", b"2")
        await ground.seen_twice(inode)
        await ground.seen_twice(other)
        hot = ground.hot.given(inode)
        assert hot is not None
        if in_use:
            ground.hot.opened(hot, 7, os.O_RDONLY)
        ground.background.start_soon(ground.hot.run)
        descriptor = os.open(f"/proc/self/fd/{hot.descriptor}", os.O_WRONLY)
        os.pwrite(descriptor, b"?", SIZE - 1)
        os.close(descriptor)
        await trio.sleep(3700)
        assert ground.hot.counts.damaged == 1
        assert ground.hot.given(other) is not None
        assert ground.hot.given(inode) is None
        if in_use:
            with pytest.raises(OSError, match="damaged"):
                ground.hot.held(inode)
            assert ground.hot.is_held(inode), "whatever it holds"
            ground.hot.closed(hot, os.O_RDONLY)
        assert not ground.hot.is_held(inode)
        assert ground.hot.held(inode) is None
        ground.hot.look_after()
        assert ground.hot.file_count == 1

    on_ground(files, monkeypatch, test)
