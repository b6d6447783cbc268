"""Places for Cython; `place.h` has the layout and the ports."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "lakefs/granules/place.h" nogil:
    enum:
        LAKE_GENERATION_BITS
        LAKE_ID_BYTES
        LAKE_TIER_DRAM
        LAKE_TIER_SEGMENT

    const char *LAKE_PLACES_CAPSULE
    const char *LAKE_SEEKER_CAPSULE

    ctypedef struct lake_place:
        uint64_t segment
        uint32_t offset
        uint32_t stored_bytes
        uint32_t crc
        uint32_t tier

    ctypedef struct lake_places:
        const void *table
        int (*find)(const void *, const uint8_t *, lake_place *) noexcept nogil

    ctypedef struct lake_seeker:
        const void *table
        void (*prefetch)(const void *, const uint8_t *) noexcept nogil
        int (*seek)(const void *, const uint8_t *, lake_place *) noexcept nogil
