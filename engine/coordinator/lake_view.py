"""`LakeView`: tables, members and gc generation of a lake, as this process last read them from the coordinator.

Rules kept here:
- `tables` holds the ring epochs that are not retired, the newest first; it is never empty.
- Nothing here is newer than the coordinator: a table that a member hands over was read there by somebody.  All of it
  may be older: by a watch's delay, and by more while the
  coordinator cannot be asked.  `read_newer` asks when somebody has shown that it is older.
- A record that cannot be read (of a later release, damaged) changes nothing, and is logged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, ReadAnew
from engine.coordinator.lake_state import NO_GENERATION, LakeState, pages
from engine.coordinator.records import (
    EPOCH_KEY,
    EPOCHS,
    GENERATION_KEY,
    MEMBERS,
    GenerationRecord,
    MemberRecord,
    decode,
    epoch_key,
    epoch_of_key,
    member_key,
)
from engine.host.tasks import plain_errors
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import unpack
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, StoreUnusable
from lakefs.ids import GcGeneration, MemberId, Revision, RingEpoch

_BEGIN: Final = EPOCH_KEY
_END: Final = MEMBERS[1]
"""Keys from EPOCH_KEY on: epochs, generation, the lake, members.  Notes of dirty partitions are before them."""
_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 5.0
_log: Final = structlog.get_logger(__name__)


@asynccontextmanager
async def open_lake_view(coordinator: Coordinator) -> AsyncIterator[LakeView]:
    """Read the lake's records, and follow their changes until the block ends.

    EngineUnreachable; StoreUnusable while the lake has no table.
    """
    view = LakeView(coordinator)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            revision = await view.read()
            nursery.start_soon(view.follow, revision)
            yield view
            nursery.cancel_scope.cancel()


class LakeView:
    """A lake's records in memory.  Made by `open_lake_view`; used on the loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.state: Final = LakeState(coordinator)
        self.tables: tuple[Table, ...] = ()
        self.packed_table = b""
        """The newest table's bytes."""
        self.generation = NO_GENERATION
        self.members: dict[MemberId, MemberRecord] = {}
        self._coordinator = coordinator
        self._packed: dict[RingEpoch, bytes] = {}
        self._unpacked: dict[RingEpoch, Table] = {}
        self._reading = trio.Lock()
        self._listeners: dict[int, Callable[[], None]] = {}

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change; returns the function that ends that."""
        key = id(listener)
        self._listeners[key] = listener
        return lambda: (self._listeners.pop(key, None), None)[1]

    async def read(self) -> Revision:
        """Read everything anew; returns the revision from behind which to watch."""
        async with self._reading:
            read = [page async for page in pages(self._coordinator, _BEGIN, _END)]
            revision = read[0].revision
            found = {entry.key: entry.value for page in read for entry in page.entries}
            for epoch in [epoch for epoch in self._packed if epoch_key(epoch) not in found]:
                del self._packed[epoch]
            self.members = {member: record for member, record in self.members.items() if member_key(member) in found}
            for key, value in found.items():
                self._take(key, value)
            self._changed()
        if not self.tables:
            raise StoreUnusable("the lake has no ring table yet: its first members have not been added")
        return revision

    async def read_newer(self, known: RingEpoch) -> None:
        """Read everything anew unless a newer table than that of `known` was read already.  EngineUnreachable."""
        if self.tables[0].ring_epoch <= known:
            await self.read()

    async def take_over(self, packed: bytes) -> None:
        """Take a table from a member, which was given it by somebody who had read it; the coordinator is not asked.

        Nothing changes unless it is newer than all that are known.  What else is new arrives by the watch.
        """
        async with self._reading:  # what is being read must not take its place
            try:
                table = unpack(packed)
            except LakeError as error:
                _log.warning("a member's table is not used", reason=error.message)
                return
            newest = self.tables[0]
            if table.ring_epoch > newest.ring_epoch and table.protection == newest.protection:
                self._packed[table.ring_epoch], self._unpacked[table.ring_epoch] = packed, table
                self._changed()

    async def present_generation(self) -> GcGeneration:
        """Return the gc generation, read from the coordinator now.  EngineUnreachable."""
        self.generation = max(self.generation, await self.state.generation())
        return self.generation

    async def follow(self, revision: Revision) -> None:
        """Follow changes from behind `revision`, until cancelled; waits while the coordinator is away."""
        pause_s = _PAUSE_S_MIN
        while True:
            began = trio.current_time()
            try:
                async with self._coordinator.watch(_BEGIN, _END, Revision(revision + 1)) as watch:
                    async for event in watch:
                        pause_s = _PAUSE_S_MIN
                        if isinstance(event, ReadAnew):
                            break
                        for change in event.changes:
                            self._take(change.key, None if change.entry is None else change.entry.value)
                        revision = event.revision
                        self._changed()
                revision = await self.read()
            except (EngineUnreachable, EngineBusy) as error:
                if trio.current_time() > began + _PAUSE_S_MAX:  # it was followed for a while
                    pause_s = _PAUSE_S_MIN
                if pause_s == _PAUSE_S_MIN:  # said once, not with each attempt
                    _log.warning("coordinator_away", reason=error.message)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _take(self, key: bytes, value: bytes | None) -> None:
        """Take one record; None: it was removed."""
        try:
            if key.startswith(MEMBERS[0]):
                member = MemberId(bytes.fromhex(key.removeprefix(MEMBERS[0]).decode()))
                if value is None:
                    self.members.pop(member, None)
                else:
                    self.members[member] = decode(MemberRecord, value)
            elif key.startswith(EPOCHS[0]):
                epoch = epoch_of_key(key)
                if value is None:
                    self._packed.pop(epoch, None)
                elif self._packed.get(epoch) != value:
                    self._unpacked[epoch] = unpack(value)
                    self._packed[epoch] = value
            elif key == GENERATION_KEY and value is not None:
                self.generation = max(self.generation, decode(GenerationRecord, value).number)
        except LakeError as error:
            _log.error("coordinator_record_unusable", key=key.decode(errors="replace"), reason=error.message)

    def _changed(self) -> None:
        if self._packed:  # a lake that had a table always has one
            newest_first = sorted(self._packed, reverse=True)
            self._unpacked = {epoch: self._unpacked[epoch] for epoch in newest_first}
            self.tables = tuple(self._unpacked.values())
            self.packed_table = self._packed[newest_first[0]]
        for listener in [*self._listeners.values()]:
            listener()
