"""Quarantine: chunks whose stored bytes are damaged, so that no new object relies on them.

A chunk is noted here when the engine failed to read it.  From then on it counts as absent when a client stores the same
bytes: they are written anew, the chunk's record gets the new place, and every object that refers to the chunk is whole
again.  Until then reads still try the old place.  When the bytes there prove to be good again (the segment's file was
put back, or the disk mended), scrub drops the note.

A shard (`engine.chunks.shards`) is noted alike, under its own key: its member answers that it is absent until the
shard is stored again.

Rules kept here:
- The note is a record in the table `quarantine`, durable like any other; a set in memory mirrors it for quick look-ups.
- A note is dropped in the transaction that records the new place or frees the chunk, or when scrub finds it whole.
- Noting is best effort: if the store takes no writes, the reader still gets the error of its read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
import structlog

from engine.format.layouts import ChunkRecord, Table, chunk_id_of_key, chunk_key, unpack_chunk_record
from engine.format.shards import is_whole, shard_key, shard_of_key
from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction
from lakefs.errors import CorruptionError, DiskFailed, LakeError
from lakefs.findings import Finding
from lakefs.ids import WHOLE_CHUNK, ChunkId, Sequence, ShardNumber, shard_text
from lakefs.ports import Clock

_KEYS_END: Final = b"\xff"
_log: Final = structlog.get_logger(__name__)
_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")


class _Note(msgspec.Struct, frozen=True):
    """A record's value."""

    reason: str = "its bytes were found damaged"
    time_ns: int = 0
    code: str = Finding.CHUNK_DAMAGED.code
    """Code of a `Finding`, maybe of a later release.  Notes of earlier releases have none."""


@dataclass(frozen=True)
class Quarantined:
    """A damaged chunk or shard, the finding, and its time."""

    chunk: ChunkId
    shard: ShardNumber
    code: str
    reason: str
    time_ns: int


@dataclass(frozen=True)
class ChunkQuarantined:
    """Note on the transaction that quarantines a chunk."""

    chunk: ChunkId


@dataclass(frozen=True)
class _Dropped:
    """Note on the transaction that ends a chunk's quarantine."""

    chunk: ChunkId


@dataclass(frozen=True)
class _ShardChanged:
    """Note on the transaction that quarantines a shard, or ends its quarantine."""

    key: bytes
    is_damaged: bool


class Quarantine:
    """The damaged chunks of one store.  Used on the loop; takes about 100 bytes of memory for each."""

    def __init__(self, metadata: Metadata, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        metadata.on_joined(self._joined, [ChunkQuarantined, _Dropped, _ShardChanged])
        self.chunks: Final = set[ChunkId]()
        """The damaged chunks, by every change of the table; for look-ups."""
        self.shards: Final = set[bytes]()
        """The keys of damaged shards, alike."""
        with metadata.view() as view:
            for key, _ in view.scan(Table.QUARANTINE, b"", _KEYS_END):
                if is_whole(key):
                    self.chunks.add(chunk_id_of_key(key))
                else:
                    self.shards.add(key)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self.chunks

    def __len__(self) -> int:
        return len(self.chunks) + len(self.shards)

    def has(self, chunk: ChunkId, shard: ShardNumber) -> bool:
        """Return True if the shard, or the chunk for WHOLE_CHUNK, is damaged."""
        return chunk in self.chunks if shard == WHOLE_CHUNK else shard_key(chunk, shard) in self.shards

    async def note(
        self, chunk: ChunkId, record: ChunkRecord, error: LakeError, shard: ShardNumber = WHOLE_CHUNK
    ) -> None:
        """Note that reading the chunk, or a shard, at this place failed; durable on return, if the store takes
        writes."""
        if self.has(chunk, shard) or not isinstance(error, (CorruptionError, DiskFailed)):
            return
        value = _encoder.encode(_Note(error.message, self._clock.wall_ns(), error.finding.code))

        def put(txn: Transaction) -> None:
            key = shard_key(chunk, shard)
            txn.put(Table.QUARANTINE, key, value)
            txn.note(ChunkQuarantined(chunk) if shard == WHOLE_CHUNK else _ShardChanged(key, True))

        if await self._change(chunk, shard, record, put, "damage_not_noted"):
            _log.error("chunk_damaged", chunk=shard_text(chunk, shard), code=error.finding.code, reason=error.message)

    async def release(self, chunk: ChunkId, record: ChunkRecord, shard: ShardNumber = WHOLE_CHUNK) -> bool:
        """Drop the note, as the bytes at this place proved good.  Durable on return; True if a note was dropped."""
        if not self.has(chunk, shard):
            return False

        def drop(txn: Transaction) -> None:
            if shard == WHOLE_CHUNK:
                self.drop_in(txn, chunk)
            else:
                self.drop_shard_in(txn, shard_key(chunk, shard))

        released = await self._change(chunk, shard, record, drop, "quarantine_not_ended")
        if released:
            _log.warning("chunk_is_good_again", chunk=shard_text(chunk, shard))
        return released

    async def _change(
        self,
        chunk: ChunkId,
        shard: ShardNumber,
        record: ChunkRecord,
        change: Callable[[Transaction], None],
        failed: str,
    ) -> bool:
        """Make a change durable if the chunk still has this record; True if it was made.  Logs an error as `failed`."""

        def decide(txn: Transaction) -> bool:
            present = txn.get(Table.CHUNKS, shard_key(chunk, shard))
            if present is None or unpack_chunk_record(present) != record:
                return False  # freed, moved or stored anew since
            change(txn)
            return True

        try:
            changed, sequence = await self._metadata.commit(decide)
            await self._metadata.wait_durable(sequence)
        except LakeError as failure:
            _log.error(failed, chunk=shard_text(chunk, shard), reason=failure.message)
            return False
        return changed

    def noted(self, limit: int) -> list[Quarantined]:
        """Return the first `limit` chunks of the table, with reason and time."""
        with self._metadata.view() as view:
            page = islice(view.scan(Table.QUARANTINE, b"", _KEYS_END), limit)
            return [_quarantined(key, value) for key, value in page]

    def drop_in(self, txn: Transaction, chunk: ChunkId) -> None:
        """Drop the note of a chunk that this transaction stores anew or frees."""
        if chunk in self.chunks:
            txn.delete(Table.QUARANTINE, chunk_key(chunk))
            txn.note(_Dropped(chunk))

    def drop_shard_in(self, txn: Transaction, key: bytes) -> None:
        """Drop the note of a shard that this transaction stores anew or frees."""
        if key in self.shards:
            txn.delete(Table.QUARANTINE, key)
            txn.note(_ShardChanged(key, False))

    def _joined(self, _: Sequence, notes: list[object]) -> None:
        """Change the set in the same step as the table, so that a failed decision changes neither."""
        for note in notes:
            if isinstance(note, ChunkQuarantined):
                self.chunks.add(note.chunk)
            elif isinstance(note, _Dropped):
                self.chunks.discard(note.chunk)
            elif isinstance(note, _ShardChanged):
                (self.shards.add if note.is_damaged else self.shards.discard)(note.key)


def _quarantined(key: bytes, value: bytes) -> Quarantined:
    try:
        note = msgspec.msgpack.decode(value, type=_Note)
    except msgspec.DecodeError:
        note = _Note()
    return Quarantined(chunk_id_of_key(key), shard_of_key(key), note.code, note.reason, note.time_ns)
