"""The arena of the DRAM tier: slabs of sealed memory, cut into cells of one size each, and their generations.

Sizes are those of payloads with their vectors: 16 KiB, 64 KiB, and 256 KiB, 1 MiB and 4 MiB with a page more.

Rules kept here:
- At most `slabs_max` slabs are made, and a slab is made when it is first needed; its number is never used again.
- A cell's generation is odd while its bytes may change or mean nothing, even while they are a chunk's; it only grows.
  It is made odd before a byte changes, and even after the last one did.  The first is a random number: a grant means
  nothing in the slabs of another engine, which a client may still have mapped.
- A slab changes its size only when none of its cells is in use, and every one of them has an odd generation.  One that
  is about to is in no class: none of its cells is given out, and no hand comes by.
- No step here walks more than the cells of one slab.

What is in the cells, and which of them goes, is the business of `dram_tier`.  Used on the loop; the memory of a cell
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

CELL_SIZES: Final = (
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


class Cell(msgspec.Struct, gc=False, eq=False):
    """A place that is not free.  About 200 bytes, with where it is found; a free one takes 12."""

    slab: int
    offset: int
    chunk: ChunkId
    stored_bytes: int = 0
    crc: int = 0
    filling: bool = False
    forgotten: bool = False
    """The chunk is gone; the cell is free when nobody has it pinned any more."""
    referenced: bool = False
    used_at: int = 0
    """When it was last read, counted in reads."""
    pins: int = 0


class Slab:
    """One piece of memory, and the cells that it is cut into."""

    def __init__(self, number: int, memory: SlabMemory) -> None:
        self.number = number
        self.memory = memory
        self.view = memory.view
        self.cells: list[Cell | None] = []
        """None: it is free."""
        self.free = array("I")
        """Indexes of free ones."""
        self.is_leaving = False
        """Whether it is being emptied, for cells of another size."""
        self.used_at = 0
        """When one of its cells was last read, counted in reads."""
        self.taken = 0
        """Cells that are not free."""
        self.busy = 0
        """Cells that are being filled or pinned: they cannot go."""


class CellClass:
    """All cells of one size, as many in each slab, and a CLOCK's hand over all of them."""

    def __init__(self, cell_bytes: int, slab_bytes: int) -> None:
        self.cell_bytes = cell_bytes
        self.cells_per_slab: Final = slab_bytes // cell_bytes
        self.offsets: Final = tuple(range(0, slab_bytes - cell_bytes + 1, cell_bytes))
        """Of cells in a slab; each number is kept once, however many slabs there are."""
        self.slabs: list[Slab] = []
        self.with_free: list[Slab] = []
        """Those with free cells."""
        self.hand = 0
        """Counts cells."""

    @property
    def cell_count(self) -> int:
        """How many cells there are."""
        return len(self.slabs) * self.cells_per_slab

    @property
    def free_count(self) -> int:
        """How many of them are free."""
        return sum(len(slab.free) for slab in self.with_free)

    def cell_at(self, index: int) -> Cell | None:
        """Cell number `index` of this class, below `cell_count`; None when it is free."""
        return self.slabs[index // self.cells_per_slab].cells[index % self.cells_per_slab]


class Arena:
    """Slabs and cells.  `slab_bytes` is smaller in tests."""

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
        self.classes: Final = [CellClass(size, slab_bytes) for size in CELL_SIZES if size <= slab_bytes]
        self._cell_sizes = [size.cell_bytes for size in self.classes]
        self._make_memory = make_memory
        self.slabs: Final[dict[int, Slab]] = {}
        self._grows = True
        self._home: dict[int, CellClass] = {}
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

    def class_for(self, extent_bytes: int) -> CellClass | None:
        """The class with the shortest cells that are long enough; None when none is."""
        index = bisect_left(self._cell_sizes, extent_bytes)
        return self.classes[index] if index < len(self.classes) else None

    def home(self, cell: Cell) -> CellClass:
        """The class that the cell is of."""
        return self._home[cell.slab]

    # --- slabs -------------------------------------------------------------------------------------

    def make_slab_memory(self) -> SlabMemory:
        """Memory for one more slab.  Blocks; in a thread.  EngineBusy when there is none."""
        return self._make_memory("lake-slab", self.slab_bytes)

    def add_slab(self, memory: SlabMemory, size: CellClass) -> None:
        """Use the memory as a slab with cells of that class."""
        assert not self.is_full, "no more slabs than were allowed"
        slab = Slab(len(self.slabs), memory)
        self.slabs[slab.number] = slab
        self._cut(slab, size)

    def begin_recut(self, slab: Slab) -> None:
        """Take a slab out of its class: its cells are emptied now, and none is filled any more."""
        old = self._home[slab.number]
        old.slabs.remove(slab)
        if slab.free:
            old.with_free.remove(slab)
        slab.is_leaving = True

    def recut(self, slab: Slab, size: CellClass) -> None:
        """Give a slab for which this was begun, and none of whose cells is in use, to another class."""
        assert slab.is_leaving, "nobody is given a cell of it"
        assert not slab.taken, "what is in use has its place"
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
        """From here on no reader takes the cell's bytes for what they were."""
        number = self._number(cell)
        generation = self._generations[number]
        if generation % 2 == 0:
            self._generations[number] = (generation or self._first_generation) + 1

    def end_change(self, cell: Cell) -> int:
        """The cell's bytes are a chunk's and stay so: its new generation, even, and never used before."""
        number = self._number(cell)
        assert self._generations[number] % 2 == 1, "a change begins before it ends"
        self._generations[number] += 1
        return self._generations[number]

    def take_free(self, size: CellClass, chunk: ChunkId) -> Cell:
        """A free cell of that class, of which there is one, for the chunk."""
        slab = size.with_free[-1]
        index = slab.free.pop()
        if not slab.free:
            size.with_free.pop()
        cell = Cell(slab.number, size.offsets[index], chunk)
        slab.cells[index] = cell
        slab.taken += 1
        self.begin_change(cell)
        return cell

    def give_free(self, cell: Cell) -> None:
        """Nothing is in the cell any more, and nobody fills it or has it pinned."""
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
        """Of its generation."""
        return generation_number(cell.slab, cell.offset, self.slab_bytes)

    def close(self) -> None:
        """Give all memory back; what readers still map stays until they let it go, and no generation is valid."""
        for cell in self.taken_cells():
            self.begin_change(cell)
        for slab in self.slabs.values():
            slab.view.release()
            slab.memory.close()
        self._generations.release()
        self._generation_memory.close()
