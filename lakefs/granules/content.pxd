"""Shared content for Cython; `content.h` has the rules."""

from libc.stdint cimport uint8_t, uint64_t

from lakefs.granules.extent cimport lake_cells
from lakefs.granules.place cimport lake_place, lake_places
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
