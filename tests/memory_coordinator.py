"""A coordinator in memory (`engine.coordinator.coordinator.Coordinator`), as plain as can be, for tests.

It keeps every change since its beginning in a list, and forgets the oldest only by `HISTORY`, or by `compact`.  Leases
run by trio's clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from engine.coordinator.coordinator import (
    NO_LEASE,
    Change,
    Changes,
    Compare,
    Delete,
    Entry,
    Found,
    HasRevision,
    HasValue,
    Operation,
    Outcome,
    Page,
    Put,
    ReadAnew,
    Transacted,
    Watch,
)
from engine.coordinator.coordinator_bounds import check_key, check_page, check_range, check_transaction, check_ttl
from engine.coordinator.coordinator_table import bounded
from engine.host.tasks import plain_errors
from lakefs.errors import EngineUnreachable, InvalidArgument, RequestTooLarge
from lakefs.ids import LeaseId, Revision
from lakefs.limits import COORDINATOR_LEASE_KEYS_MAX, COORDINATOR_PAGE_BYTES_MAX

HISTORY: Final = 64
"""Revisions that are held for watches."""


@asynccontextmanager
async def memory_coordinator() -> AsyncIterator[MemoryCoordinator]:
    """Yield a new coordinator; calls and watches that outlive the block end with EngineUnreachable."""
    coordinator = MemoryCoordinator()
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.end_leases)
            try:
                yield coordinator
            finally:
                coordinator.close()
                nursery.cancel_scope.cancel()


class MemoryCoordinator:
    """Keys, history and leases of one coordinator."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.revision = Revision(0)
        self.history: list[Changes] = []
        self.changed = trio.lowlevel.ParkingLot()
        self.closed = False
        self.forgotten = 0
        self._leases: dict[LeaseId, tuple[int, float]] = {}
        self._next_lease = 1

    def close(self) -> None:
        self.closed = True
        self.changed.unpark_all()

    async def get(self, key: bytes) -> Found:
        check_key(key)
        await self._reach()
        return Found(self.entries.get(key), self.revision)

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        check_page(begin, end, limit, after)
        await self._reach()
        inside = [self.entries[key] for key in sorted(self.entries) if begin <= key < end and key > after]
        page: list[Entry] = []
        for entry in inside[:limit]:
            if sum(len(taken.value) for taken in page) >= COORDINATOR_PAGE_BYTES_MAX:
                break
            page.append(entry)
        return Page(tuple(page), self.revision, len(page) < len(inside))

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        check_transaction(compares, then_ops, else_ops)
        await self._reach()
        seen = tuple(self.entries.get(compare.key) for compare in compares)
        holds = all(_holds(compare, entry) for compare, entry in zip(compares, seen, strict=True))
        operations = then_ops if holds else else_ops
        leases = {operation.lease for operation in operations if isinstance(operation, Put)} - {NO_LEASE}
        if not leases <= self._leases.keys():
            return Transacted(Outcome.LEASE_GONE, self.revision, bounded(seen))
        for lease in leases:
            keys = {key for key, entry in self.entries.items() if entry.lease == lease}
            keys |= {put.key for put in operations if isinstance(put, Put) and put.lease == lease}
            if len(keys) > COORDINATOR_LEASE_KEYS_MAX:
                raise RequestTooLarge(f"a lease has at most {COORDINATOR_LEASE_KEYS_MAX} keys")
        self._change(operations)
        return Transacted(Outcome.DONE if holds else Outcome.CONFLICT, self.revision, bounded(seen))

    async def compact(self, revision: Revision) -> None:
        await self._reach()
        if revision > self.revision + 1:
            raise InvalidArgument("that revision is yet to come")
        self.forgotten = max(self.forgotten, revision - 1)

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> _MemoryWatching:
        check_range(begin, end)
        return _MemoryWatching(_MemoryWatch(self, begin, end, from_revision))

    async def lease(self, ttl_s: int) -> LeaseId:
        check_ttl(ttl_s)
        await self._reach()
        lease = LeaseId(self._next_lease)
        self._next_lease += 1
        self._leases[lease] = ttl_s, trio.current_time() + ttl_s
        return lease

    async def keep_alive(self, lease: LeaseId) -> bool:
        await self._reach()
        if lease not in self._leases:
            return False
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = ttl_s, trio.current_time() + ttl_s
        return True

    async def revoke(self, lease: LeaseId) -> None:
        await self._reach()
        self._end(lease)

    async def end_leases(self) -> None:
        while True:
            await trio.sleep(0.25)
            for lease, (_, deadline) in list(self._leases.items()):
                if deadline <= trio.current_time():
                    self._end(lease)

    @property
    def forgets_to(self) -> int:
        return max(self.forgotten, self.revision - HISTORY)

    def _end(self, lease: LeaseId) -> None:
        if self._leases.pop(lease, None) is not None:
            self._change([Delete(key) for key, entry in self.entries.items() if entry.lease == lease])

    async def _reach(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.closed:
            raise EngineUnreachable("the coordinator has ended")

    def _change(self, operations: Sequence[Operation]) -> None:
        revision = Revision(self.revision + 1)
        changes = []
        for operation in operations:
            if isinstance(operation, Put):
                entry = Entry(operation.key, operation.value, revision, operation.lease)
                self.entries[operation.key] = entry
                changes.append(Change(operation.key, entry))
            elif self.entries.pop(operation.key, None) is not None:
                changes.append(Change(operation.key, None))
        if changes:
            self.revision = revision
            self.history.append(Changes(revision, tuple(changes)))
            self.changed.unpark_all()


class _MemoryWatching:
    """The block of a watch."""

    def __init__(self, watch: _MemoryWatch) -> None:
        self._watch = watch

    async def __aenter__(self) -> Watch:
        await trio.lowlevel.checkpoint()
        return self._watch

    async def __aexit__(self, *_: object) -> None:
        return None


class _MemoryWatch:
    """A place in the list of changes."""

    def __init__(self, coordinator: MemoryCoordinator, begin: bytes, end: bytes, from_revision: Revision) -> None:
        self._coordinator = coordinator
        self._begin, self._end = begin, end
        self._next: int = from_revision
        self._ended = False

    @property
    def resumes_at(self) -> Revision:
        event = self._next_event()
        return max(Revision(self._next), Revision(self._coordinator.revision + 1)) if event is None else event.revision

    def __aiter__(self) -> Watch:
        return self

    def _next_event(self) -> Changes | None:
        for event in self._coordinator.history[max(0, self._next - 1) :]:
            inside = tuple(change for change in event.changes if self._begin <= change.key < self._end)
            if inside:
                return Changes(event.revision, inside)
        return None

    async def __anext__(self) -> Changes | ReadAnew:
        await trio.lowlevel.checkpoint()
        while not self._ended:
            event = self._next_event()
            if event is not None and event.revision <= self._coordinator.forgets_to:
                self._ended = True
                return ReadAnew()
            if event is not None:
                self._next = event.revision + 1
                return event
            if self._coordinator.closed:
                raise EngineUnreachable("the coordinator has ended")
            await self._coordinator.changed.park()
        raise StopAsyncIteration


def _holds(compare: Compare, entry: Entry | None) -> bool:
    match compare:
        case HasRevision():
            return entry is not None and entry.revision == compare.revision
        case HasValue():
            return entry is not None and entry.value == compare.value
        case _:
            return entry is None
