"""Garbage collection of shards: cycles by generations, driven by the walk through the lake's names.

A member does not know which names refer to its shards.  The walk's driver begins a cycle here (`begin`), sends the
chunks that it meets (`mark`), and ends it (`sweep`).

Rules kept here:
- Freed are shards that were born before the cycle began, are not marked, were not touched in the cycle's generation or
  the one before, and lie in a ring partition for which the driver says that the member is a home in every epoch in
  use.  The commit that frees them looks again, in one step.
- Marks belong to one walk.  They are in memory: a member that restarts has none, and says so.  A walk's marks are
  counted: unless all batches were received, nothing is freed.
- Nothing is freed until the coordinator's generation at the start of this process is known (`Touched`).
- One cycle at a time.  One that is replaced frees nothing from then on.  A cycle ends with its sweep.

Why this is enough is said in docs/durability.md.  Room of segments comes back as with whole chunks: places are punched
here, gaps and empty segments by the engine's own gc, to which shards are live as long as they have records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from engine.chunks.shards import Shards
from engine.format.layouts import ChunkRecord, Table, unpack_chunk_record
from engine.format.shards import is_whole, partition_of_key, shards_of
from engine.host.failpoints import reached
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from engine.tables.number_set import NumberSet
from engine.tables.views import Transaction, View
from lakefs.errors import EngineBusy, InvalidArgument, PreconditionFailed
from lakefs.ids import Birth, ChunkId
from lakefs.limits import GC_BATCH

_RECORDS_A_MARK: Final = 4
"""Records that are walked in the time that it takes to find the shards of one chunk."""


@dataclass
class _Cycle:
    """State of one cycle."""

    generation: int
    walk: bytes
    born_before: Birth
    pacing: Pacing
    marked: NumberSet = field(default_factory=NumberSet)
    batches: NumberSet = field(default_factory=NumberSet)
    """Numbers of the batches of marks that were received whole."""
    is_swept: bool = False


@dataclass
class Swept:
    """The result of a sweep: durably freed shards, or the reason why nothing was freed."""

    freed_shards: int = 0
    freed_bytes: int = 0
    kept_because: str = ""


class ShardCollector:
    """The gc of one member's shards.  Used on the loop."""

    def __init__(self, metadata: Metadata, shards: Shards, *, batch: int = GC_BATCH) -> None:
        self._metadata = metadata
        self._shards = shards
        self._batch = batch
        self._cycle: _Cycle | None = None

    def begin(self, generation: int, walk: bytes) -> None:
        """Begin a cycle, without marks; does nothing if this walk's has begun.  InvalidArgument: an older generation.

        The cycle before, if it has not ended, frees nothing from now on.
        """
        cycle = self._cycle
        if cycle is not None and cycle.walk == walk and cycle.generation == generation:
            return
        if cycle is not None and generation < cycle.generation:
            raise InvalidArgument(f"a cycle of gc generation {cycle.generation} has begun, {generation} is over")
        self._shards.touched.seen(generation)
        self._cycle = _Cycle(generation, walk, self._metadata.next_birth, Pacing(self._metadata))

    async def mark(self, walk: bytes, batch: int, chunks: list[ChunkId]) -> None:
        """Mark all shards of chunks; a batch that was received before changes nothing.  PreconditionFailed."""
        cycle = self._cycle_of(walk)
        begin = 0
        while begin < len(chunks) and self._cycle is cycle:
            end = begin + max(1, cycle.pacing.step(self._batch) // _RECORDS_A_MARK)
            with self._metadata.view() as view:
                for chunk in chunks[begin:end]:
                    _mark_in(view, chunk, cycle.marked)
            begin = end
            await cycle.pacing.rest()
        self._check_current(cycle)
        cycle.batches.add(batch)

    async def sweep(self, walk: bytes, batches: int, homes: bytes) -> Swept:
        """Free what the cycle may free, and end it; each free is durable on return.  PreconditionFailed, EngineBusy.

        `homes`: a bit for each ring partition.  When cancelled, or after an error, a part is freed; the cycle is over.
        """
        cycle = self._cycle_of(walk)
        if cycle.is_swept:
            raise EngineBusy("the shards of this cycle are being swept")
        cycle.is_swept = True
        try:
            reason = self._why_not(cycle, batches)
            return Swept(kept_because=reason) if reason else await self._sweep(cycle, homes)
        finally:
            if self._cycle is cycle:
                self._cycle = None

    def _why_not(self, cycle: _Cycle, batches: int) -> str:
        """Return the reason why nothing may be freed in this cycle, or ""."""
        if len(cycle.batches) != batches or any(number not in cycle.batches for number in range(batches)):
            return f"{len(cycle.batches)} of {batches} batches of marks were received"
        if not self._shards.touched.is_known:
            return "the gc generation at the start of the member is not known"
        return ""

    async def _sweep(self, cycle: _Cycle, homes: bytes) -> Swept:
        swept = Swept()
        after = b""
        while page := self._page(cycle, after):
            after = page[-1][0]
            proposed = [(key, record) for key, record in page if self._is_garbage(cycle, key, record, homes)]
            if proposed:
                await self._free(cycle, proposed, homes, swept)
            await cycle.pacing.rest()
            self._check_current(cycle)
        return swept

    def _page(self, cycle: _Cycle, after: bytes) -> list[tuple[bytes, ChunkRecord]]:
        with self._metadata.view() as view:
            scan = view.scan(Table.CHUNKS, after + b"\0", b"\xff")
            page = islice(scan, cycle.pacing.step(self._batch))
            return [(key, unpack_chunk_record(value)) for key, value in page]

    def _is_garbage(self, cycle: _Cycle, key: bytes, record: ChunkRecord, homes: bytes) -> bool:
        if is_whole(key) or record.birth >= cycle.born_before or record.birth in cycle.marked:
            return False
        if self._shards.touched.of(record.birth) >= cycle.generation - 1:
            return False
        partition = partition_of_key(key, (8 * len(homes)).bit_length() - 1)
        return bool(homes[partition >> 3] >> (partition & 7) & 1)

    async def _free(self, cycle: _Cycle, proposed: list[tuple[bytes, ChunkRecord]], homes: bytes, swept: Swept) -> None:
        def decide(txn: Transaction) -> list[ChunkRecord]:
            self._check_current(cycle)
            freed: list[ChunkRecord] = []
            for key, record in proposed:
                value = txn.get(Table.CHUNKS, key)
                if value is None or unpack_chunk_record(value) != record:
                    continue  # dropped, moved or stored anew
                if self._is_garbage(cycle, key, record, homes):
                    self._shards.delete_in(txn, key)
                    freed.append(record)
            return freed

        freed, sequence = await self._metadata.commit(decide)
        await self._metadata.wait_durable(sequence)
        reached("shard-gc.freed")
        swept.freed_shards += len(freed)
        swept.freed_bytes += sum(record.extent_bytes for record in freed)
        await self._shards.give_back(freed)

    def _cycle_of(self, walk: bytes) -> _Cycle:
        if self._cycle is None or self._cycle.walk != walk:
            raise PreconditionFailed("the member has no marks of this walk; it frees nothing in this cycle")
        return self._cycle

    def _check_current(self, cycle: _Cycle) -> None:
        if self._cycle is not cycle:
            raise PreconditionFailed("another cycle began; this one frees nothing from now on")


def _mark_in(view: View, chunk: ChunkId, marked: NumberSet) -> None:
    for _, value in view.scan(Table.CHUNKS, *shards_of(chunk)):
        marked.add(unpack_chunk_record(value).birth)
