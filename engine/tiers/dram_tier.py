"""The DRAM tier: holds chunks in the arena's cells, chooses those to evict, and counts pins.

A chunk is admitted when it was read more often lately than the chunk it would replace (`engine.tiers.admission`).  The
victim is found by CLOCK among cells of the same size: the first not read since the hand last passed it (Corbato, "A
Paging Experiment with the Multics System", 1968); if HAND_STEPS_MAX cells were all read, the one read longest ago.  A
slab is recut for another size when all its chunks were read longer ago than the victim.

Rules kept here:
- A cell holds a chunk's bytes from `publish` to `forget` or demotion, which makes its generation odd in the same step.
  A pinned cell keeps bytes and generation until the last pin is taken back.
- A chunk is in at most one cell that can be found.  A chunk forgotten while it is being filled is never published.
- At most half of the arena's memory is pinned; beyond that a pin is refused.
- Bytes enter only between `reserve` and `publish`; the caller has checked them.
- No step looks at more than HAND_STEPS_MAX cells for a victim, nor empties more than EMPTIED_AT_ONCE_MAX cells of a
  slab being recut: the next admission continues there.

Nothing here awaits; used on the loop.  `on_admitted` and `on_demoted` are called in the step of the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from engine.fabric.registered_slab import SlabMemory, remote_grant
from engine.tiers.admission import READS_FOR_ADMISSION, Admission
from engine.tiers.arena import Arena, Cell, CellClass, Slab
from lakefs.content.verify import vector_bytes
from lakefs.ids import ChunkId
from lakefs.limits import DRAM_PAYLOAD_BYTES_MIN, KIB
from lakefs.wire.media import MEDIUM_DRAM
from lakefs.wire.messages import Grant

_PLACE_BYTES: Final = 256 * KIB
"""A guess at the bytes of a chunk, for the size of the admission sketch."""
HAND_STEPS_MAX: Final = 512
"""Cells that one search for a victim looks at; about 0.1 ms."""
EMPTIED_AT_ONCE_MAX: Final = 128
"""Cells of a slab being recut that one step empties; about 0.3 ms, `on_demoted` included."""
_STARVED_FROM: Final = 16
"""A size without a victim is refused this many admissions before it takes a slab of another size."""


class Placement(NamedTuple):
    """A chunk's place in the arena, and its checksum: `crc` as in its record."""

    slab: int
    offset: int
    generation: int
    stored_bytes: int
    crc: int


class DramTier:
    """The tier of one engine."""

    def __init__(self, arena: Arena) -> None:
        self.arena: Final = arena
        self._cells: dict[ChunkId, Cell] = {}
        self._filling: dict[ChunkId, Cell] = {}
        self._pinned: dict[tuple[int, int], Cell] = {}
        """Pinned cells by slab and offset."""
        self._admission = Admission(max(1, arena.slabs_max * arena.slab_bytes // _PLACE_BYTES))
        self._starved: dict[int, int] = {}
        self._leaving: tuple[Slab, CellClass, Iterator[Cell | None]] | None = None
        """The slab being emptied, the class it will join, and its cells that were not looked at yet."""
        self._reads = 0
        self._pinned_bytes = self._payload_bytes = 0
        self._hits = self._misses = self._fills = self._filled_bytes = 0
        self._demotions = self._forgotten = self._refused = 0
        self.on_admitted: Final[list[Callable[[ChunkId], None]]] = []
        self.on_demoted: Final[list[Callable[[ChunkId], None]]] = []

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._cells

    def chunks(self) -> list[ChunkId]:
        """Return the chunks in the tier."""
        return list(self._cells)

    # --- reading -----------------------------------------------------------------------------------

    def find(self, chunk: ChunkId) -> Placement | None:
        """Return the chunk's place, or None; counts a hit or a miss."""
        cell = self._cells.get(chunk)
        if cell is None:
            self._misses += 1
            return None
        self._hits += 1
        return self._placement(cell)

    def note_misses(self, count: int) -> None:
        """Count reads served elsewhere of chunks that are long enough for the tier."""
        self._misses += count

    def grant(self, chunk: ChunkId) -> Grant | None:
        """Return a grant of the chunk's cell, or None; not counted."""
        cell = self._cells.get(chunk)
        return None if cell is None else self._grant_of(cell)

    def note_read(self, chunk: ChunkId, stored_bytes: int) -> bool:
        """Count a read of the chunk's beginning; returns True if the chunk is worth bringing in now."""
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
        """Return True if a cell is free for the chunk, or the victim was read less often."""
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
        """Count a read of each chunk that has a grant; returns those worth bringing in now.

        With `understood`, grants of chunks in the tier are replaced by grants of their cells.  Does for many chunks
        what `note_read` and `find` do for one.
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

    def grant_remotely(self, chunks: Seq[ChunkId], grants: list[Grant]) -> None:
        """Replace grants of chunks whose slab is registered by grants for READs over RDMA; these count as hits."""
        for index, chunk in enumerate(chunks):
            cell = self._cells.get(chunk)
            if cell is not None:
                found = remote_grant(self.arena.slabs[cell.slab].memory, self._grant_of(cell))
                if found is not None:
                    self._hits += 1
                    grants[index] = found

    def note_located(self, chunks: list[bytes], *, understood: bool) -> list[ChunkId]:
        """Count a read of each chunk; returns those not in the tier that were read often.  Ask `may_fit` of them next.

        All chunks must be long enough for the tier.  `understood`: the reader got the places in the tier, so they
        count as hits.
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
        """Keep the chunk's bytes where they are until `unpin`; returns their place.

        None when the chunk is not in the tier, too much is pinned, or its slab is being emptied.  A chunk may be pinned
        many times; each pin is taken back separately.
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
        """Take one pin of that place back.  Does nothing after `close`."""
        cell = self._pinned.get((placement.slab, placement.offset))
        if cell is None:
            return
        assert cell.pins > 0, "each pin is taken back once"
        cell.pins -= 1
        if cell.pins:
            return
        del self._pinned[cell.slab, cell.offset]
        self._pinned_bytes -= self.arena.home(cell).cell_bytes
        assert self._pinned_bytes >= 0, "a cell's bytes are counted once while it is pinned"
        self.arena.slabs[cell.slab].busy -= 1
        if cell.forgotten:
            self.arena.give_free(cell)

    def extent(self, placement: Placement) -> memoryview:
        """Return payload and vector at a place that is pinned, or was found in this step."""
        end = placement.offset + placement.stored_bytes + vector_bytes(placement.stored_bytes)
        return self.arena.slabs[placement.slab].view[placement.offset : end]

    # --- bringing in -------------------------------------------------------------------------------

    def needs_slab(self, chunk: ChunkId, extent_bytes: int) -> CellClass | None:
        """Return the class that needs a new slab before `reserve` can succeed; None if no slab is needed or allowed."""
        size = self.arena.class_for(extent_bytes)
        if size is None or size.with_free or self.arena.is_full or not self._admission.admits(chunk, None):
            return None
        return size

    def add_slab(self, memory: SlabMemory, size: CellClass) -> None:
        """Add a slab; releases the memory if the arena has become full while it was made."""
        if self.arena.is_full:
            memory.close()
        else:
            self.arena.add_slab(memory, size)

    def reserve(self, chunk: ChunkId, extent_bytes: int) -> Cell | None:
        """Take a cell to fill with the chunk's payload and vector; then call `publish` or `abandon`.

        None when the chunk is in the tier, being filled, too long, or not worth a victim.
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
        """Let readers find the filled and checked cell.  Returns False, and frees it, if its chunk was forgotten."""
        chunk = cell.chunk
        assert cell.filling, "a cell is published once"
        if self._filling.get(chunk) is not cell:
            self.abandon(cell)
            return False
        assert chunk not in self._cells, "a chunk is in one cell that can be found"
        del self._filling[chunk]
        cell.filling = False
        cell.referenced = True
        cell.stored_bytes, cell.crc = stored_bytes, crc
        slab = self.arena.slabs[cell.slab]
        slab.busy -= 1
        cell.used_at = slab.used_at = self._reads
        self._cells[chunk] = cell
        self._payload_bytes += stored_bytes
        self.arena.end_change(cell)
        self._fills += 1
        self._filled_bytes += stored_bytes
        for told in self.on_admitted:
            told(chunk)
        return True

    def abandon(self, cell: Cell) -> None:
        """Free a cell that could not be filled."""
        assert cell.filling, "a cell is abandoned while it is filled"
        if self._filling.get(cell.chunk) is cell:
            del self._filling[cell.chunk]
        self.arena.slabs[cell.slab].busy -= 1
        self.arena.give_free(cell)

    def forget(self, chunk: ChunkId) -> None:
        """Drop a chunk that is freed or not to be trusted: no reader finds it, and its fill is not published."""
        self._filling.pop(chunk, None)
        cell = self._cells.pop(chunk, None)
        if cell is not None:
            self._forgotten += 1
            self._take_out(cell, chunk)

    def close(self) -> None:
        """Forget all chunks and release all memory."""
        for chunk in list(self._cells):
            self.forget(chunk)
        self._pinned.clear()
        self._leaving = None
        self.arena.close()

    # --- making room -------------------------------------------------------------------------------

    def _make_room(self, chunk: ChunkId, size: CellClass) -> bool:
        """Free a cell of that size if the chunk is worth it; returns True if one is free."""
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
        """Move CLOCK's hand to the next victim; None when every cell it passes is pinned or being filled."""
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
        """Return the slab of another size that was read longest ago and has nothing pinned or being filled."""
        others = (slab for found in self.arena.classes if found is not size for slab in found.slabs)
        return min((slab for slab in others if not slab.busy), key=_coldness, default=None)

    def _recut_for_starved(self, size: CellClass, cold: Slab) -> bool:
        waited = self._starved.get(size.cell_bytes, 0) + 1
        self._starved[size.cell_bytes] = waited % _STARVED_FROM
        if waited < _STARVED_FROM or self._leaving is not None:
            return False
        return self._recut(cold, size)

    def _recut(self, slab: Slab, size: CellClass) -> bool:
        """Begin to empty a slab for cells of another size; returns True if it is done already and has free cells."""
        self.arena.begin_recut(slab)
        self._leaving = slab, size, iter(slab.cells)
        self._empty_more()
        return self._leaving is None

    def _empty_more(self) -> None:
        """Empty more cells of the slab being emptied, if any; once it is empty, give it to its new class."""
        if self._leaving is None:
            return
        slab, size, cells = self._leaving
        for cell in islice(cells, EMPTIED_AT_ONCE_MAX):
            if cell is not None:  # none is pinned or being filled
                self._demote(cell)
        if not slab.taken:
            self._leaving = None
            self.arena.recut(slab, size)

    def _demote(self, cell: Cell) -> None:
        assert not cell.pins, "a pinned cell is not demoted"
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

    # --- figures -----------------------------------------------------------------------------------

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
    """Sort key: empty slabs first, then those read longest ago."""
    return slab.taken > 0, slab.used_at
