"""`TermCoordinator`: the coordinator of a lake, for what the replica of the names that leads does in its term.

The upkeep of a lake runs beside the names that lead.  A process that was stopped, or slow, may be deposed before it
knows: another one then makes tables, retires them, and binds names by what it has read.  So each transaction compares
the leader's key as it was in the term, and nothing is changed behind its end.

Rules kept here:
- The term is that of the record which names this replica, read before the first transaction.  Who reads another one has
  been deposed: CoordinatorLost, as for every transaction of which the comparison fails.
- Reads, watches and leases are as those of anybody: they decide nothing.
- A transaction has one comparison less than it has without, and no `else_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from engine.coordinator.coordinator import Compare, Coordinator, Found, HasRevision, Operation, Page, Transacted, Watch
from engine.coordinator.records import LEADER_KEY, LeaderRecord, decode
from lakefs.errors import CoordinatorLost
from lakefs.ids import LeaseId, Revision


class TermCoordinator:
    """`Coordinator` over another one, for one term of a replica.  Used on the loop."""

    def __init__(self, coordinator: Coordinator, replica: bytes, leader_key: bytes = LEADER_KEY) -> None:
        """`replica`: the id of the one that leads when this is made; `leader_key`: of its names shard."""
        self._coordinator: Final = coordinator
        self._key: Final = leader_key
        self._replica: Final = replica
        self._term: HasRevision | None = None

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Compare and change keys at one revision, within the term; see the port.  CoordinatorLost behind its end."""
        assert not else_ops, "behind a term nothing is done when a comparison fails"
        term = self._term or await self._read_term()
        done = await self._coordinator.transact([term, *compares], then_ops, is_repeatable=is_repeatable)
        leader, *seen = done.seen
        if leader is None or leader.revision != term.revision:
            raise _deposed()
        return Transacted(done.outcome, done.revision, tuple(seen))

    async def _read_term(self) -> HasRevision:
        entry = (await self._coordinator.get(self._key)).entry
        if entry is None or decode(LeaderRecord, entry.value).replica != self._replica:
            raise _deposed()
        self._term = HasRevision(self._key, entry.revision)
        return self._term

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        return await self._coordinator.get(key)

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port."""
        return await self._coordinator.range(begin, end, limit=limit, after=after)

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AbstractAsyncContextManager[Watch]:
        """Watch a range; see the port."""
        return self._coordinator.watch(begin, end, from_revision)

    async def compact(self, revision: Revision) -> None:
        """Forget changes before a revision; see the port."""
        await self._coordinator.compact(revision)

    async def lease(self, ttl_s: int) -> LeaseId:
        """Grant a lease; see the port."""
        return await self._coordinator.lease(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Let a lease run for its whole time again; see the port."""
        return await self._coordinator.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see the port."""
        await self._coordinator.revoke(lease)


def _deposed() -> CoordinatorLost:
    return CoordinatorLost("another replica leads the names now: nothing is changed by this one")
