"""Trims the log: the leader removes groups that two replicas have in their journals, and lets the coordinator forget.

Rules kept here:
- A group is removed when KEPT_BY replicas have said that they have it, or all, where there are fewer.  Beyond
  TAIL_BYTES_MAX of tail the leader's own journal is enough: a replica that lacks the group begins anew.
- While a replica begins anew, nothing is removed, unless the tail is too long.
- Each removal compares the leader's key and the records that were counted, and says in the same transaction how far
  the log is trimmed: a reader finds a group, or learns that it is gone.
- Groups go in order, each with all its parts.
- A coordinator that has no room is trimmed as if the tail were too long (`engine.group_log.room`).
- The coordinator is let to forget a removal when the next but one is due: who watches has seconds to see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, Delete, HasRevision, Operation, Put
from engine.coordinator.lake_state import pages
from engine.coordinator.records import LogRecord, ReplicaRecord, decode, encode
from engine.format.group_parts import LogKeys
from engine.group_log.log_bounds import COMPACT_EVERY_S, KEPT_BY, TAIL_BYTES_MAX, TRIM_EVERY_S
from engine.group_log.tail import Tail
from lakefs.errors import LakeError
from lakefs.ids import ReplicaId, Revision, Sequence
from lakefs.limits import COORDINATOR_OPERATIONS_MAX

_NONE: Final = Revision(0)
_log: Final = structlog.get_logger(__name__)


class _Kept(NamedTuple):
    """The last group that a replica has, and the record that says so; this one's own has no key."""

    sequence: Sequence
    key: bytes
    revision: Revision


class Trimming:
    """Trims one log during one term."""

    def __init__(
        self, coordinator: Coordinator, keys: LogKeys, lake: bytes, term: Revision, tail: Tail, own: ReplicaId
    ) -> None:
        """`own`: the replica that leads."""
        self._coordinator = coordinator
        self._keys = keys
        self._lake = lake
        self._term = term
        self._tail = tail
        self._own = own
        self._removed_at = _NONE
        """Revision of the last removal that is not to be forgotten yet."""
        self._forgets = _NONE
        """Revision before which all is forgotten next time: that of a removal COMPACT_EVERY_S ago, or more."""
        self._forget_at = 0.0

    async def run(self, kept: Callable[[], Sequence]) -> None:
        """Trim and forget now and then, until cancelled; `kept` returns the last group in the leader's own journal."""
        while True:
            await trio.sleep(TRIM_EVERY_S)
            try:
                await self.trim(kept())
                await self._forget()
            except LakeError as error:
                _log.warning("the log of the names could not be trimmed; it is tried again", error=error.message)

    async def trim(self, own_kept: Sequence, *, is_full: bool = False) -> None:
        """Remove what may go now; `is_full`: all that the leader's own journal has.

        Errors of `Coordinator`; a removal that another leader prevents is none.
        """
        if not len(self._tail):
            return
        kept = await self._kept(own_kept)
        upto = kept[-1].sequence
        if (await self._coordinator.range(*self._keys.holds, limit=1)).entries:
            upto = Sequence(0)
        counted = [HasRevision(found.key, found.revision) for found in kept if found.key]
        nbytes = self._tail.nbytes
        removed: list[Operation] = []
        last = Sequence(0)
        for group in list(self._tail):
            is_due = is_full or nbytes > TAIL_BYTES_MAX
            if group.sequence > upto and (not is_due or group.sequence > own_kept):
                break
            nbytes -= group.body_bytes
            if len(removed) + group.part_count >= COORDINATOR_OPERATIONS_MAX:
                await self._remove(removed, last, counted if last <= upto else [])
                removed = []
            removed += [Delete(self._keys.part(group.sequence, number)) for number in range(group.part_count)]
            last = group.sequence
        if removed:
            await self._remove(removed, last, counted if last <= upto else [])

    async def _kept(self, own_kept: Sequence) -> list[_Kept]:
        """Return the replicas that have most, so many as are enough; the last of them has least."""
        own = self._keys.replica(self._own)
        kept = [_Kept(own_kept, b"", _NONE)]
        async for page in pages(self._coordinator, *self._keys.replicas):
            for entry in page.entries:
                record = decode(ReplicaRecord, entry.value)
                if entry.key != own and not record.is_removed:
                    kept.append(_Kept(record.kept, entry.key, entry.revision))
        return sorted(kept, reverse=True)[:KEPT_BY]

    async def _remove(self, removed: list[Operation], upto: Sequence, counted: list[HasRevision]) -> None:
        record = Put(self._keys.log, encode(LogRecord(self._lake, upto)))
        compares = [HasRevision(self._keys.leader, self._term), *counted]
        done = await self._coordinator.transact(compares, [record, *removed])
        if done.succeeded:
            self._tail.trim(upto)
            self._removed_at = done.revision

    async def forget_all(self) -> None:
        """Let the coordinator forget all that was before now.  Errors of `Coordinator`."""
        await self._coordinator.compact((await self._coordinator.get(self._keys.log)).revision)

    async def _forget(self) -> None:
        """Let the coordinator forget what was removed a while ago."""
        if trio.current_time() < self._forget_at:
            return
        if self._forgets:
            await self._coordinator.compact(self._forgets)
        self._forgets, self._removed_at = self._removed_at, _NONE
        self._forget_at = trio.current_time() + COMPACT_EVERY_S
