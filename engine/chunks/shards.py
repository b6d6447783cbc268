"""Shards that a member of a lake keeps: stored, offered, listed and dropped, each under the rules of gc generations.

A shard is named by its chunk's id and a number; its record is a chunk record under a key of its own.  Its bytes do not
hash to the chunk's id, so the member compares them with the checksums that were sent, and trusts its client for the
rest: it answers heads of its lake only.

Rules kept here:
- A shard is touched (`engine.chunks.touched`) in the step in which its record is made, or seen to be present for an
  answer.  The answer leaves when that record is durable.
- No answer says "present" of a shard known to be damaged; stored again, it gets a new place and a new birth.
- Requests of an older ring epoch than the member's are refused in that same step.  The member's epoch grows in the
  step in which the record of the newer one joins its group; that it grew is answered when the record is durable.  It
  is durable because an epoch is retired on the word of its members: one that restarts must not take the older again.
- A present shard is not replaced by other bytes, or one of a chunk of another length: all of a shard is a function of
  its chunk, so one of both is wrong.
- A shard is dropped only if, in the step that drops it, it was not touched later than its copy.
- Nothing is stored, and no offer answered, while this member may not take shards (`may_take`): looked at in the step
  that decides, and before the answer leaves.  So a member that is cut off, and out, counts for no answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import Final

import msgspec

from engine.chunks.ingest import Ingest
from engine.chunks.payload import Hashed, Payload, Written
from engine.chunks.quarantine import Quarantine
from engine.chunks.touched import Touched
from engine.format.checksums import seal_payload, vector_of
from engine.format.layouts import ChunkRecord, Table, chunk_id_of_key, unpack_chunk_record
from engine.format.shards import (
    EPOCH_KEY,
    EpochRecord,
    is_whole,
    ranges_between,
    shard_key,
    shard_of_key,
    unpack_columns,
    unpack_epoch,
)
from engine.metadata.metadata_store import Metadata
from engine.segments.segment_store import Segments
from engine.tables.views import Transaction, View
from lakefs.errors import AlreadyExists, CoordinatorLost, InvalidArgument, StaleEpoch
from lakefs.ids import WHOLE_CHUNK, Birth, ChunkId, Sequence, ShardNumber, shard_text
from lakefs.limits import GC_BATCH
from lakefs.ports import Offload

TAKES_NOTHING: Final = "it takes no shards: its lease at the lake's coordinator was not renewed; it is read on"
Name = tuple[ChunkId, ShardNumber]
Opening = Callable[[], Awaitable[object]]


class Incoming(msgspec.Struct, frozen=True):
    """A shard to store: its name, its bytes, the CRC32Cs of its granules as they were sent, its chunk's length."""

    chunk: ChunkId
    shard: ShardNumber
    payload: Payload
    crcs: bytes
    chunk_bytes: int


class Sealed(Hashed, frozen=True):
    """A shard in memory whose bytes match the checksums that were sent; vector and padding are behind them."""

    key: bytes
    chunk_bytes: int


@dataclass
class ShardPage:
    """Shards that the member has, in the order of their keys: one list for each field."""

    keys: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    chunk_lengths: list[int] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)
    """Keys of shards known to be damaged; they are in no other list."""

    def __len__(self) -> int:
        return len(self.keys) + len(self.damaged)


@dataclass(frozen=True)
class ShardsRecorded:
    """Note on the transaction that records shards: somebody writes, so upkeep takes short steps."""


_STORED: Final = ShardsRecorded()


@dataclass
class RingEpoch:
    """A member's ring epoch, durable, and the epoch's table; empty if the member was not given it since it started."""

    epoch: int = 0
    table: bytes = field(default=b"", repr=False)


class Shards:
    """The shards of one store.  Used on the loop."""

    def __init__(
        self,
        metadata: Metadata,
        segments: Segments,
        offload: Offload,
        quarantine: Quarantine,
        ingest: Ingest,
        *,
        begin_to_use: Opening,
        is_new: bool,
    ) -> None:
        """`begin_to_use` is awaited before the first record of a shard is made; `is_new`: the store was just made."""
        self._metadata = metadata
        self._segments = segments
        self._offload = offload
        self._quarantine = quarantine
        self._ingest = ingest
        self._begin_to_use = begin_to_use
        self.touched: Final = Touched()
        self.may_take: Callable[[], bool] = lambda: True
        """Says if this member may take shards, offers and marks now: not behind half of its lease."""
        if is_new:
            self.touched.opened(0)
        with metadata.view() as view:
            value = view.get(Table.COUNTERS, EPOCH_KEY)
        self.ring: Final = RingEpoch(0 if value is None else unpack_epoch(value).epoch)

    # --- epochs ------------------------------------------------------------------------------------

    async def set_epoch(self, epoch: int, table: bytes) -> RingEpoch:
        """Take a newer epoch and its table, and return the member's; durable on return.  InvalidArgument."""
        ring = self.ring

        def decide(txn: Transaction) -> None:
            txn.get(Table.COUNTERS, EPOCH_KEY)  # the answer waits for the present record
            if epoch > ring.epoch:
                txn.put(Table.COUNTERS, EPOCH_KEY, msgspec.msgpack.encode(EpochRecord(epoch=epoch)))
                ring.epoch, ring.table = epoch, table

        if epoch == ring.epoch and table:
            if ring.table and ring.table != table:
                raise InvalidArgument(f"ring epoch {epoch} has another table")
            ring.table = table
        if epoch > ring.epoch:
            _, sequence = await self._metadata.commit(decide)
            await self._metadata.wait_durable(sequence)
        else:
            with self._metadata.view() as view:
                view.get(Table.COUNTERS, EPOCH_KEY)
                sequence = view.sequence
            await self._metadata.wait_durable(sequence)
        return RingEpoch(ring.epoch, ring.table)

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch for an older epoch than the member's."""
        if epoch < self.ring.epoch:
            raise StaleEpoch(
                f"the request is of ring epoch {epoch}, the member has {self.ring.epoch}; get the newer table",
                subject=str(self.ring.epoch),
            )

    def check_taking(self) -> None:
        """Raise CoordinatorLost unless this member may take shards, offers and marks now."""
        if not self.may_take():
            raise CoordinatorLost(TAKES_NOTHING)

    def check_request(self, epoch: int) -> None:
        """Raise StaleEpoch, CoordinatorLost for a store or an offer that this member may not take now."""
        self.check_epoch(epoch)
        self.check_taking()

    # --- storing -----------------------------------------------------------------------------------

    async def store(self, epoch: int, generation: int, shards: Seq[Incoming]) -> list[bool]:
        """Store shards, each named once: True for each that was new.  Durable and touched on return.

        InvalidArgument (checksums), AlreadyExists (other bytes), StaleEpoch, StoreFull, StoreReadOnly, DiskFailed: then
        no record was made, but the present ones may be touched.  On cancellation, too.  CoordinatorLost: records may
        have been made.
        """
        self.check_request(epoch)
        keys = [shard_key(item.chunk, item.shard) for item in shards]
        with self._metadata.view() as view:
            all_absent = bool(keys) and all(self._find_good(view, key) is None for key in keys)
        if all_absent:
            await self._begin_to_use()
            written = await self._ingest.seal_and_write([item.payload for item in shards], partial(_seal_some, shards))
            recorded = await self._record(epoch, generation, written)
        else:
            recorded = await self._store_absent(epoch, generation, shards)
        self.check_taking()
        return [key in recorded for key in keys]

    async def _store_absent(self, epoch: int, generation: int, shards: Seq[Incoming]) -> set[bytes]:
        """Store those that are absent, and compare the others; returns the keys of those that were new."""
        sealed = await self._sealed(shards)
        with self._metadata.view() as view:
            self.check_request(epoch)
            absent = [item for item in sealed if not self._is_kept(view, item, generation)]
            sequence = view.sequence
        recorded = set[bytes]()
        if absent:
            await self._begin_to_use()
            recorded = await self._record(epoch, generation, await self._ingest.write(absent))
        await self._metadata.wait_durable(sequence)
        return recorded

    async def _sealed(self, shards: Seq[Incoming]) -> list[Sealed]:
        if any(item.payload.fill is not None or item.payload.area is not None for item in shards):
            return await self._offload.run(_seal_all, shards)
        return _seal_all(shards)

    def _is_kept(self, view: View, item: Sealed, generation: int) -> bool:
        """Touch the shard and return True if it is present and whole.  AlreadyExists for another one."""
        record = self._find_good(view, item.key)
        if record is None:
            return False
        if (record.stored_bytes, record.crc, record.logical_bytes) != (item.payload.length, item.crc, item.chunk_bytes):
            text = _text(item.key)
            other = "other bytes" if record.logical_bytes == item.chunk_bytes else "another length of its chunk"
            raise AlreadyExists(f"shard {text} has {other} than the new one; one of both is wrong", subject=text)
        self.touched.note(record.birth, generation)
        return True

    async def _record(self, epoch: int, generation: int, written: Seq[Written]) -> set[bytes]:
        """Record written shards, durably; returns the keys of those that were new."""

        def decide(txn: Transaction) -> set[bytes]:
            self.check_request(epoch)
            fresh = [item for item in written if not self._is_kept(txn, _sealed_of(item), generation)]
            for item in fresh:
                self._record_in(txn, item, generation)
            txn.note(_STORED)
            return {_sealed_of(item).key for item in fresh}

        try:
            recorded, sequence = await self._metadata.commit(decide, grows=True)
            await self._metadata.wait_durable(sequence)
        finally:
            self._ingest.settle(written)
        return recorded

    def _record_in(self, txn: Transaction, item: Written, generation: int) -> None:
        sealed, place = _sealed_of(item), item.place
        birth = txn.new_birth()
        record = ChunkRecord(birth, place.segment, place.offset, sealed.payload.length, sealed.chunk_bytes, sealed.crc)
        txn.put(Table.CHUNKS, sealed.key, record.pack())
        self._quarantine.drop_shard_in(txn, sealed.key)
        self.touched.note(birth, generation)

    async def offer(self, epoch: int, generation: int, names: Seq[Name]) -> tuple[list[int], list[int]]:
        """Return lengths of each shard and of its chunk, 0 unless it is present and whole; durable and touched then."""
        lengths, chunk_lengths = list[int](), list[int]()
        with self._metadata.view() as view:
            self.check_request(epoch)
            for name in names:
                record = self._find_good(view, shard_key(*name))
                if record is not None:
                    self.touched.note(record.birth, generation)
                lengths.append(0 if record is None else record.stored_bytes)
                chunk_lengths.append(0 if record is None else record.logical_bytes)
            sequence = view.sequence
        await self._metadata.wait_durable(sequence)
        self.check_taking()
        return lengths, chunk_lengths

    def _find_good(self, view: View, key: bytes) -> ChunkRecord | None:
        value = None if key in self._quarantine.shards else view.get(Table.CHUNKS, key)
        return None if value is None else unpack_chunk_record(value)

    # --- listing and dropping ----------------------------------------------------------------------

    def list_page(self, page: ShardPage, begin: bytes, end: bytes, after: bytes, limit: int) -> tuple[bytes, Sequence]:
        """Add shards behind the key `after`: at most `limit`; return the key to go on at, and a sequence to wait for.

        At most GC_BATCH records are looked at.  The key is empty at the end.
        """
        looked = 0
        damaged = self._quarantine.shards
        with self._metadata.view() as view:
            for low, high in ranges_between(begin, end):
                start = max(low, after + b"\0")
                if start >= high:
                    continue
                count = min(limit, GC_BATCH - looked)
                entries = list(islice(view.scan(Table.CHUNKS, start, high), count))
                shards = [(key, value) for key, value in entries if key[-1] != WHOLE_CHUNK]
                self._add(page, [(key, value) for key, value in shards if key not in damaged])
                page.damaged += [key for key, _ in shards if key in damaged]
                looked += len(entries)
                limit -= len(shards)
                if entries:
                    after = entries[-1][0]
                if len(entries) == count:
                    return after, view.sequence
            return b"", view.sequence

    def list_damaged(
        self, page: ShardPage, begin: bytes, end: bytes, after: bytes, limit: int
    ) -> tuple[bytes, Sequence]:
        """Add damaged shards alone, as `list_page` does."""
        ranges = ranges_between(begin, end)
        with self._metadata.view() as view:
            behind = [key for key in self._quarantine.shards if key > after]
            keys = nsmallest(limit + 1, [key for key in behind if any(low <= key < high for low, high in ranges)])
            page.damaged += keys[:limit]
            return keys[limit - 1] if len(keys) > limit else b"", view.sequence

    def _add(self, page: ShardPage, listed: Seq[tuple[bytes, bytes]]) -> None:
        """Add shards to a page: keys and packed records."""
        if not listed:
            return
        records = unpack_columns([value for _, value in listed])
        page.keys += [key for key, _ in listed]
        page.lengths += records.lengths
        page.crcs += records.crcs
        page.touched += self.touched.of_each(records.births)
        page.chunk_lengths += records.chunk_lengths

    async def drop(self, epoch: int, names: Seq[Name], touched: Seq[int], *, only_damaged: bool = False) -> list[int]:
        """Drop shards that were not touched later than in these generations; durable on return.  StaleEpoch.

        `only_damaged`: keep those that are not known to be damaged in the step that would drop them.
        Returns for each shard 0 if it is gone, else the generation for which it was kept.
        """
        keys = [shard_key(*name) for name in names]

        def decide(txn: Transaction) -> tuple[list[int], list[ChunkRecord]]:
            self.check_epoch(epoch)
            kept: list[int] = []
            dropped: list[ChunkRecord] = []
            for key, given in zip(keys, touched, strict=True):
                value = txn.get(Table.CHUNKS, key)
                record = None if value is None else unpack_chunk_record(value)
                is_good = only_damaged and key not in self._quarantine.shards
                kept.append(0 if record is None else self._kept_for(record.birth, given, is_good=is_good))
                if record is not None and not kept[-1]:
                    self.delete_in(txn, key)
                    dropped.append(record)
            return kept, dropped

        (kept, dropped), sequence = await self._metadata.commit(decide)
        await self._metadata.wait_durable(sequence)
        await self.give_back(dropped)
        return kept

    def _kept_for(self, birth: Birth, given: int, *, is_good: bool) -> int:
        """Return 0 if a shard may go, else the generation to answer; a good one is kept whatever touched it."""
        touched = self.touched.of(birth)
        if is_good:
            return max(1, touched)
        return touched if touched > given else 0

    def delete_in(self, txn: Transaction, key: bytes) -> None:
        """Delete the record of a shard, and the note that it is damaged."""
        assert not is_whole(key), "whole chunks belong to the engine's own gc"
        txn.delete(Table.CHUNKS, key)
        self._quarantine.drop_shard_in(txn, key)

    async def give_back(self, records: Seq[ChunkRecord]) -> None:
        """Punch the places of shards that are durably deleted."""
        await self._segments.room.punch([(r.segment, r.offset, r.extent_bytes) for r in records])


def seal(payload: Payload) -> tuple[bytes, int]:
    """Fill a payload if need be, and return the CRC32Cs of its granules, and the CRC of its record.  Blocks.

    Vector and padding are written behind the bytes of a large payload.
    """
    memory = payload.small if payload.area is None else payload.area[: payload.length]
    assert memory is not None, "a payload has memory"
    crcs = (None if payload.fill is None else payload.fill(memory, 0)) or vector_of(memory)
    if payload.area is None:
        return crcs, int.from_bytes(crcs, "little")
    return crcs, seal_payload(payload.area, payload.length, crcs)


def _seal_all(shards: Seq[Incoming]) -> list[Sealed]:
    """Return the shards, sealed.  InvalidArgument if a checksum differs."""
    sealed: list[Sealed] = []
    for item in shards:
        crcs, crc = seal(item.payload)
        key = shard_key(item.chunk, item.shard)
        if crcs != item.crcs:
            text = _text(key)
            raise InvalidArgument(f"the bytes of shard {text} do not match the checksums sent with it", subject=text)
        sealed.append(Sealed(item.payload, item.chunk, crc, key, item.chunk_bytes))
    return sealed


def _seal_some(shards: Seq[Incoming], numbers: Seq[int]) -> list[Sealed]:
    """`_seal_all` of the shards with these numbers."""
    return _seal_all([shards[number] for number in numbers])


def _sealed_of(item: Written) -> Sealed:
    assert isinstance(item.hashed, Sealed), "shards were written"
    return item.hashed


def _text(key: bytes) -> str:
    return shard_text(chunk_id_of_key(key), shard_of_key(key))
