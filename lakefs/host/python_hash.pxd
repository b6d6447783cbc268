"""Python's hash of bytes, for tables in C; `python_hash.h` has the rules."""

from libc.stdint cimport uint64_t

from lakefs.host.span cimport span

cdef extern from "lakefs/host/python_hash.h" nogil:
    uint64_t hash_by_python(span text) noexcept
