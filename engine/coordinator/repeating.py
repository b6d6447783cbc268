"""The coordinator's lasting keys, repeated into the coordinator's table of the names that lead.

A lake with etcd has its names on replicas, and members, tables and generation in the etcd alone.  The replica that
leads puts each change of these into its own table, which all replicas get with the log; so a replica is a lake even
when the etcd is lost for ever (`engine.lake.rescue`).

Rules kept here:
- The table is changed only while it says that another coordinator is in charge.
- A change is repeated within REPEAT_EVERY_S, unless the names take none just then; changes of that time are put
  together, so the log gets one group or a few for them.
- A number is never repeated before what it refers to: tables of ring epochs come before the number of the newest.
- With each change, and each SIGN_EVERY_S, the table notes the time, and how far each replica of each shard was.
- Errors of both coordinators are logged once, and it is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import END, Coordinator, Delete, Entry, HasValue, Operation, Put, ReadAnew
from engine.coordinator.lake_state import LakeState, pages
from engine.coordinator.lasting import BEGIN, batches, lasting, lasts
from engine.coordinator.records import (
    CHARGE_KEY,
    EPOCHS,
    NAMES,
    REPEATED_KEY,
    Charge,
    ChargeRecord,
    RepeatedRecord,
    RepeatedReplica,
    ReplicaRecord,
    decode,
    encode,
)
from engine.format.group_parts import LogKeys
from engine.host.tasks import plain_errors
from lakefs.errors import EngineBusy, LakeError
from lakefs.ids import NamesShard, Revision
from lakefs.ports import Clock

REPEAT_EVERY_S: Final = 1.0
SIGN_EVERY_S: Final = 60.0
"""A lake that nobody changes has a group so often: 100 bytes of journal, and what it lacks when it is rescued is known
to the minute."""
_PAUSE_S: Final = 1.0
_RANGES: Final = ((BEGIN, NAMES[0]), (NAMES[1], END))
"""All keys but those of the names: their log has each group."""
_log: Final = structlog.get_logger(__name__)


class Repeating:
    """Repeats the lasting keys of one coordinator into another.  `run` it; used on the loop."""

    def __init__(self, source: Coordinator, table: Coordinator, clock: Clock) -> None:
        self._source = source
        self._table = table
        self._clock = clock
        self._repeated: dict[bytes, bytes] = {}
        """The values in the table."""
        self._waiting: dict[bytes, bytes | None] = {}
        """Values to be put; None: the key is to be removed."""
        self._unknown: set[bytes] = set()
        """Keys that are being put, or whose put has failed: the table may have them in either way."""
        self._changed = trio.Event()
        self._read = 0
        """Ranges that were read whole."""
        self._is_failing = False

    async def run(self) -> None:
        """Repeat until cancelled."""
        while True:
            try:
                self._repeated = await lasting(self._table)
                break
            except LakeError as error:
                self._fail(error)
                await trio.sleep(_PAUSE_S)
        with plain_errors():
            async with trio.open_nursery() as nursery:
                for begin, end in _RANGES:
                    nursery.start_soon(self._follow, begin, end)
                await self._write()

    # --- the source ----------------------------------------------------------------------------------

    async def _follow(self, begin: bytes, end: bytes) -> None:
        """Note each change of a range, until cancelled."""
        is_first = True
        while True:
            try:
                revision = await self._read_range(begin, end)
                self._read += is_first
                is_first = False
                self._changed.set()
                async with self._source.watch(begin, end, Revision(revision + 1)) as watch:
                    async for event in watch:
                        if isinstance(event, ReadAnew):
                            break
                        for change in event.changes:
                            self._take(change.key, change.entry)
            except LakeError as error:
                self._fail(error)
                await trio.sleep(_PAUSE_S)

    async def _read_range(self, begin: bytes, end: bytes) -> Revision:
        """Note what differs in a range; returns the revision from behind which to watch."""
        read = [page async for page in pages(self._source, begin, end)]
        found = {entry.key: entry for page in read for entry in page.entries}
        for key in [*self._repeated, *self._waiting]:
            if begin <= key < end and key not in found:
                self._take(key, None)
        for key, entry in found.items():
            self._take(key, entry)
        return read[0].revision

    def _take(self, key: bytes, entry: Entry | None) -> None:
        value = entry.value if entry is not None and lasts(entry) else None
        if key not in self._unknown and self._repeated.get(key) == value:
            self._waiting.pop(key, None)
        else:
            self._waiting[key] = value
            self._changed.set()

    # --- the table -----------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Put what was noted into the table, and the time with it, until cancelled."""
        while self._read < len(_RANGES):
            self._changed = trio.Event()
            await self._changed.wait()
        while True:
            self._changed = trio.Event()
            try:
                await self._put(dict(self._waiting))
            except LakeError as error:
                self._fail(error)
                await trio.sleep(_PAUSE_S)
                continue
            self._is_failing = False
            await trio.sleep(REPEAT_EVERY_S)
            if not self._waiting:
                with trio.move_on_after(SIGN_EVERY_S - REPEAT_EVERY_S):
                    await self._changed.wait()

    async def _put(self, waiting: Mapping[bytes, bytes | None]) -> None:
        """Put values; those that change meanwhile stay noted, also if they change back to what the table has now."""
        self._unknown.update(waiting)
        charge = (await self._table.get(CHARGE_KEY)).entry
        if charge is None or decode(ChargeRecord, charge.value).state is not Charge.LEFT:
            raise EngineBusy("the table in the names is not one that was left for another coordinator")
        sign = Put(REPEATED_KEY, encode(RepeatedRecord(self._clock.wall_ns(), await self._replicas())))
        puts = [Put(key, value) for key, value in waiting.items() if value is not None]
        puts.sort(key=lambda put: not EPOCHS[0] <= put.key < EPOCHS[1])
        removals = [Delete(key) for key, value in waiting.items() if value is None]
        changes = list(batches([*puts, *removals]))
        for batch in [*changes[:-1], [*(changes[-1] if changes else ()), sign]]:
            await self._transact(HasValue(CHARGE_KEY, charge.value), batch)

    async def _transact(self, compare: HasValue, batch: list[Operation]) -> None:
        changes = [operation for operation in batch if operation.key != REPEATED_KEY]
        if not (await self._table.transact([compare], batch)).succeeded:
            raise EngineBusy("the coordinator's table in the names was changed by another process")
        for change in changes:
            value = change.value if isinstance(change, Put) else None
            if value is None:
                self._repeated.pop(change.key, None)
            else:
                self._repeated[change.key] = value
            if self._waiting[change.key] == value:
                del self._waiting[change.key]
        self._unknown.difference_update([change.key for change in changes])

    async def _replicas(self) -> tuple[RepeatedReplica, ...]:
        found: list[RepeatedReplica] = []
        for shard in range(await LakeState(self._source).names_shards()):
            keys = LogKeys(NamesShard(shard))
            async for page in pages(self._source, *keys.replicas):
                for entry in page.entries:
                    record, replica = decode(ReplicaRecord, entry.value), keys.replica_of(entry.key)
                    if not record.is_removed:
                        about = record.machine, record.kept, record.said_ns, NamesShard(shard)
                        found.append(RepeatedReplica(replica, *about))
        return tuple(found)

    def _fail(self, error: LakeError) -> None:
        """Log an error, once for a row of them."""
        if not self._is_failing:
            _log.warning("the lake's records are not repeated into its names now", reason=error.message)
        self._is_failing = True
