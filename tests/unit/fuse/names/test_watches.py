"""Notices of changes elsewhere, in rare orders: what the kernel has to forget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from pyfuse3 import InodeT

from fuse.names import watches
from fuse.names.lookups import Lookups
from fuse.names.watches import Watcher
from fuse.open_file import OpenFile
from fuse.operations import LakeOperations
from fuse.state.inodes import EXPIRED, Inode
from lakefs.wire.messages import WatchEvent
from tests.unit.fuse.names.slow_mount import SlowMount, held


class OpenedFile(OpenFile):
    """An open file, of which only that it is open counts."""

    def __init__(self) -> None:
        self.is_dirty = False


class Told:
    """A watcher over a slow mount, and what it has told the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[str] = []
        self.removed: list[int] = []
        self.attributes: list[Inode] = []
        self.forget_attributes = watches._invalidate_attributes
        monkeypatch.setattr(watches, "_invalidate_entry", self._entry)
        monkeypatch.setattr(watches, "_invalidate_attributes", self.attributes.append)
        self.mount = SlowMount()
        self.watcher = Watcher(self.mount, cast(Any, SimpleNamespace(epoch=1)))

    def _entry(self, parent: Inode, name: str, removed: int = 0) -> None:
        self.entries.append(name)
        self.removed.append(removed)

    def found(self, name: str, node: int, *, lookups: int = 1) -> Inode:
        self.mount.put(name, node)
        shown = self.mount.owner.shown(self.mount.records[name])
        inode = self.mount.table.adopt(self.mount.table.root, name, node, shown, trio.current_time())
        inode.lookups += lookups
        return inode


def told(monkeypatch: pytest.MonkeyPatch, test: Callable[[Told], Awaitable[None]]) -> None:
    async def run() -> None:
        await test(Told(monkeypatch))

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0.001))


def test_a_name_that_only_this_process_has_found_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(told: Told) -> None:
        told.found("known", 11)
        told.found("unknown", 12, lookups=0)
        for key in ("known", "unknown", "none"):
            await told.watcher._apply(WatchEvent("put", 1, "bkt", key))
        assert told.entries == ["unknown", "none"], "the kernel may have these as absent"

    told(monkeypatch, test)


def test_after_a_lost_connection_attributes_of_open_files_are_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(told: Told) -> None:
        told.found("a", 11)
        opened = told.found("b", 12)
        opened.file = OpenedFile()
        await told.watcher._expire("")
        assert told.entries == ["a", "b"]
        assert told.attributes == [told.mount.table.root, opened]

    told(monkeypatch, test)


def test_a_file_that_was_found_by_a_new_name_is_not_lost_with_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(told: Told) -> None:
        inode = told.found("a", 11)
        del told.mount.records["a"]
        told.watcher._doubt(inode, "rename")

        async def moved() -> None:
            assert told.found("b", 11) is inode

        async def compare() -> None:
            await told.watcher._compare(dict(told.watcher._doubtful))

        await held(told.mount, compare, moved)
        assert told.mount.table.root.children == {"b": inode}
        assert inode in told.watcher._doubtful, "it is compared by its new name"

    told(monkeypatch, test)


def test_a_removal_is_told_as_one_though_its_notice_comes_when_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(told: Told) -> None:
        inode = told.found("a", 11)
        del told.mount.records["a"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(told.watcher._ask_about_doubtful)
            told.watcher._doubt(inode)  # by the notice of an earlier change
            await trio.sleep(0.7)
            await told.watcher._apply(WatchEvent("delete", 1, "bkt", "a"))
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()
        assert (told.entries, told.removed) == (["a"], [inode.number])

    told(monkeypatch, test)


def test_what_the_watcher_has_compared_since_a_look_up_counts_for_the_open_behind_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeated open takes what others have open, if a look-up behind its refusal has found that."""

    async def test(told: Told) -> None:
        inode = told.found("a", 11)
        begun_at = trio.current_time()
        lookups = Lookups(told.mount)

        async def compared() -> None:
            await told.watcher._compare({inode: watches._Doubt()})

        await held(told.mount, lambda: lookups.look(told.mount.table.root, "a", confirm=True), compared)
        assert inode.found_at >= begun_at + 1, "the answer to the look-up came behind that to the watcher"

    told(monkeypatch, test)


def test_attributes_that_change_while_the_kernel_asks_for_them_are_asked_again_and_the_answer_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel drops an answer if it has to forget the attributes before that has come."""
    forgotten: list[int] = []
    monkeypatch.setattr("pyfuse3.invalidate_inode", lambda number, attr_only: forgotten.append(number))

    async def test(told: Told) -> None:
        inode = told.found("a", 11)
        inode.confirmed_at = EXPIRED
        told.mount.staging = cast(Any, SimpleNamespace(take_over=lambda: None))
        operations = LakeOperations(told.mount)
        timeouts: list[float] = []

        async def ask() -> None:
            entry = await operations.getattr(InodeT(inode.number), cast(Any, SimpleNamespace(pid=1)))
            timeouts.append(entry.attr_timeout)

        async def changed() -> None:
            told.forget_attributes(inode)

        await held(told.mount, ask, changed)
        assert (timeouts, forgotten) == ([0], [])
        await ask()
        told.forget_attributes(inode)
        assert (timeouts, forgotten) == ([0, 60], [inode.number])

    told(monkeypatch, test)


def test_a_file_that_is_closed_while_it_is_looked_for_at_a_new_engine_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(told: Told) -> None:
        renewed: list[str] = []

        class Leased(OpenedFile):
            async def renew_lease(self) -> None:
                renewed.append("renewed")

        closed, other = told.found("a", 11), told.found("b", 12)
        closed.file, other.file = Leased(), Leased()
        monkeypatch.setattr(told.mount, "may_have_lost", lambda inode: inode is closed)
        told.watcher._engine = cast(Any, SimpleNamespace(epoch=2))

        async def close() -> None:
            closed.file = None

        await held(told.mount, told.watcher._renew_leases, close)
        assert renewed == ["renewed"], "the one that is open still"

    told(monkeypatch, test)
