"""The DRAM tier: which chunks are in the arena, which of them go, and who has them pinned.

A chunk gets in when it was read more often lately than what would have to go for it (`admission`); what goes is found
by CLOCK among the slots of its size: the first that was not read since the hand passed it last (Corbato, "A Paging
Experiment with the Multics System", 1968), or of many that all were, the one read longest ago.  A slab moves to another
size when all in it was read longer ago than what would go otherwise.

Rules kept here:
- A slot's bytes are a chunk's from `publish` to `forget` or demotion; both make its generation odd at once, in the same
  step.  What is pinned stays, under the same generation, until the last pin is gone.
- A chunk is in at most one slot that can be found.  One that is forgotten while it is being filled is never published.
- At most half of the arena's memory is pinned; beyond that a pin is refused.
- Bytes come in through `reserve` and `publish` only, checked by who brings them.
- No step looks at more than HAND_STEPS_MAX slots for one that goes, nor empties more than EMPTIED_AT_ONCE_MAX of a slab
  that changes its size: it goes on with the next admission.

Nothing here is awaited; used on the loop.  `on_admitted` and `on_demoted` are told in the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from engine.tiers.admission import READS_FOR_ADMISSION, Admission
from engine.tiers.arena import Arena, Slab, SlabMemory, Slot, SlotClass
from lakefs.content.verify import vector_bytes
from lakefs.ids import ChunkId
from lakefs.limits import DRAM_PAYLOAD_BYTES_MIN, KIB
from lakefs.wire.grants import MEDIUM_DRAM
from lakefs.wire.messages import Grant

_PLACE_BYTES: Final = 256 * KIB
"""A guess at what a chunk takes, for the size of what counts reads."""
HAND_STEPS_MAX: Final = 512
"""About 0.1 ms."""
EMPTIED_AT_ONCE_MAX: Final = 128
"""About 0.3 ms, with who is told of each."""
_STARVED_FROM: Final = 16
"""Admissions that a size without any slab is refused before it takes one of another size."""


class Placement(NamedTuple):
    """Where a chunk is in the arena, and how it is checked: `crc` as in its record."""

    slab: int
    offset: int
    generation: int
    stored_bytes: int
    crc: int


Admitted = Callable[[ChunkId, int, int, int, int, int], None]
"""(chunk, slab, offset, generation, stored bytes, crc)"""
Demoted = Callable[[ChunkId], None]


class DramTier:
    """The tier of one engine."""

    def __init__(self, arena: Arena) -> None:
        self.arena: Final = arena
        self._slots: dict[ChunkId, Slot] = {}
        self._filling: dict[ChunkId, Slot] = {}
        self._pinned: dict[tuple[int, int], Slot] = {}
        """By slab and offset."""
        self._admission = Admission(max(1, arena.slabs_max * arena.slab_bytes // _PLACE_BYTES))
        self._starved: dict[int, int] = {}
        self._leaving: tuple[Slab, SlotClass, Iterator[Slot | None]] | None = None
        """The slab that is being emptied, for whom, and those of its slots that were not looked at yet."""
        self._reads = 0
        self._pinned_bytes = self._payload_bytes = 0
        self._hits = self._misses = self._fills = self._filled_bytes = 0
        self._demotions = self._forgotten = self._refused = 0
        self.on_admitted: Final[list[Admitted]] = []
        self.on_demoted: Final[list[Demoted]] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._slots

    # --- reading -----------------------------------------------------------------------------------

    def find(self, chunk: ChunkId) -> Placement | None:
        """Where the chunk is now, or None; counted as a hit or a miss of a reader."""
        slot = self._slots.get(chunk)
        if slot is None:
            self._misses += 1
            return None
        self._hits += 1
        return self._placement(slot)

    def note_misses(self, count: int) -> None:
        """Readers were served elsewhere with so many chunks that are long enough to be in."""
        self._misses += count

    def grant(self, chunk: ChunkId) -> Grant | None:
        """What a reader of the chunk is told, or None; not counted."""
        slot = self._slots.get(chunk)
        return None if slot is None else self._grant_of(slot)

    def note_read(self, chunk: ChunkId, stored_bytes: int) -> bool:
        """Somebody reads the chunk's beginning; whether it is worth bringing in now."""
        if stored_bytes < DRAM_PAYLOAD_BYTES_MIN:
            return False
        slot = self._slots.get(chunk)
        self._reads += 1
        count = self._admission.note(chunk)
        if slot is not None:
            slot.referenced = True
            slot.used_at = self.arena.slabs[slot.slab].used_at = self._reads
            return False
        return count >= READS_FOR_ADMISSION and self.may_fit(chunk, stored_bytes)

    def may_fit(self, chunk: ChunkId, stored_bytes: int) -> bool:
        """Whether there is room for the chunk, or what would have to go is read less often."""
        if chunk in self._filling:
            return False
        size = self.arena.class_for(stored_bytes + vector_bytes(stored_bytes))
        if size is None:
            return False
        if size.with_free or not self.arena.is_full:
            return True
        victim = self._next_victim(size)
        return victim is None or self._admission.admits(chunk, victim.chunk)

    def note_reads(self, chunks: Seq[ChunkId], grants: list[Grant], *, understood: bool) -> list[ChunkId]:
        """Count a read of each chunk that has a grant; those that are worth bringing in now.

        With `understood` the grants of what is in become those of its place here.  As `note_read` and `find`, for many.
        """
        slots, note, slabs = self._slots, self._admission.note, self.arena.slabs
        wanted: list[ChunkId] = []
        for index, chunk in enumerate(chunks):
            slot = slots.get(chunk)
            if slot is None:
                stored_bytes = grants[index].stored_bytes
                if stored_bytes < DRAM_PAYLOAD_BYTES_MIN:
                    continue
                self._misses += 1
                if note(chunk) >= READS_FOR_ADMISSION and self.may_fit(chunk, stored_bytes):
                    wanted.append(chunk)
                continue
            note(chunk)
            slot.referenced = True
            slot.used_at = slabs[slot.slab].used_at = self._reads
            if understood:
                self._hits += 1
                grants[index] = self._grant_of(slot)
        self._reads += len(chunks)
        return wanted

    def note_located(self, chunks: list[bytes], *, understood: bool) -> list[ChunkId]:
        """Count a read of each chunk; those that are not in and were read often: `may_fit` says what they are worth.

        For chunks that are long enough.  `understood`: where they are in, the reader was told so.
        """
        slots, slabs, reads = self._slots, self.arena.slabs, self._reads
        often: list[ChunkId] = []
        hits, slab = 0, -1
        located = cast(list[ChunkId], chunks)
        for chunk, count in zip(located, self._admission.note_many(located), strict=True):
            slot = slots.get(chunk)
            if slot is None:
                if count >= READS_FOR_ADMISSION:
                    often.append(chunk)
                continue
            hits += 1
            if not slot.referenced:
                slot.referenced = True
            slot.used_at = reads
            if slot.slab != slab:
                slab = slot.slab
                slabs[slab].used_at = reads
        self._misses += len(chunks) - hits
        self._hits += hits if understood else 0
        self._reads += len(chunks)
        return often

    def pin(self, chunk: ChunkId) -> Placement | None:
        """Keep the chunk's bytes where they are until `unpin`; None when it is not in, or too much is pinned.

        None, too, when its slab is being emptied.  A chunk may be pinned many times; each pin is taken back by itself.
        """
        slot = self._slots.get(chunk)
        if slot is None:
            return None
        if not slot.pins:
            if self.arena.slabs[slot.slab].is_leaving:
                return None
            taken = self._pinned_bytes + self.arena.home(slot).slot_bytes
            if taken > self.arena.slabs_max * self.arena.slab_bytes // 2:
                return None
            self._pinned_bytes = taken
            self._pinned[slot.slab, slot.offset] = slot
            self.arena.slabs[slot.slab].busy += 1
        slot.pins += 1
        return self._placement(slot)

    def unpin(self, placement: Placement) -> None:
        """Take one pin of that place back.  Of a tier that was closed meanwhile: nothing happens."""
        slot = self._pinned.get((placement.slab, placement.offset))
        if slot is None:
            return
        slot.pins -= 1
        if slot.pins:
            return
        del self._pinned[slot.slab, slot.offset]
        self._pinned_bytes -= self.arena.home(slot).slot_bytes
        self.arena.slabs[slot.slab].busy -= 1
        if slot.forgotten:
            self.arena.give_free(slot)

    def extent(self, placement: Placement) -> memoryview:
        """Payload and vector at a place that is pinned, or was found in this step."""
        end = placement.offset + placement.stored_bytes + vector_bytes(placement.stored_bytes)
        return self.arena.slabs[placement.slab].view[placement.offset : end]

    # --- bringing in -------------------------------------------------------------------------------

    def needs_slab(self, chunk: ChunkId, extent_bytes: int) -> SlotClass | None:
        """The class for which a slab is to be made before such a chunk can be reserved a slot; None: none is needed."""
        size = self.arena.class_for(extent_bytes)
        if size is None or size.with_free or self.arena.is_full or not self._admission.admits(chunk, None):
            return None
        return size

    def add_slab(self, memory: SlabMemory, size: SlotClass) -> None:
        """Grow by a slab; given back at once when the arena has become full meanwhile."""
        if self.arena.is_full:
            memory.close()
        else:
            self.arena.add_slab(memory, size)

    def reserve(self, chunk: ChunkId, extent_bytes: int) -> Slot | None:
        """A slot to fill with the chunk's payload and vector; then `publish` or `abandon`.

        None when it is in, or under way, too long, or not worth what would have to go.
        """
        self._empty_more()
        size = self.arena.class_for(extent_bytes)
        if size is None or chunk in self._slots or chunk in self._filling:
            return None
        if not self._admission.admits(chunk, None) or not (size.with_free or self._make_room(chunk, size)):
            self._refused += 1
            return None
        slot = self.arena.take_free(size, chunk)
        self.arena.slabs[slot.slab].busy += 1
        slot.filling = True
        self._filling[chunk] = slot
        return slot

    def publish(self, slot: Slot, stored_bytes: int, crc: int) -> bool:
        """The slot has been filled and checked: readers may have it.  False: the chunk was forgotten meanwhile."""
        chunk = slot.chunk
        assert slot.filling, "a slot is published once"
        if self._filling.get(chunk) is not slot:
            self.abandon(slot)
            return False
        del self._filling[chunk]
        slot.filling = False
        slot.referenced = True
        slot.stored_bytes, slot.crc = stored_bytes, crc
        slab = self.arena.slabs[slot.slab]
        slab.busy -= 1
        slot.used_at = slab.used_at = self._reads
        self._slots[chunk] = slot
        self._payload_bytes += stored_bytes
        generation = self.arena.end_change(slot)
        self._fills += 1
        self._filled_bytes += stored_bytes
        for told in self.on_admitted:
            told(chunk, slot.slab, slot.offset, generation, stored_bytes, crc)
        return True

    def abandon(self, slot: Slot) -> None:
        """The slot could not be filled."""
        assert slot.filling, "a slot is abandoned while it is filled"
        if self._filling.get(slot.chunk) is slot:
            del self._filling[slot.chunk]
        self.arena.slabs[slot.slab].busy -= 1
        self.arena.give_free(slot)

    def forget(self, chunk: ChunkId) -> None:
        """The chunk is freed, or not to be trusted: nobody finds it any more, and what is being filled is dropped."""
        self._filling.pop(chunk, None)
        slot = self._slots.pop(chunk, None)
        if slot is not None:
            self._forgotten += 1
            self._take_out(slot, chunk)

    def close(self) -> None:
        """Give all memory back."""
        for chunk in list(self._slots):
            self.forget(chunk)
        self._pinned.clear()
        self._leaving = None
        self.arena.close()

    # --- making room -------------------------------------------------------------------------------

    def _make_room(self, chunk: ChunkId, size: SlotClass) -> bool:
        """Free a slot of that size, when the chunk is worth it."""
        cold = self._coldest_slab(size)
        if cold is not None and not cold.taken:
            self.arena.begin_recut(cold)
            self.arena.recut(cold, size)
            return True
        victim = self._next_victim(size)
        if victim is None:
            return cold is not None and self._recut_for_starved(size, cold)
        if not self._admission.admits(chunk, victim.chunk):
            return False
        if cold is not None and cold.used_at < victim.used_at and self._leaving is None:
            return self._recut(cold, size)
        self._demote(victim)
        return True

    def _next_victim(self, size: SlotClass) -> Slot | None:
        """Where CLOCK's hand stops, and stays for the next time; None when all slots are pinned or being filled."""
        count = size.slot_count
        longest_ago: Slot | None = None
        for _ in range(min(2 * count, HAND_STEPS_MAX)):
            slot = size.slot_at(size.hand % count)
            if slot is not None and not slot.filling and not slot.pins:
                if not slot.referenced:
                    return slot
                slot.referenced = False
                if longest_ago is None or slot.used_at < longest_ago.used_at:
                    longest_ago = slot
            size.hand = (size.hand + 1) % count
        return longest_ago

    def _coldest_slab(self, size: SlotClass) -> Slab | None:
        """Of other sizes, the slab that was read longest ago and has nothing pinned or being filled."""
        others = (slab for found in self.arena.classes if found is not size for slab in found.slabs)
        return min((slab for slab in others if not slab.busy), key=_coldness, default=None)

    def _recut_for_starved(self, size: SlotClass, cold: Slab) -> bool:
        waited = self._starved.get(size.slot_bytes, 0) + 1
        self._starved[size.slot_bytes] = waited % _STARVED_FROM
        if waited < _STARVED_FROM or self._leaving is not None:
            return False
        return self._recut(cold, size)

    def _recut(self, slab: Slab, size: SlotClass) -> bool:
        """Begin to empty a slab for slots of another size; whether it is done, so that there are free ones."""
        self.arena.begin_recut(slab)
        self._leaving = slab, size, iter(slab.slots)
        self._empty_more()
        return self._leaving is None

    def _empty_more(self) -> None:
        """Empty some more of the slab that is being emptied, if any, and cut it anew behind its last slot."""
        if self._leaving is None:
            return
        slab, size, slots = self._leaving
        for slot in islice(slots, EMPTIED_AT_ONCE_MAX):
            if slot is not None:  # nothing is pinned or being filled there
                self._demote(slot)
        if not slab.taken:
            self._leaving = None
            self.arena.recut(slab, size)

    def _demote(self, slot: Slot) -> None:
        assert not slot.pins, "what is pinned stays"
        del self._slots[slot.chunk]
        self._demotions += 1
        self._take_out(slot, slot.chunk)

    def _take_out(self, slot: Slot, chunk: ChunkId) -> None:
        self._payload_bytes -= slot.stored_bytes
        for told in self.on_demoted:
            told(chunk)
        if slot.pins:
            slot.forgotten = True
        else:
            self.arena.give_free(slot)

    def _grant_of(self, slot: Slot) -> Grant:
        generation, stored_bytes = self.arena.generation(slot), slot.stored_bytes
        return Grant(MEDIUM_DRAM, slot.slab, slot.offset, stored_bytes, stored_bytes, 0, slot.crc, generation)

    def _placement(self, slot: Slot) -> Placement:
        return Placement(slot.slab, slot.offset, self.arena.generation(slot), slot.stored_bytes, slot.crc)

    # --- what there is to say ----------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Figures for status and metrics; JSON-able.  Counts grow only."""
        return {
            "limit_bytes": self.arena.slabs_max * self.arena.slab_bytes,
            "memory_bytes": self.arena.memory_bytes,
            "huge_pages": any(slab.memory.on_huge_pages for slab in self.arena.slabs.values()),
            "chunks": len(self._slots),
            "payload_bytes": self._payload_bytes,
            "pinned_bytes": self._pinned_bytes,
            "hits": self._hits,
            "misses": self._misses,
            "fills": self._fills,
            "filled_bytes": self._filled_bytes,
            "demotions": self._demotions,
            "forgotten": self._forgotten,
            "refused": self._refused,
        }


def _coldness(slab: Slab) -> tuple[bool, int]:
    """Empty ones first, then those read longest ago."""
    return slab.taken > 0, slab.used_at
