"""Shared content for Cython; `content.h` has the rules.

The functions below are those of every native table that reads shared content (`lakefs.shares.shared_content`).  `held`
keeps what is used natively for as long as it is in use; descriptors are kept open by the caller.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

from lakefs.granules.extent cimport lake_cells, lake_slab_of
from lakefs.granules.place cimport LAKE_PLACES_CAPSULE, LAKE_TIER_SEGMENT, lake_place, lake_places
from lakefs.host.span cimport span

cdef extern from "lakefs/granules/content.h" nogil:
    enum:
        CONTENT_SEGMENTS
        CONTENT_SLABS

    ctypedef struct content_segment:
        uint64_t segment
        int descriptor
        int flags

    ctypedef struct content_table "content":
        lake_places places
        content_segment segments[CONTENT_SEGMENTS]
        span slabs[CONTENT_SLABS]
        lake_cells cells

    ctypedef enum content_where:
        CONTENT_AT_HAND
        CONTENT_WANTED
        CONTENT_NOWHERE

    const content_segment *content_find(content_table *, uint64_t segment) noexcept
    content_segment *content_room(content_table *, uint64_t segment) noexcept
    void content_drop_segments(content_table *) noexcept
    void content_drop_slabs(content_table *) noexcept
    content_where content_locate(content_table *, const uint8_t *chunk, lake_place *place) noexcept


cdef inline int content_use_places(content_table *into, object table, dict held) except -1:
    memcpy(&into.places, PyCapsule_GetPointer(table.native, LAKE_PLACES_CAPSULE), sizeof(lake_places))
    held["places"] = table
    return 0


cdef inline object content_use_segment(content_table *into, uint64_t segment, int descriptor, int flags):
    """Read a segment by this descriptor; return the segment whose place it took, or None."""
    cdef content_segment *slot
    if content_find(into, segment) != NULL:
        return segment
    slot = content_room(into, segment)
    before = slot.segment if slot.descriptor >= 0 else None
    slot.segment, slot.descriptor, slot.flags = segment, descriptor, flags
    return before


cdef inline int content_use_slabs(
    content_table *into, const uint8_t[::1] generations, uint64_t slab_bytes, dict slabs, dict held
) except -1:
    """Copy cells of these slabs, checked by these generations, and of no others."""
    cdef const uint8_t[::1] memory
    content_drop_slabs(into)
    if generations.shape[0] < 8:
        return 0
    in_use = [generations]
    for number, found in slabs.items():
        memory = found
        if 0 <= number < CONTENT_SLABS and memory.shape[0]:
            in_use.append(memory)
            into.slabs[<int>number].at = &memory[0]
            into.slabs[<int>number].length = memory.shape[0]
    held["slabs"] = in_use
    into.cells.generations = <const uint64_t *>&generations[0]
    into.cells.count = generations.shape[0] // 8
    into.cells.slab_bytes = slab_bytes
    return 0


cdef inline bint content_note_missing(content_table *of, const uint8_t *chunk, set wanted) except -1:
    """Add the segment or slab that has to be brought for a chunk, as (tier, number); False if the index lacks it."""
    cdef lake_place place
    where = content_locate(of, chunk, &place)
    if where == CONTENT_WANTED:
        wanted.add((place.tier, place.segment if place.tier == LAKE_TIER_SEGMENT else lake_slab_of(&place)))
    return where != CONTENT_NOWHERE


cdef inline int content_forget(content_table *of, dict held) except -1:
    content_drop_slabs(of)
    content_drop_segments(of)
    memset(&of.places, 0, sizeof(lake_places))
    held.clear()
    return 0
