"""Spans for Cython, and their way from and to Python's bytes; `span.h` has the rules."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t

cdef extern from "lakefs/host/span.h" nogil:
    ctypedef struct span:
        const uint8_t *at
        size_t length
    ctypedef uint64_t (*span_hash)(span) noexcept nogil


cdef inline bytes bytes_of(span text):
    return PyBytes_FromStringAndSize(<const char *>text.at, <Py_ssize_t>text.length)


cdef inline span span_of(bytes text) noexcept:
    """Return the bytes of an object, which are there as long as it."""
    cdef span made
    made.at = <const uint8_t *>PyBytes_AS_STRING(text)
    made.length = <size_t>PyBytes_GET_SIZE(text)
    return made
