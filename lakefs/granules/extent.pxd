"""Extents for Cython; `extent.h` has the rules."""

from libc.stdint cimport uint8_t, uint64_t

from lakefs.granules.place cimport lake_place

cdef extern from "lakefs/granules/extent.h" nogil:
    ctypedef struct lake_extent:
        pass

    ctypedef struct lake_cells:
        const uint64_t *generations
        uint64_t count
        uint64_t slab_bytes

    uint64_t lake_slab_of(const lake_place *place) noexcept
    bint lake_extent_of_cell(
        const lake_cells *cells, const uint8_t *slab, uint64_t slab_length, const lake_place *place, lake_extent *into
    ) noexcept
    bint lake_extent_copy(const lake_extent *source, uint64_t begin, size_t length, uint8_t *into) noexcept
