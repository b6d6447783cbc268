"""A replica that follows: it takes the groups of the log into its own journal and tables, in order.

    catch_up        read the log to its end                             at the start, and when a watch was too slow
    until_free      watch the log and the leader's key; take groups     until nobody leads
    finish          read to the end once more, under the own term;      then the replica leads
                    remove what the last leader left

Rules kept here:
- A replica that lacks a group that was trimmed is behind (ReplicaIsBehind), and one that has groups that the log never
  had is refused: the coordinator came back older than it was, or is another one.
- Nobody appends between `finish` and the replica's own first group: the last leader's appends compare a key that is
  gone, and the next one's would end this term.
- Parts that are left without their group's last one are removed before anything is appended: a group that never was
  shall not be completed by another's part.  So are parts of trimmed groups: repeats of an append that came late.
- A log is begun once, by the replica that the lake's move to the coordinator names (`origin`), behind all that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Change, Compare, Coordinator, Delete, HasRevision, IsAbsent, Put, ReadAnew
from engine.coordinator.lake_state import pages
from engine.coordinator.records import LogRecord, decode, encode
from engine.format.group_parts import LogKeys
from engine.group_log.assembly import Assembly, ReplicaIsBehind
from engine.group_log.tail import Tail
from engine.metadata.metadata_store import Metadata
from lakefs.errors import CoordinatorLost, EngineBusy, EngineUnreachable, StoreUnusable
from lakefs.ids import ReplicaId, Revision, Sequence
from lakefs.limits import COORDINATOR_OPERATIONS_MAX

_AWAY: Final = EngineUnreachable, EngineBusy
_PAUSE_S: Final = 0.2
_log: Final = structlog.get_logger(__name__)


class Follower:
    """The groups of one log, on their way into one store.  `tail` has what is in the log, as far as it was seen."""

    def __init__(
        self,
        coordinator: Coordinator,
        keys: LogKeys,
        lake: bytes,
        replica: ReplicaId,
        metadata: Metadata,
        caught_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`metadata` run, and nothing is committed.  `caught_up` is called when the log was read to its end."""
        self._caught_up = caught_up
        self.tail = Tail()
        self._coordinator = coordinator
        self._keys = keys
        self._lake = lake
        self._replica = replica
        self._metadata = metadata
        self._assembly = Assembly(keys, Sequence(metadata.durable_sequence + 1))

    async def catch_up(self) -> Revision:
        """Take all groups that are in the log; returns the revision from which a watch goes on.

        ReplicaIsBehind; StoreUnusable for a log that is not there, is another lake's, or is older than this replica;
        StoreDamaged, EngineUnreachable, EngineBusy, and errors of `Metadata.take`.
        """
        trimmed, revision = await self._log_record()
        self._assembly.read_anew()
        begins = Sequence(trimmed + 1)
        is_known = self.tail.begins_by(begins)  # at the first time groups that this replica has are read, too
        begin = self._assembly.first_key if is_known else min(self._keys.group(begins), self._assembly.first_key)
        async with aclosing(pages(self._coordinator, begin, self._keys.groups[1])) as found:
            async for page in found:
                for entry in page.entries:
                    await self._put(entry.key, entry.value)
        has = self._assembly.next_sequence - 1
        end = max(trimmed, self.tail.last)
        if has > end:
            raise StoreUnusable(
                f"this replica of the names has group {has}, and the log at the coordinator ends with {end}: the "
                "coordinator was put back from a backup, or is another one; see docs/cluster.md",
                subject="names",
            )
        self._caught_up()
        return Revision(revision + 1)

    async def until_free(self) -> None:
        """Take groups until nobody leads.  Errors of `catch_up`; waits while the coordinator is away."""
        while True:
            try:
                if await self._followed():
                    return
            except _AWAY as error:
                _log.warning("the log of the names cannot be followed now", error=error.message)
                await trio.sleep(_PAUSE_S)

    async def finish(self, term: Revision) -> None:
        """Take the log's last groups and remove what is left over, as the one who leads.

        CoordinatorLost when another leads; errors of `catch_up`.
        """
        while True:
            await self.catch_up()
            left_over = self._assembly.left_over or await self._late_parts()
            if not left_over:
                break
            await self._remove(left_over, term)
        await self._metadata.sync()

    async def _remove(self, left_over: list[bytes], term: Revision) -> None:
        """Remove parts as they are read now: a repeat of this that comes late removes no part of this term's."""
        compares: list[Compare] = [HasRevision(self._keys.leader, term)]
        for key in left_over:
            entry = (await self._coordinator.get(key)).entry
            compares.append(IsAbsent(key) if entry is None else HasRevision(key, entry.revision))
        done = await self._coordinator.transact(compares, [Delete(key) for key in left_over])
        leader = done.seen[0]
        if leader is None or leader.revision != term:
            raise CoordinatorLost("another replica leads the names now")
        _log.warning("parts of groups that the last leader left were removed", parts=len(left_over))

    async def _late_parts(self) -> list[bytes]:
        """Return keys of groups that were trimmed, which a late repeat of an append has put once more."""
        trimmed, _ = await self._log_record()
        begin, end = self._keys.groups[0], self._keys.group(trimmed + 1)
        page = await self._coordinator.range(begin, end, limit=COORDINATOR_OPERATIONS_MAX // 2)
        return [entry.key for entry in page.entries]

    async def _followed(self) -> bool:
        """Follow until nobody leads (True), or the log has to be read anew."""
        revision = await self.catch_up()
        found = await self._coordinator.get(self._keys.leader)
        if found.entry is None:
            return True
        async with self._coordinator.watch(*self._keys.followed, revision) as watch:
            async for event in watch:
                if isinstance(event, ReadAnew):
                    return False
                for change in event.changes:
                    await self._change(change)
                    if change.key == self._keys.leader and change.entry is None and event.revision > found.revision:
                        return True
        return False

    async def _change(self, change: Change) -> None:
        if change.key == self._keys.log and change.entry is not None:
            self._note_trimmed(decode(LogRecord, change.entry.value).trimmed)
        elif change.entry is None:
            self._assembly.remove(change.key)
        else:
            await self._put(change.key, change.entry.value)

    async def _put(self, key: bytes, value: bytes) -> None:
        place = self._keys.place(key)
        if place is not None and place[0] < self._assembly.next_sequence:
            self.tail.add_part(place[0], len(value), place[1])
        for group in self._assembly.put(key, value):
            await self._metadata.take(group.sequence, group.body, group.record_count)
            self.tail.add(group.sequence, len(group.body), group.part_count)

    async def _log_record(self) -> tuple[Sequence, Revision]:
        """Return the last group that was trimmed, and a revision before all that is read later; begin a log if new."""
        while True:
            found = await self._coordinator.get(self._keys.log)
            if found.entry is not None:
                record = decode(LogRecord, found.entry.value)
                if record.lake != self._lake:
                    raise StoreUnusable("the coordinator has the names of another lake", subject="names")
                self._note_trimmed(record.trimmed)
                return record.trimmed, found.revision
            await self._begin_log()

    async def _begin_log(self) -> None:
        """Begin the log behind what this replica has, if it is the one that all others begin from.

        EngineUnreachable while that one has not begun it; StoreUnusable where nobody is to begin it.
        """
        origin = (await self._coordinator.get(self._keys.origin)).entry
        if origin is None:
            raise StoreUnusable(
                "the coordinator has no log of these names: it came back empty, or is another one; see docs/cluster.md",
                subject="names",
            )
        if origin.value != self._replica:
            raise EngineUnreachable("the log of the names has not been begun yet")
        record = LogRecord(self._lake, self._metadata.durable_sequence)
        compares: list[Compare] = [IsAbsent(self._keys.log), HasRevision(self._keys.origin, origin.revision)]
        await self._coordinator.transact(compares, [Put(self._keys.log, encode(record)), Delete(self._keys.origin)])

    def _note_trimmed(self, trimmed: Sequence) -> None:
        self._refuse_behind(trimmed)
        self.tail.trim(trimmed)

    def _refuse_behind(self, trimmed: Sequence) -> None:
        if trimmed >= self._assembly.next_sequence:
            raise ReplicaIsBehind(
                f"the log of the names was trimmed up to group {trimmed}, and this replica still needs "
                f"{self._assembly.next_sequence}"
            )
