"""Granules for Cython; `granules.h` has the rules."""

from libc.stdint cimport uint8_t, uint32_t

cdef extern from "lakefs/granules/granules.h" nogil:
    enum:
        LAKE_GRANULE
        LAKE_SUMMED_AT_ONCE
    size_t lake_granule_count(size_t length) noexcept
    void lake_granule_crcs(const uint8_t *source, size_t length, uint32_t *crcs) noexcept
    void lake_granule_crcs_copied(const uint8_t *source, size_t length, uint8_t *target, uint32_t *crcs) noexcept
