"""A coordinator at a server that others use, as if it had begun with the test: revisions from 1 on, a short history."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from msgspec.structs import replace

from engine.coordinator.coordinator import (
    Change,
    Changes,
    Compare,
    Coordinator,
    Entry,
    Found,
    HasRevision,
    Operation,
    Page,
    ReadAnew,
    Transacted,
    Watch,
)
from lakefs.ids import LeaseId, Revision


class RebasedCoordinator:
    """`Coordinator` behind a revision `base` of another, which forgets all but `history` revisions."""

    def __init__(self, other: Coordinator, base: Revision, history: int) -> None:
        self._other = other
        self._base: Final = base
        self._history = history
        self._granted: list[LeaseId] = []

    async def get(self, key: bytes) -> Found:
        found = await self._other.get(key)
        return Found(self._entry(found.entry), self._ours(found.revision))

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        page = await self._other.range(begin, end, limit=limit, after=after)
        entries = tuple(self._present(entry) for entry in page.entries)
        return Page(entries, self._ours(page.revision), page.more)

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        theirs = [
            replace(compare, revision=self._theirs(compare.revision))
            if isinstance(compare, HasRevision) and compare.revision
            else compare
            for compare in compares
        ]
        done = await self._other.transact(theirs, then_ops, else_ops, is_repeatable=is_repeatable)
        if done.revision - self._base > self._history:
            await self._other.compact(Revision(done.revision - self._history + 1))
        return Transacted(done.outcome, self._ours(done.revision), tuple(map(self._entry, done.seen)))

    async def compact(self, revision: Revision) -> None:
        await self._other.compact(self._theirs(revision))

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AbstractAsyncContextManager[Watch]:
        return self._watching(self._other.watch(begin, end, self._theirs(from_revision)))

    @asynccontextmanager
    async def _watching(self, watching: AbstractAsyncContextManager[Watch]) -> AsyncIterator[Watch]:
        async with watching as watch:
            yield _RebasedWatch(watch, self)

    async def lease(self, ttl_s: int) -> LeaseId:
        lease = await self._other.lease(ttl_s)
        self._granted.append(lease)
        return lease

    async def keep_alive(self, lease: LeaseId) -> bool:
        return await self._other.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        await self._other.revoke(lease)

    async def revoke_all(self) -> None:
        """End all leases: their keys would be removed later, at a revision of another test's."""
        for lease in self._granted:
            await self._other.revoke(lease)

    def changes(self, event: Changes) -> Changes:
        changes = (Change(change.key, self._entry(change.entry)) for change in event.changes)
        return Changes(self.ours(event.revision), tuple(changes))

    def ours(self, revision: Revision) -> Revision:
        return self._ours(revision)

    def _entry(self, entry: Entry | None) -> Entry | None:
        return None if entry is None else self._present(entry)

    def _present(self, entry: Entry) -> Entry:
        return replace(entry, revision=self._ours(entry.revision))

    def _ours(self, revision: Revision) -> Revision:
        return Revision(revision - self._base)

    def _theirs(self, revision: Revision) -> Revision:
        return Revision(revision + self._base)


class _RebasedWatch:
    """A watch of the other."""

    def __init__(self, other: Watch, coordinator: RebasedCoordinator) -> None:
        self._other = other
        self._coordinator = coordinator

    @property
    def resumes_at(self) -> Revision:
        return self._coordinator.ours(self._other.resumes_at)

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes | ReadAnew:
        event = await anext(self._other)
        return event if isinstance(event, ReadAnew) else self._coordinator.changes(event)
