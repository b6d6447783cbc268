"""Loads over RDMA: payloads are read into registered buffers, then written to the client's memory.

The reading is that of LoadSlots, with a buffer in place of lent memory: an engine's (`engine.requests.load_ranges`),
or a head's (`engine.head.head_loads`).

Rules kept here:
- A request's slots are laid out in buffers of 4 MiB, one after the other, and moved buffer by buffer; a request holds
  one buffer at a time, so requests cannot wait for each other in a circle.
- Only what was loaded is written, to its slot in the client's memory and nowhere else.
- When the answer is sent, or the request fails, no WRITE of it is in flight.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence as Seq
from typing import Final, NamedTuple

from engine.fabric.bounce_memory import Bounce, add_piece
from engine.fabric.engine_fabric import EngineFabric
from engine.requests.answers import failure_of
from engine.sessions.references import Client
from lakefs.errors import ChunkNotFound, InvalidArgument, LakeError
from lakefs.ids import EMPTY_CHUNK, ChunkId, id_text
from lakefs.limits import BOUNCE_BYTES, PAGE_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.transport.fabric import Piece
from lakefs.wire import messages as m

_SMALL_ALIGNMENT: Final = 64
LengthsOf = Callable[[Seq[ChunkId]], Awaitable[Seq[int | LakeError | None]]]
"""Returns the length of each chunk's payload; None for one that does not exist, an error for one that cannot be found
out.  What it returns is durable."""
LoadInto = Callable[[m.LoadSlots, Seq[ChunkId], Bounce], Awaitable[m.SlotsLoaded]]
"""Loads chunks into a buffer, as LoadSlots does into lent memory."""


async def load_by_fabric(
    fabric: EngineFabric,
    client: Client,
    request: m.LoadSlots,
    chunks: Seq[ChunkId],
    lengths_of: LengthsOf,
    load_into: LoadInto,
) -> m.SlotsLoaded:
    """Load chunks through registered buffers, write them to the client's memory, and return the answer.

    Each chunk fails by itself; InvalidArgument, SessionLost for the request.
    """
    assert request.fabric is not None, "the request names memory of the client"
    link = fabric.link_for(client, request.fabric)
    load = FabricLoad(request, chunks, await lengths_of(chunks))
    for batch in load.batches():
        async with link.bounce() as bounce:
            await link.move(await load.load(batch, bounce, load_into))
    return load.answer()


class _Slot(NamedTuple):
    """One chunk to load: its number in the request, its length, and its offset in the client's memory."""

    number: int
    length: int
    offset: int


class FabricLoad:
    """One request and the results so far."""

    def __init__(self, request: m.LoadSlots, chunks: Seq[ChunkId], lengths: Seq[int | LakeError | None]) -> None:
        """`lengths`: see `LengthsOf`."""
        assert request.fabric is not None, "the request names memory of the client"
        self._request = request
        self._memory = request.fabric
        self._chunks = chunks
        self._lengths = [0] * len(chunks)
        self._crcs = [b""] * len(chunks)
        self._failures: dict[int, m.Failure] = {}
        found = [self._slot_of(index, length) for index, length in enumerate(lengths)]
        self._slots = self._without_overlaps([slot for slot in found if slot is not None])

    def _slot_of(self, index: int, length: int | LakeError | None) -> _Slot | None:
        """Return the slot to fill; None when nothing is loaded, because it failed or is empty."""
        chunk, offset = self._chunks[index], self._request.offsets[index]
        if chunk == EMPTY_CHUNK:
            return None
        if length is None:
            length = ChunkNotFound(f"chunk {id_text(chunk)} is not in the store", subject=id_text(chunk))
        if isinstance(length, LakeError):
            self._fail(index, length)
            return None
        if self._request.lengths and length > self._request.lengths[index]:
            room = self._request.lengths[index]
            self._fail(index, InvalidArgument(f"the chunk has {length} bytes, its slot {room}"))
            return None
        if not 0 <= offset <= offset + length <= self._memory.size_bytes:
            size = self._memory.size_bytes
            self._fail(index, InvalidArgument(f"{offset}+{length} is outside a memory of {size} bytes"))
            return None
        return _Slot(index, length, offset)

    def _without_overlaps(self, slots: list[_Slot]) -> list[_Slot]:
        """Fail each slot that overlaps the one before it; return the others, by their offsets."""
        end, kept = 0, []
        for slot in sorted(slots, key=lambda slot: slot.offset):
            if slot.offset < end:
                self._fail(slot.number, InvalidArgument(f"the slot at {slot.offset} overlaps the one before it"))
                continue
            end = slot.offset + slot.length
            kept.append(slot)
        return kept

    def _fail(self, index: int, error: LakeError) -> None:
        self._failures[index] = failure_of(error)

    def batches(self) -> Iterator[list[tuple[_Slot, int]]]:
        """Yield slots with their places in a buffer, as many as fit into one."""
        batch: list[tuple[_Slot, int]] = []
        end = 0
        for slot in self._slots:
            place = _aligned(end, slot)
            if place + slot.length > BOUNCE_BYTES:
                yield batch
                batch, place = [], 0
            batch.append((slot, place))
            end = place + slot.length
        if batch:
            yield batch

    async def load(self, batch: Seq[tuple[_Slot, int]], bounce: Bounce, load_into: LoadInto) -> list[Piece]:
        """Load a batch into the buffer; return what is to be written to the client's memory."""
        request = m.LoadSlots(
            0,
            [bytes(self._chunks[slot.number]) for slot, _ in batch],
            [place for _, place in batch],
            [slot.length for slot, _ in batch],
            self._request.checksums,
        )
        loaded = await load_into(request, [self._chunks[slot.number] for slot, _ in batch], bounce)
        crcs = loaded.crcs or [b""] * len(batch)
        failures = loaded.failures or [None] * len(batch)
        pieces: list[Piece] = []
        for (slot, place), length, crc, failure in zip(batch, loaded.lengths, crcs, failures, strict=True):
            if failure is not None:
                self._failures[slot.number] = failure
                continue
            assert length <= slot.length, "a payload fits its slot"
            self._lengths[slot.number], self._crcs[slot.number] = length, crc
            if length:
                address = self._memory.address + slot.offset
                add_piece(pieces, Piece(bounce.region, place, address, self._memory.key, length, is_write=True))
        return pieces

    def answer(self) -> m.SlotsLoaded:
        """Return the answer."""
        failures: list[m.Failure | None] = []
        if self._failures:
            failures = [self._failures.get(index) for index in range(len(self._chunks))]
        return m.SlotsLoaded(self._lengths, self._crcs if self._request.checksums else [], failures)


def _aligned(end: int, slot: _Slot) -> int:
    """Return the place behind `end` for a slot: a page's beginning for payloads that may be read past the cache."""
    alignment = PAGE_BYTES if slot.length >= SMALL_PAYLOAD_BYTES else _SMALL_ALIGNMENT
    return -(-end // alignment) * alignment
