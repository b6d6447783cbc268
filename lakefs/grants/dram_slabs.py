"""Slabs: the engine's DRAM tier as a client sees it, memory that it maps read-only and copies from.

A slab is a sealed memfd of the engine, cut into cells.  A cell holds one chunk's payload and, behind it, the vector of
CRCs, as an extent of a segment does.  Each cell has a *generation*, a number in one more memfd: even while the cell
holds one chunk, odd while the engine changes it, never the same twice.  A grant of `MEDIUM_DRAM` names slab, offset
and generation.

Rules kept here:
- Bytes are copied between two reads of the generation, and the copy is then checked as any bytes are.  The generation
  finds stale bytes early and saves work; correctness rests on the check.
- Generations and slabs used by one read are of one engine: both are replaced in one step.
- Only memory sealed against shrinking is mapped; a mapping of other memory could raise SIGBUS.
- The mapping is read-only for good: the kernel refuses to make it, or the descriptor, writable.

An entry of the shared index that names a cell has slab and generation in one number
(`lakefs.shared_index.table_format`).

The generation of the cell at `offset` of slab `n` is number `(n * slab_bytes + offset) // UNIT_BYTES`, 8 bytes each, in
the machine's byte order.  No two cells share one: each begins in a unit of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from lakefs.content.verify import NO_VECTOR
from lakefs.errors import StaleGrant
from lakefs.limits import KIB, MIB
from lakefs.shared_index.table_format import unpack_place
from lakefs.wire.grants import Grant

SLAB_BYTES: Final = 64 * MIB
UNIT_BYTES: Final = 16 * KIB
"""Bytes of the shortest cell."""
GENERATION_BYTES: Final = 8
F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; Python has no name for it before 3.13."""
SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
"""Seals that the engine puts on a slab."""
_SEALS_NEEDED: Final = fcntl.F_SEAL_SHRINK


def generation_number(slab: int, offset: int, slab_bytes: int) -> int:
    """Return the index of the generation of the cell at `offset` of a slab."""
    return (slab * slab_bytes + offset) // UNIT_BYTES


class _Arena(NamedTuple):
    """The generations and slabs of one engine that are mapped."""

    file: tuple[int, int]
    """Device and inode of the generations' memfd: it identifies the engine."""
    slab_bytes: int
    generations: memoryview
    slabs: dict[int, memoryview]


class Slabs:
    """The slabs of one engine that this client has mapped.  Used from any of the client's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: _Arena | None = None

    @property
    def arena(self) -> _Arena | None:
        """The current mappings; None when nothing is mapped."""
        return self._arena

    def missing(self, slabs: set[int]) -> list[int]:
        """Return the slabs of `slabs` that are not mapped, ascending."""
        arena = self._arena
        return sorted(slab for slab in slabs if arena is None or slab not in arena.slabs)

    def add(self, slabs: Sequence[int], descriptors: Sequence[int], slab_bytes: int) -> None:
        """Map the descriptors that the engine sent: one for each slab, then the one of the generations.

        Closes all descriptors.  Memory that is not sealed or too short is left out.  When the generations are those of
        another engine, the slabs mapped before are dropped: they belong to the engine before it.
        """
        held = list(zip(slabs, descriptors, strict=False))
        arena = _file_of(descriptors[len(held)]) if len(descriptors) > len(held) else None
        mapped = {slab: _mapped(descriptor, slab_bytes) for slab, descriptor in held}
        generations = _mapped(descriptors[len(held)], GENERATION_BYTES) if len(descriptors) > len(held) else None
        for descriptor in descriptors[len(held) + 1 :]:
            os.close(descriptor)
        if arena is None or generations is None:
            return
        size = len(generations) // GENERATION_BYTES * GENERATION_BYTES
        with self._lock:
            held_slabs = {} if self._arena is None or self._arena.file != arena else self._arena.slabs
            added = {slab: found for slab, found in mapped.items() if found is not None}
            self._arena = _Arena(arena, slab_bytes, generations[:size].cast("Q"), added | held_slabs)

    def is_current(self, grant: Grant) -> bool:
        """Return True if the cell still holds the granted chunk; False when its slab is not mapped."""
        arena = self._arena
        return arena is not None and _is_current(arena, grant)

    def view(self, grant: Grant, begin: int, length: int) -> memoryview:
        """Return a read-only view of the cell's bytes from `begin` on.  StaleGrant.

        Unless the chunk is pinned, they may become another chunk's at any time: call `is_current` after use.
        """
        return _view(self._arena, grant, begin, length)

    def copy(self, grant: Grant, begin: int, target: memoryview, behind: memoryview = NO_VECTOR) -> None:
        """Fill `target` with the cell's bytes from `begin` on, and `behind` with the bytes that follow.

        StaleGrant when the cell's generation is, or becomes during the copy, another than the grant's.
        """
        arena = self._arena
        found = _view(arena, grant, begin, len(target) + len(behind))
        target[:] = found[: len(target)]
        behind[:] = found[len(target) :]
        if arena is None or not _is_current(arena, grant):
            raise _stale(grant)

    def copy_place(self, place: int, offset: int, target: memoryview, behind: memoryview) -> bool:
        """Copy as `copy` does, from a place that an entry of the shared index names.

        Returns False when the cell holds something else by now, or is not mapped; the memory may then hold anything.
        """
        arena, (slab, generation) = self._arena, unpack_place(place)
        if arena is None:
            return False
        generations, memory = arena.generations, arena.slabs.get(slab)
        number = generation_number(slab, offset, arena.slab_bytes)
        end = offset + len(target)
        stop = end + len(behind)
        if memory is None or number >= len(generations) or stop > len(memory):
            return False
        if generation & 1 or generations[number] != generation:
            return False
        target[:] = memory[offset:end]
        if behind:
            behind[:] = memory[end:stop]
        return generations[number] == generation

    def drop(self) -> None:
        """Drop all slabs, as when the connection to their engine is lost; unmapped when no view of them is left."""
        with self._lock:
            self._arena = None

    def __len__(self) -> int:
        return 0 if self._arena is None else len(self._arena.slabs)


def _is_current(arena: _Arena, grant: Grant) -> bool:
    number = generation_number(grant.segment, grant.offset, arena.slab_bytes)
    return (
        grant.segment in arena.slabs
        and 0 <= number < len(arena.generations)
        and arena.generations[number] == grant.epoch
    )


def _view(arena: _Arena | None, grant: Grant, begin: int, length: int) -> memoryview:
    """Return the cell's bytes from `begin` on.  StaleGrant."""
    if arena is None or not _is_current(arena, grant):
        raise _stale(grant)
    found = arena.slabs[grant.segment]
    start = grant.offset + begin
    if begin < 0 or length < 0 or grant.offset < 0 or start + length > len(found):
        raise _stale(grant)
    return found[start : start + length]


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _mapped(descriptor: int, size_min: int) -> memoryview | None:
    """Map a descriptor read-only and close it; None when it is not sealed, too short, or cannot be mapped."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if seals & _SEALS_NEEDED != _SEALS_NEEDED or size < size_min:
            raise ValueError("not a sealed slab")
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _stale(grant: Grant) -> StaleGrant:
    return StaleGrant(f"cell {grant.offset} of slab {grant.segment} holds something else by now")
