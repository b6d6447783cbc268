"""CRC32C for Cython; `crc32c.h` has the rules."""

cdef extern from "lakefs/host/crc32c.h" nogil:
    void lake_crc32c_begin()
