"""Look-ups whose answers come late: what was learned while they were under way stands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from fuse.names.lookups import Lookups
from fuse.state.inodes import Inode
from tests.unit.fuse.names.slow_mount import SlowMount, held


def on_a_slow_mount(test: Callable[[SlowMount, Lookups], Awaitable[None]]) -> None:
    async def run() -> None:
        mount = SlowMount()
        await test(mount, Lookups(mount))

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.001))


async def found(mount: SlowMount, lookups: Lookups, name: str) -> Inode:
    inode, _ = await lookups.look(mount.table.root, name, confirm=True)
    assert inode is not None
    inode.lookups += 1
    return inode


def test_an_older_answer_does_not_bring_back_attributes() -> None:
    async def test(mount: SlowMount, lookups: Lookups) -> None:
        mount.put("a", 11, note=b"old")
        inode = await found(mount, lookups, "a")

        async def changed() -> None:
            mount.put("a", 11, mode=0o600, note=b"new")
            await lookups.refresh(inode, confirm=True)

        await held(mount, lambda: lookups.look(mount.table.root, "a", confirm=True), changed)
        assert inode.attributes.mode == 0o600
        assert await lookups.xattrs(inode) == {"user.note": b"new"}

    on_a_slow_mount(test)


def test_an_older_answer_does_not_bring_back_extended_attributes_that_this_mount_has_changed() -> None:
    async def test(mount: SlowMount, lookups: Lookups) -> None:
        mount.put("a", 11, note=b"old")
        inode = await found(mount, lookups, "a")

        async def changed() -> None:
            mount.put("a", 11, note=b"new")
            inode.xattrs = {"user.note": b"new"}
            mount.touch(inode)

        await held(mount, lambda: lookups.look(mount.table.root, "a", confirm=True), changed)
        assert await lookups.xattrs(inode) == {"user.note": b"new"}

    on_a_slow_mount(test)


def test_an_older_absence_does_not_take_a_name_away_that_was_found_since() -> None:
    async def test(mount: SlowMount, lookups: Lookups) -> None:
        async def made() -> None:
            mount.put("a", 11)
            await found(mount, lookups, "a")

        await held(mount, lambda: lookups.look(mount.table.root, "a", confirm=True), made)
        assert "a" in mount.table.root.children

    on_a_slow_mount(test)


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_an_answer_about_a_name_does_not_concern_a_file_that_was_renamed_since(*, is_made_anew: bool) -> None:
    async def test(mount: SlowMount, lookups: Lookups) -> None:
        mount.put("a", 11)
        inode = await found(mount, lookups, "a")
        mount.put("b", 11)
        del mount.records["a"]
        if is_made_anew:
            mount.put("a", 12, b"other")

        async def moved() -> None:
            assert await found(mount, lookups, "b") is inode

        await held(mount, lambda: lookups.refresh(inode, confirm=True), moved)
        assert mount.table.root.children["b"] is inode
        assert (inode.node, inode.attributes.blob) == (11, b"1")

    on_a_slow_mount(test)


def test_a_folders_times_that_a_look_into_it_finds_are_told_to_the_kernel() -> None:
    async def test(mount: SlowMount, lookups: Lookups) -> None:
        mount.table.on_changed = mount.forgotten.append
        mount.put("d/", 11, b"")
        folder = await found(mount, lookups, "d")
        mount.put("d/", 11, b"", mode=0o700)
        assert await lookups.look(folder, "x", confirm=True) == (None, True)
        assert folder.attributes.mode == 0o700
        assert mount.forgotten == [folder]

    on_a_slow_mount(test)
