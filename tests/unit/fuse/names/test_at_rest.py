"""Open files that a change of names keeps at rest, when another one is closed meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import trio

from fuse.names.changes import at_rest
from fuse.state.inodes import Inode
from tests.unit.fuse.names.slow_mount import SlowMount


def test_a_file_that_is_closed_while_another_comes_to_rest_is_left_out() -> None:
    held: list[int] = []

    class File:
        def __init__(self, number: int, closing: Inode | None = None) -> None:
            self._number = number
            self._closing = closing

        @asynccontextmanager
        async def at_rest(self, *, stored: bool) -> AsyncIterator[None]:
            await trio.lowlevel.checkpoint()
            if self._closing is not None:
                self._closing.file = None
            held.append(self._number)
            yield

    async def main() -> None:
        mount = SlowMount()
        mount.put("a", 11)
        first, second = (
            mount.table.adopt(mount.table.root, name, node, mount.owner.shown(mount.records["a"]), 0.0)
            for name, node in (("a", 11), ("b", 12))
        )
        first.file, second.file = cast(Any, File(1, second)), cast(Any, File(2))
        async with at_rest([second, None, first]):
            assert held == [1]

    trio.run(main)
