"""Open files that tasks use at once: the last one that has it, or wanted it in vain, closes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from fuse.open_file import OpenFile
from fuse.state.inodes import Inode
from lakefs.errors import KeyNotFound
from tests.unit.fuse.names.slow_mount import SlowMount


class FileMount(SlowMount):
    """A slow mount on which a file can be open; its store has nothing of it."""

    driver = background = writers_behind = cast(Any, None)

    async def opened(self, name: object, size_bytes: int) -> Any:
        await self.holds.wait()
        raise KeyNotFound("it was removed elsewhere")


def with_a_file(test: Callable[[FileMount, OpenFile], Awaitable[None]]) -> None:
    async def run() -> None:
        mount = FileMount()
        mount.put("a", 11)
        shown = mount.owner.shown(mount.records["a"])
        inode: Inode = mount.table.adopt(mount.table.root, "a", 11, shown, trio.current_time())
        inode.lookups = 1
        inode.file = file = OpenFile(mount, inode)
        await test(mount, file)

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.001))


async def opened_in_vain(file: OpenFile) -> None:
    with pytest.raises(KeyNotFound):
        await file.open()
    await file.discard()


def test_who_wanted_to_share_what_others_opened_in_vain_closes_it() -> None:
    async def test(mount: FileMount, file: OpenFile) -> None:
        mount.holds = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened_in_vain, file)
            await trio.testing.wait_all_tasks_blocked()

            async def share() -> None:
                assert not await file.share()

            nursery.start_soon(share)
            await trio.testing.wait_all_tasks_blocked()
            mount.holds.set()
        assert file.handles == 0
        assert file.inode.file is None

    with_a_file(test)


def test_tasks_that_open_in_vain_at_once_leave_the_file_that_was_opened_since() -> None:
    async def test(mount: FileMount, file: OpenFile) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(opened_in_vain, file)
        assert file.inode.file is None
        file.inode.file = since = OpenFile(mount, file.inode)
        await file.discard()
        assert file.inode.file is since

    with_a_file(test)
