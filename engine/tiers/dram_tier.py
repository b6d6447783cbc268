"""The DRAM tier: which chunks are in the arena, which of them go, and who has them pinned.

A chunk gets in when it was read more often lately than what would have to go for it (`admission`); what goes is found
by CLOCK among the cells of its size: the first that was not read since the hand passed it last (Corbato, "A Paging
Experiment with the Multics System", 1968), or of many that all were, the one read longest ago.  A slab moves to another
size when all in it was read longer ago than what would go otherwise.

Rules kept here:
- A cell's bytes are a chunk's from `publish` to `forget` or demotion; both make its generation odd at once, in the same
  step.  What is pinned stays, under the same generation, until the last pin is gone.
- A chunk is in at most one cell that can be found.  One that is forgotten while it is being filled is never published.
- At most half of the arena's memory is pinned; beyond that a pin is refused.
- Bytes come in through `reserve` and `publish` only, checked by who brings them.
- No step looks at more than HAND_STEPS_MAX cells for one that goes, nor empties more than EMPTIED_AT_ONCE_MAX of a slab
  that changes its size: it goes on with the next admission.

Nothing here is awaited; used on the loop.  `on_admitted` and `on_demoted` are told in the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from engine.tiers.admission import READS_FOR_ADMISSION, Admission
from engine.tiers.arena import Arena, Slab, SlabMemory, Cell, CellClass
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
        self._cells: dict[ChunkId, Cell] = {}
        self._filling: dict[ChunkId, Cell] = {}
        self._pinned: dict[tuple[int, int], Cell] = {}
        """By slab and offset."""
        self._admission = Admission(max(1, arena.slabs_max * arena.slab_bytes // _PLACE_BYTES))
        self._starved: dict[int, int] = {}
        self._leaving: tuple[Slab, CellClass, Iterator[Cell | None]] | None = None
        """The slab that is being emptied, for whom, and those of its cells that were not looked at yet."""
        self._reads = 0
        self._pinned_bytes = self._payload_bytes = 0
        self._hits = self._misses = self._fills = self._filled_bytes = 0
        self._demotions = self._forgotten = self._refused = 0
        self.on_admitted: Final[list[Admitted]] = []
        self.on_demoted: Final[list[Demoted]] = []

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._cells

    # --- reading -----------------------------------------------------------------------------------

    def find(self, chunk: ChunkId) -> Placement | None:
        """Where the chunk is now, or None; counted as a hit or a miss of a reader."""
        cell = self._cells.get(chunk)
        if cell is None:
            self._misses += 1
            return None
        self._hits += 1
        return self._placement(cell)

    def note_misses(self, count: int) -> None:
        """Readers were served elsewhere with so many chunks that are long enough to be in."""
        self._misses += count

    def grant(self, chunk: ChunkId) -> Grant | None:
        """What a reader of the chunk is told, or None; not counted."""
        cell = self._cells.get(chunk)
        return None if cell is None else self._grant_of(cell)

    def note_read(self, chunk: ChunkId, stored_bytes: int) -> bool:
        """Somebody reads the chunk's beginning; whether it is worth bringing in now."""
        if stored_bytes < DRAM_PAYLOAD_BYTES_MIN:
            return False
        cell = self._cells.get(chunk)
        self._reads += 1
        count = self._admission.note(chunk)
        if cell is not None:
            cell.referenced = True
            cell.used_at = self.arena.slabs[cell.slab].used_at = self._reads
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
        cells, note, slabs = self._cells, self._admission.note, self.arena.slabs
        wanted: list[ChunkId] = []
        for index, chunk in enumerate(chunks):
            cell = cells.get(chunk)
            if cell is None:
                stored_bytes = grants[index].stored_bytes
                if stored_bytes < DRAM_PAYLOAD_BYTES_MIN:
                    continue
                self._misses += 1
                if note(chunk) >= READS_FOR_ADMISSION and self.may_fit(chunk, stored_bytes):
                    wanted.append(chunk)
                continue
            note(chunk)
            cell.referenced = True
            cell.used_at = slabs[cell.slab].used_at = self._reads
            if understood:
                self._hits += 1
                grants[index] = self._grant_of(cell)
        self._reads += len(chunks)
        return wanted

    def note_located(self, chunks: list[bytes], *, understood: bool) -> list[ChunkId]:
        """Count a read of each chunk; those that are not in and were read often: `may_fit` says what they are worth.

        For chunks that are long enough.  `understood`: where they are in, the reader was told so.
        """
        cells, slabs, reads = self._cells, self.arena.slabs, self._reads
        often: list[ChunkId] = []
        hits, slab = 0, -1
        located = cast(list[ChunkId], chunks)
        for chunk, count in zip(located, self._admission.note_many(located), strict=True):
            cell = cells.get(chunk)
            if cell is None:
                if count >= READS_FOR_ADMISSION:
                    often.append(chunk)
                continue
            hits += 1
            if not cell.referenced:
                cell.referenced = True
            cell.used_at = reads
            if cell.slab != slab:
                slab = cell.slab
                slabs[slab].used_at = reads
        self._misses += len(chunks) - hits
        self._hits += hits if understood else 0
        self._reads += len(chunks)
        return often

    def pin(self, chunk: ChunkId) -> Placement | None:
        """Keep the chunk's bytes where they are until `unpin`; None when it is not in, or too much is pinned.

        None, too, when its slab is being emptied.  A chunk may be pinned many times; each pin is taken back by itself.
        """
        cell = self._cells.get(chunk)
        if cell is None:
            return None
        if not cell.pins:
            if self.arena.slabs[cell.slab].is_leaving:
                return None
            taken = self._pinned_bytes + self.arena.home(cell).cell_bytes
            if taken > self.arena.slabs_max * self.arena.slab_bytes // 2:
                return None
            self._pinned_bytes = taken
            self._pinned[cell.slab, cell.offset] = cell
            self.arena.slabs[cell.slab].busy += 1
        cell.pins += 1
        return self._placement(cell)

    def unpin(self, placement: Placement) -> None:
        """Take one pin of that place back.  Of a tier that was closed meanwhile: nothing happens."""
        cell = self._pinned.get((placement.slab, placement.offset))
        if cell is None:
            return
        cell.pins -= 1
        if cell.pins:
            return
        del self._pinned[cell.slab, cell.offset]
        self._pinned_bytes -= self.arena.home(cell).cell_bytes
        self.arena.slabs[cell.slab].busy -= 1
        if cell.forgotten:
            self.arena.give_free(cell)

    def extent(self, placement: Placement) -> memoryview:
        """Payload and vector at a place that is pinned, or was found in this step."""
        end = placement.offset + placement.stored_bytes + vector_bytes(placement.stored_bytes)
        return self.arena.slabs[placement.slab].view[placement.offset : end]

    # --- bringing in -------------------------------------------------------------------------------

    def needs_slab(self, chunk: ChunkId, extent_bytes: int) -> CellClass | None:
        """The class for which a slab is to be made before such a chunk can be reserved a cell; None: none is needed."""
        size = self.arena.class_for(extent_bytes)
        if size is None or size.with_free or self.arena.is_full or not self._admission.admits(chunk, None):
            return None
        return size

    def add_slab(self, memory: SlabMemory, size: CellClass) -> None:
        """Grow by a slab; given back at once when the arena has become full meanwhile."""
        if self.arena.is_full:
            memory.close()
        else:
            self.arena.add_slab(memory, size)

    def reserve(self, chunk: ChunkId, extent_bytes: int) -> Cell | None:
        """A cell to fill with the chunk's payload and vector; then `publish` or `abandon`.

        None when it is in, or under way, too long, or not worth what would have to go.
        """
        self._empty_more()
        size = self.arena.class_for(extent_bytes)
        if size is None or chunk in self._cells or chunk in self._filling:
            return None
        if not self._admission.admits(chunk, None) or not (size.with_free or self._make_room(chunk, size)):
            self._refused += 1
            return None
        cell = self.arena.take_free(size, chunk)
        self.arena.slabs[cell.slab].busy += 1
        cell.filling = True
        self._filling[chunk] = cell
        return cell

    def publish(self, cell: Cell, stored_bytes: int, crc: int) -> bool:
        """The cell has been filled and checked: readers may have it.  False: the chunk was forgotten meanwhile."""
        chunk = cell.chunk
        assert cell.filling, "a cell is published once"
        if self._filling.get(chunk) is not cell:
            self.abandon(cell)
            return False
        del self._filling[chunk]
        cell.filling = False
        cell.referenced = True
        cell.stored_bytes, cell.crc = stored_bytes, crc
        slab = self.arena.slabs[cell.slab]
        slab.busy -= 1
        cell.used_at = slab.used_at = self._reads
        self._cells[chunk] = cell
        self._payload_bytes += stored_bytes
        generation = self.arena.end_change(cell)
        self._fills += 1
        self._filled_bytes += stored_bytes
        for told in self.on_admitted:
            told(chunk, cell.slab, cell.offset, generation, stored_bytes, crc)
        return True

    def abandon(self, cell: Cell) -> None:
        """The cell could not be filled."""
        assert cell.filling, "a cell is abandoned while it is filled"
        if self._filling.get(cell.chunk) is cell:
            del self._filling[cell.chunk]
        self.arena.slabs[cell.slab].busy -= 1
        self.arena.give_free(cell)

    def forget(self, chunk: ChunkId) -> None:
        """The chunk is freed, or not to be trusted: nobody finds it any more, and what is being filled is dropped."""
        self._filling.pop(chunk, None)
        cell = self._cells.pop(chunk, None)
        if cell is not None:
            self._forgotten += 1
            self._take_out(cell, chunk)

    def close(self) -> None:
        """Give all memory back."""
        for chunk in list(self._cells):
            self.forget(chunk)
        self._pinned.clear()
        self._leaving = None
        self.arena.close()

    # --- making room -------------------------------------------------------------------------------

    def _make_room(self, chunk: ChunkId, size: CellClass) -> bool:
        """Free a cell of that size, when the chunk is worth it."""
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

    def _next_victim(self, size: CellClass) -> Cell | None:
        """Where CLOCK's hand stops, and stays for the next time; None when all cells are pinned or being filled."""
        count = size.cell_count
        longest_ago: Cell | None = None
        for _ in range(min(2 * count, HAND_STEPS_MAX)):
            cell = size.cell_at(size.hand % count)
            if cell is not None and not cell.filling and not cell.pins:
                if not cell.referenced:
                    return cell
                cell.referenced = False
                if longest_ago is None or cell.used_at < longest_ago.used_at:
                    longest_ago = cell
            size.hand = (size.hand + 1) % count
        return longest_ago

    def _coldest_slab(self, size: CellClass) -> Slab | None:
        """Of other sizes, the slab that was read longest ago and has nothing pinned or being filled."""
        others = (slab for found in self.arena.classes if found is not size for slab in found.slabs)
        return min((slab for slab in others if not slab.busy), key=_coldness, default=None)

    def _recut_for_starved(self, size: CellClass, cold: Slab) -> bool:
        waited = self._starved.get(size.cell_bytes, 0) + 1
        self._starved[size.cell_bytes] = waited % _STARVED_FROM
        if waited < _STARVED_FROM or self._leaving is not None:
            return False
        return self._recut(cold, size)

    def _recut(self, slab: Slab, size: CellClass) -> bool:
        """Begin to empty a slab for cells of another size; whether it is done, so that there are free ones."""
        self.arena.begin_recut(slab)
        self._leaving = slab, size, iter(slab.cells)
        self._empty_more()
        return self._leaving is None

    def _empty_more(self) -> None:
        """Empty some more of the slab that is being emptied, if any, and cut it anew behind its last cell."""
        if self._leaving is None:
            return
        slab, size, cells = self._leaving
        for cell in islice(cells, EMPTIED_AT_ONCE_MAX):
            if cell is not None:  # nothing is pinned or being filled there
                self._demote(cell)
        if not slab.taken:
            self._leaving = None
            self.arena.recut(slab, size)

    def _demote(self, cell: Cell) -> None:
        assert not cell.pins, "what is pinned stays"
        del self._cells[cell.chunk]
        self._demotions += 1
        self._take_out(cell, cell.chunk)

    def _take_out(self, cell: Cell, chunk: ChunkId) -> None:
        self._payload_bytes -= cell.stored_bytes
        for told in self.on_demoted:
            told(chunk)
        if cell.pins:
            cell.forgotten = True
        else:
            self.arena.give_free(cell)

    def _grant_of(self, cell: Cell) -> Grant:
        generation, stored_bytes = self.arena.generation(cell), cell.stored_bytes
        return Grant(MEDIUM_DRAM, cell.slab, cell.offset, stored_bytes, stored_bytes, 0, cell.crc, generation)

    def _placement(self, cell: Cell) -> Placement:
        return Placement(cell.slab, cell.offset, self.arena.generation(cell), cell.stored_bytes, cell.crc)

    # --- what there is to say ----------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Figures for status and metrics; JSON-able.  Counts grow only."""
        return {
            "limit_bytes": self.arena.slabs_max * self.arena.slab_bytes,
            "memory_bytes": self.arena.memory_bytes,
            "huge_pages": any(slab.memory.on_huge_pages for slab in self.arena.slabs.values()),
            "chunks": len(self._cells),
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
