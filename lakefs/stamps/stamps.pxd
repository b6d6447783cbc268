"""Stamps for Cython; `stamps.h` has the layout and the rules of readers."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from "lakefs/stamps/stamps.h" nogil:
    enum:
        LAKE_STAMPS_COUNTERS
        LAKE_STAMP_BYTES
        LAKE_STAMPS_NO_RIGHT

    const char *LAKE_STAMPS_CAPSULE

    ctypedef struct lake_stamps:
        const uint8_t *memory
        uint64_t count

    int lake_stamps_live(const lake_stamps *)
    uint64_t lake_stamps_right_end(const lake_stamps *)
    uint64_t lake_stamps_read(const lake_stamps *, uint64_t slot)
    bint lake_stamps_stand(const lake_stamps *, const uint8_t *set, uint64_t set_bytes)
