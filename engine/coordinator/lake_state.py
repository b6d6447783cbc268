"""Reads and changes what a cluster keeps with its coordinator: members, ring epochs, generation, dirty partitions.

Rules kept here:
- A step from one number to the next (epoch, generation) compares the revision of the record that it was read from, in
  one transaction with the change.  Of two that step at once one succeeds, and the other learns it.
- A partition is noted as dirty without comparison; the note is durable before the call returns.  It is cleared only at
  the revision at which the clearer read it: a note that came later stays.
- A member that registers changes where and how large it is, never its state.

Every call is over the port `Coordinator` and has its errors.  A change that is cancelled has been done whole, or not at
all; only `note_dirty`, which may take several transactions, may have noted some of its partitions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from engine.coordinator.coordinator import (
    Compare,
    Coordinator,
    Delete,
    Entry,
    HasRevision,
    HasValue,
    IsAbsent,
    Page,
    Put,
)
from engine.coordinator.records import (
    EPOCH_KEY,
    EPOCHS,
    ETCD_KEY,
    GENERATION_KEY,
    LAKE_KEY,
    MEMBERS,
    OPENINGS,
    PRESENT,
    SETTINGS_KEY,
    SHARDS_KEY,
    WALK_KEY,
    WALKER_KEY,
    DirtyRecord,
    EpochRecord,
    EtcdRecord,
    GenerationRecord,
    HeadRecord,
    LakeRecord,
    MemberRecord,
    MemberState,
    OpeningRecord,
    SettingsRecord,
    ShardsRecord,
    WalkRecord,
    decode,
    dirty_key,
    encode,
    epoch_key,
    epoch_of_key,
    member_key,
    member_of_key,
    opening_key,
    partition_of_key,
)
from lakefs.errors import PreconditionFailed
from lakefs.ids import GcGeneration, LeaseId, MemberId, Partition, Revision, RingEpoch
from lakefs.limits import COORDINATOR_OPERATIONS_MAX, COORDINATOR_PAGE_MAX

NO_EPOCH: Final = RingEpoch(0)
NO_GENERATION: Final = GcGeneration(0)
FIRST_PARTITION: Final = Partition(0)
LAST_PARTITION: Final = Partition(0xFFFF)
_CLEARED_MAX: Final = COORDINATOR_OPERATIONS_MAX - 2
"""Two comparisons are left, for a coordinator that is fenced (`fenced_coordinator`), and for a term."""


class Dirty(msgspec.Struct, frozen=True):
    """A dirty partition: the ring epoch of its last note, and the revision of that note; see `DirtyRecord`."""

    partition: Partition
    epoch: RingEpoch
    revision: Revision
    is_moving: bool = False
    is_home: bool = False


class LakeState:
    """The state that all processes of one lake share.  Holds nothing in memory."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    # --- lake and members --------------------------------------------------------------------------------

    async def make_lake(self, lake: LakeRecord) -> LakeRecord:
        """Record the lake if none is; returns the one that is recorded now, which may be another."""
        done = await self._coordinator.transact([IsAbsent(LAKE_KEY)], [Put(LAKE_KEY, encode(lake))])
        return lake if done.seen[0] is None else decode(LakeRecord, done.seen[0].value)

    async def name_lake(self, name: str) -> None:
        """Give the lake, which was made, a name."""
        while True:
            entry = (await self._coordinator.get(LAKE_KEY)).entry
            assert entry is not None, "the lake was made"
            known = decode(LakeRecord, entry.value)
            if known.name == name or await self._replace(
                LAKE_KEY, entry, encode(msgspec.structs.replace(known, name=name))
            ):
                return

    async def lake(self) -> LakeRecord | None:
        """Return the lake; None before it was made."""
        entry = (await self._coordinator.get(LAKE_KEY)).entry
        return None if entry is None else decode(LakeRecord, entry.value)

    async def etcd(self) -> EtcdRecord | None:
        """Return where the lake's etcd is; None for a lake without."""
        entry = (await self._coordinator.get(ETCD_KEY)).entry
        return None if entry is None else decode(EtcdRecord, entry.value)

    async def record_etcd(self, etcd: EtcdRecord) -> None:
        """Record where the lake's etcd is."""
        value = encode(etcd)
        entry = (await self._coordinator.get(ETCD_KEY)).entry
        if entry is None or entry.value != value:
            await self._coordinator.transact([], [Put(ETCD_KEY, value)])

    async def settings(self) -> SettingsRecord | None:
        """Return the lake's settings; None if nobody has set any."""
        entry = (await self._coordinator.get(SETTINGS_KEY)).entry
        return None if entry is None else decode(SettingsRecord, entry.value)

    async def change_settings(self, change: Callable[[SettingsRecord], SettingsRecord]) -> SettingsRecord:
        """Change the lake's settings; returns them."""
        while True:
            entry = (await self._coordinator.get(SETTINGS_KEY)).entry
            known = SettingsRecord() if entry is None else decode(SettingsRecord, entry.value)
            wanted = change(known)
            if wanted == known or await self._replace(SETTINGS_KEY, entry, encode(wanted)):
                return wanted

    async def heads(self) -> list[HeadRecord]:
        """Return the processes that serve clients and are there, in a lake with etcd."""
        return [decode(HeadRecord, entry.value) async for entry in self._all(*PRESENT)]

    async def register(self, member: MemberRecord) -> MemberRecord:
        """Record a new member, or where and how large a known one is now; returns the record, with its state.

        PreconditionFailed for a member that was removed: its shards are not of this lake any more.
        """
        key = member_key(member.member)
        while True:
            entry = (await self._coordinator.get(key)).entry
            known = None if entry is None else decode(MemberRecord, entry.value)
            if known is not None and known.state is MemberState.REMOVED:
                raise PreconditionFailed("this member was removed from the lake", subject=member.member.hex())
            wanted = member if known is None else msgspec.structs.replace(member, state=known.state)
            if wanted == known or (await self._replace(key, entry, encode(wanted))):
                return wanted

    async def set_state(self, member: MemberId, expected: MemberState, state: MemberState) -> bool:
        """Change a member's state; False if it is not in the expected one (any more), or not known."""
        key = member_key(member)
        while True:
            entry = (await self._coordinator.get(key)).entry
            known = None if entry is None else decode(MemberRecord, entry.value)
            if known is None or known.state is not expected:
                return False
            if await self._replace(key, entry, encode(msgspec.structs.replace(known, state=state))):
                return True

    async def members(self) -> list[MemberRecord]:
        """Return all members, removed ones too, in the order of their ids."""
        return [decode(MemberRecord, entry.value) async for entry in self._all(*MEMBERS)]

    async def openings(self) -> dict[MemberId, OpeningRecord]:
        """Return the last recorded opening of each member's store."""
        return {member_of_key(entry.key): decode(OpeningRecord, entry.value) async for entry in self._all(*OPENINGS)}

    async def record_openings(self, openings: Mapping[MemberId, OpeningRecord]) -> None:
        """Record openings, without comparison.  Cancelled, some may have been recorded."""
        puts = [Put(opening_key(member), encode(openings[member])) for member in sorted(openings)]
        for first in range(0, len(puts), COORDINATOR_OPERATIONS_MAX):
            await self._coordinator.transact([], puts[first : first + COORDINATOR_OPERATIONS_MAX])

    # --- ring epochs -------------------------------------------------------------------------------------

    async def epoch(self) -> RingEpoch:
        """Return the number of the newest ring epoch; 0 before the first."""
        return (await self._epoch())[0]

    async def next_epoch(self, known: RingEpoch, table: bytes) -> RingEpoch | None:
        """Make the ring epoch behind `known`; returns its number, or None if `known` is not the newest (any more)."""
        newest, entry = await self._epoch()
        if newest != known:
            return None
        number = RingEpoch(known + 1)
        done = await self._coordinator.transact(
            [_as_read(EPOCH_KEY, entry)], [Put(EPOCH_KEY, encode(EpochRecord(number))), Put(epoch_key(number), table)]
        )
        return number if done.succeeded else None

    async def epoch_tables(self) -> dict[RingEpoch, bytes]:
        """Return the tables of all ring epochs that are not retired, the oldest first."""
        return {epoch_of_key(entry.key): entry.value async for entry in self._all(*EPOCHS)}

    async def retire_epoch(self, epoch: RingEpoch, *, shards: int = 1) -> bool:
        """Remove the table of an older ring epoch; False if it is the newest, or is not there (any more).

        `shards`: the number of names shards that refuse it.  False, too, when the lake has another number of them.
        """
        newest, _ = await self._epoch()
        table = (await self._coordinator.get(epoch_key(epoch))).entry
        count, counted = await self._shards()
        if epoch >= newest or table is None or count != shards:
            return False
        compares = [_as_read(epoch_key(epoch), table), _as_read(SHARDS_KEY, counted)]
        return (await self._coordinator.transact(compares, [Delete(epoch_key(epoch))])).succeeded

    async def names_shards(self) -> int:
        """Return the number of names shards; it never falls."""
        return (await self._shards())[0]

    # --- generation --------------------------------------------------------------------------------------

    async def generation(self) -> GcGeneration:
        """Return the present generation; 0 before the first."""
        return (await self._generation())[0]

    async def advance_generation(self, known: GcGeneration) -> GcGeneration | None:
        """Advance the generation; returns the new one, or None if `known` is not the present one (any more)."""
        present, entry = await self._generation()
        if present != known:
            return None
        number = GcGeneration(known + 1)
        change = Put(GENERATION_KEY, encode(GenerationRecord(number)))
        done = await self._coordinator.transact([_as_read(GENERATION_KEY, entry)], [change])
        return number if done.succeeded else None

    async def begin_gc(self) -> tuple[GcGeneration, dict[RingEpoch, bytes]]:
        """Advance the generation; returns the new one and the tables, as `epoch_tables`, of that very moment.

        A member that is a home in each of these tables may free in this generation's cycle; tables that are read at
        another moment do not say who may.  PreconditionFailed while the lake has no table.
        """
        while True:
            present, generation = await self._generation()
            newest = (await self._coordinator.get(EPOCH_KEY)).entry  # before the tables: a newer one has no table here
            tables = [entry async for entry in self._all(*EPOCHS)]
            if not tables:
                raise PreconditionFailed("the lake has no ring table yet: its first members have not been added")
            number = GcGeneration(present + 1)
            compares = [_as_read(GENERATION_KEY, generation), _as_read(EPOCH_KEY, newest)]
            compares += [_as_read(entry.key, entry) for entry in tables]
            change = Put(GENERATION_KEY, encode(GenerationRecord(number)))
            if (await self._coordinator.transact(compares, [change])).succeeded:
                return number, {epoch_of_key(entry.key): entry.value for entry in tables}

    # --- dirty partitions --------------------------------------------------------------------------------

    async def note_dirty(self, partitions: Iterable[Partition], epoch: RingEpoch, *, is_moving: bool = False) -> None:
        """Note partitions as dirty in a ring epoch; durable on return."""
        value = encode(DirtyRecord(epoch, is_moving))
        notes = [Put(dirty_key(partition), value) for partition in sorted(set(partitions))]
        for first in range(0, len(notes), COORDINATOR_OPERATIONS_MAX):
            await self._coordinator.transact([], notes[first : first + COORDINATOR_OPERATIONS_MAX])

    async def dirty(self, first: Partition = FIRST_PARTITION, last: Partition = LAST_PARTITION) -> list[Dirty]:
        """Return the dirty partitions from `first` to `last`, in order; the caller reads each anew before its walk."""
        return [_dirty(entry) async for entry in self._all(dirty_key(first), dirty_key(last) + b"\0")]

    async def clear_dirty(self, notes: Sequence[Dirty]) -> set[Partition]:
        """Clear partitions that were walked since these notes of them were read; returns those that are clean now.

        Those that were noted anew stay as they are.  Cancelled, some may have been cleared.
        """
        clean: set[Partition] = set()
        for first in range(0, len(notes), _CLEARED_MAX):
            clean |= await self._clear(notes[first : first + _CLEARED_MAX])
        return clean

    async def _clear(self, notes: Sequence[Dirty]) -> set[Partition]:
        """Clear in one transaction all that are as they were read, once more for each time that others were first."""
        clean: set[Partition] = set()
        while notes:
            keys = [dirty_key(note.partition) for note in notes]
            compares = [HasRevision(key, note.revision) for key, note in zip(keys, notes, strict=True)]
            done = await self._coordinator.transact(compares, list(map(Delete, keys)))
            if done.succeeded:
                return clean | {note.partition for note in notes}
            pairs = list(zip(notes, done.seen, strict=True))
            clean |= {note.partition for note, entry in pairs if entry is None}
            notes = [note for note, entry in pairs if entry is not None and entry.revision == note.revision]
        return clean

    async def note_home(self, dirty: Dirty, epoch: RingEpoch) -> None:
        """Note that all shards of a partition are at home by an epoch's table, unless it was noted since this was read.

        The partition stays dirty.
        """
        compare = HasRevision(dirty_key(dirty.partition), dirty.revision)
        await self._coordinator.transact(
            [compare], [Put(dirty_key(dirty.partition), encode(DirtyRecord(epoch, is_home=True)))]
        )

    # --- the walker --------------------------------------------------------------------------------------

    async def begin_to_walk(self, process: bytes, lease: LeaseId) -> bool:
        """Become the process that walks, for as long as the lease lasts; False if another one is."""
        put = Put(WALKER_KEY, process, lease)
        return (await self._coordinator.transact([IsAbsent(WALKER_KEY)], [put])).succeeded

    async def walk(self) -> WalkRecord:
        """Return the position of the walk through all partitions."""
        entry = (await self._coordinator.get(WALK_KEY)).entry
        return WalkRecord() if entry is None else decode(WalkRecord, entry.value)

    async def save_walk(self, walk: WalkRecord, process: bytes) -> bool:
        """Record the position of the walk; False if this process is not the one that walks (any more)."""
        put = Put(WALK_KEY, encode(walk))
        return (await self._coordinator.transact([HasValue(WALKER_KEY, process)], [put])).succeeded

    # --- records -----------------------------------------------------------------------------------------

    async def _epoch(self) -> tuple[RingEpoch, Entry | None]:
        entry = (await self._coordinator.get(EPOCH_KEY)).entry
        return (NO_EPOCH if entry is None else decode(EpochRecord, entry.value).number), entry

    async def _generation(self) -> tuple[GcGeneration, Entry | None]:
        entry = (await self._coordinator.get(GENERATION_KEY)).entry
        return (NO_GENERATION if entry is None else decode(GenerationRecord, entry.value).number), entry

    async def _shards(self) -> tuple[int, Entry | None]:
        entry = (await self._coordinator.get(SHARDS_KEY)).entry
        return ShardsRecord().count if entry is None else decode(ShardsRecord, entry.value).count, entry

    async def _replace(self, key: bytes, entry: Entry | None, value: bytes) -> bool:
        """Put a key if it is still as it was read; returns True if it was put."""
        return (await self._coordinator.transact([_as_read(key, entry)], [Put(key, value)])).succeeded

    async def _all(self, begin: bytes, end: bytes) -> AsyncIterator[Entry]:
        """Yield the entries of a range: not all of one revision."""
        async for page in pages(self._coordinator, begin, end):
            for entry in page.entries:
                yield entry


async def pages(coordinator: Coordinator, begin: bytes, end: bytes) -> AsyncGenerator[Page, None]:
    """Yield a range page by page, each at a revision of its own."""
    after = b""
    while True:
        page = await coordinator.range(begin, end, limit=COORDINATOR_PAGE_MAX, after=after)
        yield page
        if not page.more:
            return
        after = page.entries[-1].key


def _as_read(key: bytes, entry: Entry | None) -> Compare:
    """Return the comparison that holds while a key is as it was read."""
    return IsAbsent(key) if entry is None else HasRevision(key, entry.revision)


def _dirty(entry: Entry) -> Dirty:
    record = decode(DirtyRecord, entry.value)
    return Dirty(partition_of_key(entry.key), record.epoch, entry.revision, record.is_moving, record.is_home)
