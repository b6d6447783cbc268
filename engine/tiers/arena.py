"""The arena of the DRAM tier: slabs of sealed memory, each cut into cells of one size, and the cells' generations.

Cells fit payloads with their vectors of CRCs: 16 KiB, 64 KiB, and 256 KiB, 1 MiB and 4 MiB plus a page.  The size of
the tier is a share of this process's memory (`tier_bytes`, `lakefs.host.memory_limits`).

Rules kept here:
- At most `slabs_max` slabs are made, each when it is first needed.  A slab's number is never used again.
- A cell's generation is even while the cell holds a chunk's bytes, odd while they may change or mean nothing.  It only
  grows.  It turns odd before the first byte changes and even after the last one did.  The first generation is random,
  so that a grant means nothing in the slabs of another engine, which a client may still have mapped.
- A slab gets cells of another size only when none of its cells is in use and every generation is odd, or 0 for a cell
  never used.  A slab being emptied for that is in no class: none of its free cells is given out, and CLOCK skips it.
- No step here walks more than the cells of one slab.

`engine.tiers.dram_tier` decides which chunks the cells hold and which are evicted.  Used on the loop; a thread may
write to the memory of a cell that is being filled.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from engine.fabric.registered_slab import SlabMemory
from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import ConfigError
from lakefs.grants.dram_slabs import GENERATION_BYTES, SLAB_BYTES, UNIT_BYTES, generation_number
from lakefs.ids import ChunkId
from lakefs.limits import DRAM_BYTES_AUTO_MAX, DRAM_BYTES_AUTO_MIN, DRAM_SHARE, DRAM_SHARE_MOST, KIB, MIB, PAGE_BYTES

CELL_SIZES: Final = (UNIT_BYTES, 64 * KIB, 256 * KIB + PAGE_BYTES, 1 * MIB + PAGE_BYTES, 4 * MIB + PAGE_BYTES)
"""Cells of the largest size leave 4% of a slab of 64 MiB unused; the others leave less."""
_GENERATION_BITS: Final = 40
"""Random bits of the first generation; the other bits leave room to count up from it."""


class Cell(msgspec.Struct, gc=False, eq=False):
    """A cell that is not free.  About 200 bytes with its entry in the tier; a free cell takes 12."""

    slab: int
    offset: int
    chunk: ChunkId
    stored_bytes: int = 0
    crc: int = 0
    filling: bool = False
    forgotten: bool = False
    """The chunk is no longer in the tier; the cell becomes free with its last pin."""
    referenced: bool = False
    used_at: int = 0
    """The tier's count of reads when the cell was last read."""
    pins: int = 0


class Slab:
    """One piece of memory, and the cells it is cut into."""

    def __init__(self, number: int, memory: SlabMemory) -> None:
        self.number = number
        self.memory = memory
        self.view = memory.view
        self.cells: list[Cell | None] = []
        """Cells in use by index; None for a free one."""
        self.free = array("I")
        """Indexes of the free cells."""
        self.is_leaving = False
        """True while the slab is being emptied for cells of another size."""
        self.used_at = 0
        """The tier's count of reads when one of its cells was last read."""
        self.taken = 0
        """Cells that are not free."""
        self.busy = 0
        """Cells that are being filled or are pinned, and so cannot be evicted."""


class CellClass:
    """All cells of one size, the same number in each slab, and the CLOCK hand over them."""

    def __init__(self, cell_bytes: int, slab_bytes: int) -> None:
        self.cell_bytes = cell_bytes
        self.cells_per_slab: Final = slab_bytes // cell_bytes
        self.offsets: Final = tuple(range(0, slab_bytes - cell_bytes + 1, cell_bytes))
        """Offsets of the cells in a slab; all cells share these number objects, which saves memory."""
        self.slabs: list[Slab] = []
        self.with_free: list[Slab] = []
        """Slabs of the class that have free cells."""
        self.hand = 0
        """Index of the cell where CLOCK's hand stands; taken modulo `cell_count`."""

    @property
    def cell_count(self) -> int:
        """Cells of the class, free ones included."""
        return len(self.slabs) * self.cells_per_slab

    @property
    def free_count(self) -> int:
        """Free cells of the class."""
        return sum(len(slab.free) for slab in self.with_free)

    def cell_at(self, index: int) -> Cell | None:
        """Cell `index` of the class, below `cell_count`; None when it is free."""
        return self.slabs[index // self.cells_per_slab].cells[index % self.cells_per_slab]


class Arena:
    """Slabs and cells of one tier.  `slab_bytes` is smaller in tests."""

    def __init__(
        self,
        slabs_max: int,
        slab_bytes: int = SLAB_BYTES,
        make_memory: Callable[[str, int], SlabMemory] = SealedMemory,
        registered: Callable[[SlabMemory], SlabMemory] = lambda memory: memory,
    ) -> None:
        """Make the memory of the generations, 1/2048 of the arena's.  Blocks.  EngineBusy when memory is short.

        `registered` makes a new slab's memory known to an RDMA device, and returns it; it blocks.
        """
        assert slabs_max >= 1, "an arena has a slab"
        self.slabs_max: Final = slabs_max
        self.slab_bytes: Final = slab_bytes
        self.classes: Final = [CellClass(size, slab_bytes) for size in CELL_SIZES if size <= slab_bytes]
        self._cell_sizes = [size.cell_bytes for size in self.classes]
        self._make_memory = make_memory
        self._registered = registered
        self.slabs: Final[dict[int, Slab]] = {}
        self.grows = True
        """False once memory for a slab could not be allocated: no more are made."""
        self._home: dict[int, CellClass] = {}
        count = -(-slabs_max * slab_bytes // UNIT_BYTES)
        size = -(-count * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._generation_memory = make_memory("lake-generations", size)
        self._generations = self._generation_memory.view.cast("Q")
        self._first_generation = 2 * secrets.randbits(_GENERATION_BITS)

    @property
    def generations_descriptor(self) -> int:
        """A read-only descriptor of the generations; the arena closes it."""
        return self._generation_memory.descriptor

    @property
    def memory_bytes(self) -> int:
        """Bytes of all slabs made so far."""
        return len(self.slabs) * self.slab_bytes

    @property
    def is_full(self) -> bool:
        """True if no further slab may be made."""
        return not self.grows or len(self.slabs) >= self.slabs_max

    def class_for(self, extent_bytes: int) -> CellClass | None:
        """The class with the shortest cells that hold so many bytes; None when no class does."""
        index = bisect_left(self._cell_sizes, extent_bytes)
        return self.classes[index] if index < len(self.classes) else None

    def home(self, cell: Cell) -> CellClass:
        """The class of the cell."""
        return self._home[cell.slab]

    # --- slabs -------------------------------------------------------------------------------------

    def make_slab_memory(self) -> SlabMemory:
        """Make memory for one more slab.  Blocks; called in a thread.  EngineBusy when memory is short."""
        return self._registered(self._make_memory("lake-slab", self.slab_bytes))

    def add_slab(self, memory: SlabMemory, size: CellClass) -> None:
        """Use the memory as a slab with cells of that class."""
        assert not self.is_full, "no more slabs than were allowed"
        slab = Slab(len(self.slabs), memory)
        self.slabs[slab.number] = slab
        self._cut(slab, size)

    def begin_recut(self, slab: Slab) -> None:
        """Take a slab out of its class: the caller empties its cells, and none of them is filled any more."""
        assert not slab.busy, "a slab that is emptied has nothing pinned or being filled"
        old = self._home[slab.number]
        old.slabs.remove(slab)
        if slab.free:
            old.with_free.remove(slab)
        slab.is_leaving = True

    def recut(self, slab: Slab, size: CellClass) -> None:
        """Give a slab to another class.  `begin_recut` was called for it, and none of its cells is in use."""
        assert slab.is_leaving, "a slab leaves its class before it joins another"
        assert not slab.taken, "a slab that changes class has no cell in use"
        first = generation_number(slab.number, 0, self.slab_bytes)
        generations = self._generations[first : first + self.slab_bytes // UNIT_BYTES]
        assert all(generation % 2 or not generation for generation in generations), "no readers"
        slab.is_leaving = False
        self._cut(slab, size)

    def _cut(self, slab: Slab, size: CellClass) -> None:
        slab.cells = [None] * size.cells_per_slab
        slab.used_at = 0
        self._home[slab.number] = size
        slab.free = array("I", range(size.cells_per_slab))
        slab.free.reverse()
        size.slabs.append(slab)
        size.with_free.append(slab)

    # --- cells -------------------------------------------------------------------------------------

    def memory(self, cell: Cell) -> memoryview:
        """The cell's memory, writable."""
        return self.slabs[cell.slab].view[cell.offset : cell.offset + self._home[cell.slab].cell_bytes]

    def generation(self, cell: Cell) -> int:
        """The cell's generation."""
        return self._generations[self._number(cell)]

    def begin_change(self, cell: Cell) -> None:
        """Make the generation odd: from now on no reader takes the cell's bytes for what they were."""
        number = self._number(cell)
        generation = self._generations[number]
        if generation % 2 == 0:
            self._generations[number] = (generation or self._first_generation) + 1

    def end_change(self, cell: Cell) -> int:
        """Make the generation even, as the cell now holds a chunk's bytes; returns it.  Never used before."""
        number = self._number(cell)
        assert self._generations[number] % 2 == 1, "a change begins before it ends"
        self._generations[number] += 1
        return self._generations[number]

    def take_free(self, size: CellClass, chunk: ChunkId) -> Cell:
        """Take a free cell of the class for the chunk.  The class must have one."""
        slab = size.with_free[-1]
        assert not slab.is_leaving, "no cell of a slab being emptied is given out"
        index = slab.free.pop()
        if not slab.free:
            size.with_free.pop()
        cell = Cell(slab.number, size.offsets[index], chunk)
        slab.cells[index] = cell
        slab.taken += 1
        self.begin_change(cell)
        return cell

    def give_free(self, cell: Cell) -> None:
        """Free a cell: its chunk is no longer in it, and it is neither pinned nor being filled."""
        assert not cell.pins, "a pinned cell is not freed"
        self.begin_change(cell)
        slab, size = self.slabs[cell.slab], self._home[cell.slab]
        index = cell.offset // size.cell_bytes
        assert slab.cells[index] is cell, "a cell is given back once"
        slab.cells[index] = None
        slab.taken -= 1
        slab.free.append(index)
        if len(slab.free) == 1 and not slab.is_leaving:
            size.with_free.append(slab)

    def taken_cells(self) -> Iterator[Cell]:
        """Every cell that is not free."""
        for slab in self.slabs.values():
            yield from (cell for cell in slab.cells if cell is not None)

    def _number(self, cell: Cell) -> int:
        """Index of the cell's generation."""
        return generation_number(cell.slab, cell.offset, self.slab_bytes)

    def close(self) -> None:
        """Release all memory, with every generation odd.  What clients have mapped exists until they unmap it."""
        for cell in self.taken_cells():
            self.begin_change(cell)
        for slab in self.slabs.values():
            slab.view.release()
            slab.memory.close()
        self._generations.release()
        self._generation_memory.close()


def tier_bytes(asked: int | None, memory: int) -> tuple[int, str]:
    """Return the tier's size in bytes, in whole slabs, and a warning or "".  `asked` None means a small share.

    ConfigError for less than a slab.  More than three quarters of the memory is cut to that, with the warning.
    """
    if asked is None:
        share = min(memory // DRAM_SHARE, DRAM_BYTES_AUTO_MAX)
        return (_whole(share) if share >= DRAM_BYTES_AUTO_MIN else 0), ""
    if not asked:
        return 0, ""
    if asked < SLAB_BYTES:
        raise ConfigError(
            f"dram_tier_bytes: {asked} bytes are less than one slab; give {SLAB_BYTES >> 20}M or more, or 0 for none",
            subject="dram_tier_bytes",
        )
    most = _whole(int(memory * DRAM_SHARE_MOST))
    if memory and asked > most:
        return most, (
            f"dram_tier_bytes: {asked // MIB} MiB were asked for, and this machine or its control group has "
            f"{memory // MIB} MiB; the tier takes at most {most // MIB} MiB"
        )
    return _whole(asked), ""


def _whole(size: int) -> int:
    return size // SLAB_BYTES * SLAB_BYTES
