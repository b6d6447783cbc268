"""The arena of the DRAM tier: slabs of sealed memory, cut into slots of one size each, and their generations.

Sizes are those of payloads with their vectors: 16 KiB, 64 KiB, and 256 KiB, 1 MiB and 4 MiB with a page more.

Rules kept here:
- At most `slabs_max` slabs are made, and a slab is made when it is first needed; its number is never used again.
- A slot's generation is odd while its bytes may change or mean nothing, even while they are a chunk's; it only grows.
  It is made odd before a byte changes, and even after the last one did.  The first is a random number: a grant means
  nothing in the slabs of another engine, which a client may still have mapped.
- A slab changes its size only when none of its slots is in use, and every one of them has an odd generation.  One that
  is about to is in no class: none of its slots is given out, and no hand comes by.
- No step here walks more than the slots of one slab.

What is in the slots, and which of them goes, is the business of `dram_tier`.  Used on the loop; the memory of a slot
that is being filled also in one thread.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from engine.memory.sealed_memory import SealedMemory
from lakefs.grants.dram_slabs import GENERATION_BYTES, SLAB_BYTES, UNIT_BYTES, generation_number
from lakefs.ids import ChunkId
from lakefs.limits import KIB, MIB, PAGE_BYTES

SLOT_SIZES: Final = (
    UNIT_BYTES,
    64 * KIB,
    256 * KIB + PAGE_BYTES,
    1 * MIB + PAGE_BYTES,
    4 * MIB + PAGE_BYTES,
)
"""Of 64 MiB the last leaves 4% unused, the others less."""
_GENERATION_BITS: Final = 40
"""Of a first generation; as many as that may follow."""


class SlabMemory(Protocol):
    """What the arena asks of its memory: `SealedMemory`, or plain memory in the simulator, which hands out none."""

    @property
    def view(self) -> memoryview:
        """The memory: writable, page-aligned where the disk is read into it."""
        ...

    @property
    def descriptor(self) -> int:
        """A read-only descriptor to hand out; stays its owner's."""
        ...

    @property
    def on_huge_pages(self) -> bool:
        """Whether on reserved huge pages."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


class Slot(msgspec.Struct, gc=False, eq=False):
    """A place that is not free.  About 200 bytes, with where it is found; a free one takes 12."""

    slab: int
    offset: int
    chunk: ChunkId
    stored_bytes: int = 0
    crc: int = 0
    filling: bool = False
    forgotten: bool = False
    """The chunk is gone; the slot is free when nobody has it pinned any more."""
    referenced: bool = False
    used_at: int = 0
    """When it was last read, counted in reads."""
    pins: int = 0


class Slab:
    """One piece of memory, and the slots that it is cut into."""

    def __init__(self, number: int, memory: SlabMemory) -> None:
        self.number = number
        self.memory = memory
        self.view = memory.view
        self.slots: list[Slot | None] = []
        """None: it is free."""
        self.free = array("I")
        """Indexes of free ones."""
        self.is_leaving = False
        """Whether it is being emptied, for slots of another size."""
        self.used_at = 0
        """When one of its slots was last read, counted in reads."""
        self.taken = 0
        """Slots that are not free."""
        self.busy = 0
        """Slots that are being filled or pinned: they cannot go."""


class SlotClass:
    """All slots of one size, as many in each slab, and a CLOCK's hand over all of them."""

    def __init__(self, slot_bytes: int, slab_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots_per_slab: Final = slab_bytes // slot_bytes
        self.offsets: Final = tuple(range(0, slab_bytes - slot_bytes + 1, slot_bytes))
        """Of slots in a slab; each number is kept once, however many slabs there are."""
        self.slabs: list[Slab] = []
        self.with_free: list[Slab] = []
        """Those with free slots."""
        self.hand = 0
        """Counts slots."""

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return len(self.slabs) * self.slots_per_slab

    @property
    def free_count(self) -> int:
        """How many of them are free."""
        return sum(len(slab.free) for slab in self.with_free)

    def slot_at(self, index: int) -> Slot | None:
        """Slot number `index` of this class, below `slot_count`; None when it is free."""
        return self.slabs[index // self.slots_per_slab].slots[index % self.slots_per_slab]


class Arena:
    """Slabs and slots.  `slab_bytes` is smaller in tests."""

    def __init__(
        self,
        slabs_max: int,
        slab_bytes: int = SLAB_BYTES,
        make_memory: Callable[[str, int], SlabMemory] = SealedMemory,
    ) -> None:
        """Makes the generations' memory, 1/2048 of the arena's; blocks for that.  EngineBusy when there is none."""
        assert slabs_max >= 1, "an arena has a slab"
        self.slabs_max: Final = slabs_max
        self.slab_bytes: Final = slab_bytes
        self.classes: Final = [SlotClass(size, slab_bytes) for size in SLOT_SIZES if size <= slab_bytes]
        self._slot_sizes = [size.slot_bytes for size in self.classes]
        self._make_memory = make_memory
        self.slabs: Final[dict[int, Slab]] = {}
        self._grows = True
        self._home: dict[int, SlotClass] = {}
        count = -(-slabs_max * slab_bytes // UNIT_BYTES)
        size = -(-count * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._generation_memory = make_memory("lake-generations", size)
        self._generations = self._generation_memory.view.cast("Q")
        self._first_generation = 2 * secrets.randbits(_GENERATION_BITS)

    @property
    def generations_descriptor(self) -> int:
        """A read-only descriptor of the generations; stays ours."""
        return self._generation_memory.descriptor

    @property
    def memory_bytes(self) -> int:
        """Memory of the slabs that there are."""
        return len(self.slabs) * self.slab_bytes

    @property
    def is_full(self) -> bool:
        """Whether no further slab may be made."""
        return not self._grows or len(self.slabs) >= self.slabs_max

    def stop_growing(self) -> None:
        """Make no more slabs: memory could not be had."""
        self._grows = False

    def class_for(self, extent_bytes: int) -> SlotClass | None:
        """The class with the shortest slots that are long enough; None when none is."""
        index = bisect_left(self._slot_sizes, extent_bytes)
        return self.classes[index] if index < len(self.classes) else None

    def home(self, slot: Slot) -> SlotClass:
        """The class that the slot is of."""
        return self._home[slot.slab]

    # --- slabs -------------------------------------------------------------------------------------

    def make_slab_memory(self) -> SlabMemory:
        """Memory for one more slab.  Blocks; in a thread.  EngineBusy when there is none."""
        return self._make_memory("lake-slab", self.slab_bytes)

    def add_slab(self, memory: SlabMemory, size: SlotClass) -> None:
        """Use the memory as a slab with slots of that class."""
        assert not self.is_full, "no more slabs than were allowed"
        slab = Slab(len(self.slabs), memory)
        self.slabs[slab.number] = slab
        self._cut(slab, size)

    def begin_recut(self, slab: Slab) -> None:
        """Take a slab out of its class: its slots are emptied now, and none is filled any more."""
        old = self._home[slab.number]
        old.slabs.remove(slab)
        if slab.free:
            old.with_free.remove(slab)
        slab.is_leaving = True

    def recut(self, slab: Slab, size: SlotClass) -> None:
        """Give a slab for which this was begun, and none of whose slots is in use, to another class."""
        assert slab.is_leaving, "nobody is given a slot of it"
        assert not slab.taken, "what is in use has its place"
        first = generation_number(slab.number, 0, self.slab_bytes)
        generations = self._generations[first : first + self.slab_bytes // UNIT_BYTES]
        assert all(generation % 2 or not generation for generation in generations), "no readers"
        slab.is_leaving = False
        self._cut(slab, size)

    def _cut(self, slab: Slab, size: SlotClass) -> None:
        slab.slots = [None] * size.slots_per_slab
        slab.used_at = 0
        self._home[slab.number] = size
        slab.free = array("I", range(size.slots_per_slab))
        slab.free.reverse()
        size.slabs.append(slab)
        size.with_free.append(slab)

    # --- slots -------------------------------------------------------------------------------------

    def memory(self, slot: Slot) -> memoryview:
        """The slot's memory, writable."""
        return self.slabs[slot.slab].view[slot.offset : slot.offset + self._home[slot.slab].slot_bytes]

    def generation(self, slot: Slot) -> int:
        """The slot's generation."""
        return self._generations[self._number(slot)]

    def begin_change(self, slot: Slot) -> None:
        """From here on no reader takes the slot's bytes for what they were."""
        number = self._number(slot)
        generation = self._generations[number]
        if generation % 2 == 0:
            self._generations[number] = (generation or self._first_generation) + 1

    def end_change(self, slot: Slot) -> int:
        """The slot's bytes are a chunk's and stay so: its new generation, even, and never used before."""
        number = self._number(slot)
        assert self._generations[number] % 2 == 1, "a change begins before it ends"
        self._generations[number] += 1
        return self._generations[number]

    def take_free(self, size: SlotClass, chunk: ChunkId) -> Slot:
        """A free slot of that class, of which there is one, for the chunk."""
        slab = size.with_free[-1]
        index = slab.free.pop()
        if not slab.free:
            size.with_free.pop()
        slot = Slot(slab.number, size.offsets[index], chunk)
        slab.slots[index] = slot
        slab.taken += 1
        self.begin_change(slot)
        return slot

    def give_free(self, slot: Slot) -> None:
        """Nothing is in the slot any more, and nobody fills it or has it pinned."""
        self.begin_change(slot)
        slab, size = self.slabs[slot.slab], self._home[slot.slab]
        index = slot.offset // size.slot_bytes
        assert slab.slots[index] is slot, "a slot is given back once"
        slab.slots[index] = None
        slab.taken -= 1
        slab.free.append(index)
        if len(slab.free) == 1 and not slab.is_leaving:
            size.with_free.append(slab)

    def taken_slots(self) -> Iterator[Slot]:
        """Every slot that is not free."""
        for slab in self.slabs.values():
            yield from (slot for slot in slab.slots if slot is not None)

    def _number(self, slot: Slot) -> int:
        """Of its generation."""
        return generation_number(slot.slab, slot.offset, self.slab_bytes)

    def close(self) -> None:
        """Give all memory back; what readers still map stays until they let it go, and no generation is valid."""
        for slot in self.taken_slots():
            self.begin_change(slot)
        for slab in self.slabs.values():
            slab.view.release()
            slab.memory.close()
        self._generations.release()
        self._generation_memory.close()
