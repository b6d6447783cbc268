# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""CRC32C of every granule (64 KiB) of a payload: of bytes in memory, and of bytes read into it."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t

import os

from lakefs.granules.granules cimport (
    LAKE_GRANULE,
    LAKE_SUMMED_AT_ONCE,
    lake_granule_count,
    lake_granule_crcs,
    lake_granule_crcs_copied,
)
from lakefs.host.crc32c cimport lake_crc32c_begin

cdef extern from *:
    """
    #define BRIEF_BYTES (2 * LAKE_GRANULE)  /* some microseconds, as giving the lock up and taking it costs */

    static void lake_granule_crcs_by_tables(const uint8_t *from, size_t length, uint32_t *crcs)
    {
        for (size_t at = 0; at < length; at += LAKE_GRANULE)
            *crcs++ = lake_crc32c_by_tables(from + at, length - at < LAKE_GRANULE ? length - at : LAKE_GRANULE);
    }
    """
    enum:
        BRIEF_BYTES
    void lake_granule_crcs_by_tables(const uint8_t *source, size_t length, uint32_t *crcs) noexcept nogil

cdef extern from "unistd.h" nogil:
    ssize_t pread(int descriptor, void *target, size_t length, int64_t offset)


lake_crc32c_begin()


def granule_crcs(const uint8_t[::1] payload not None):
    """CRC32C of every granule from the start of `payload`, 4 bytes each, little-endian; the last may be short."""
    cdef size_t length = payload.shape[0]
    if not length:
        return b""
    cdef const uint8_t *source = &payload[0]
    cdef bytes crcs = _room_for(length)
    cdef uint32_t *found = <uint32_t *>PyBytes_AS_STRING(crcs)
    if length <= BRIEF_BYTES:
        lake_granule_crcs(source, length, found)
    else:
        with nogil:
            lake_granule_crcs(source, length, found)
    return crcs


def copy_granules(const uint8_t[::1] source not None, uint8_t[::1] target not None):
    """Copy `source` to the start of `target`, and return `granule_crcs` of the copy; in one pass over the bytes."""
    cdef size_t length = source.shape[0]
    if length > <size_t>target.shape[0]:
        raise ValueError("the target is shorter than the source")
    if not length:
        return b""
    cdef bytes crcs = _room_for(length)
    cdef uint32_t *found = <uint32_t *>PyBytes_AS_STRING(crcs)
    with nogil:
        lake_granule_crcs_copied(&source[0], length, &target[0], found)
    return crcs


def granule_crcs_by_tables(const uint8_t[::1] payload not None):
    """`granule_crcs` as a processor without an instruction for CRC32C computes them."""
    cdef size_t length = payload.shape[0]
    cdef bytes crcs = _room_for(length)
    if length:
        lake_granule_crcs_by_tables(&payload[0], length, <uint32_t *>PyBytes_AS_STRING(crcs))
    return crcs


def read_granules(int descriptor, int64_t offset, uint8_t[::1] target not None):
    """Fill `target` from a file's `offset` on, and return `granule_crcs` of it.  Blocks, in any thread.

    EOFError when the file ends before, OSError; then anything may be in `target`.
    """
    cdef size_t length = target.shape[0]
    if not length:
        return b""
    cdef uint8_t *memory = &target[0]
    cdef bytes crcs = _room_for(length)
    cdef uint32_t *found = <uint32_t *>PyBytes_AS_STRING(crcs)
    cdef size_t done = 0
    cdef size_t step
    cdef int error = 0
    with nogil:
        while done < length and not error:
            step = min(length - done, <size_t>LAKE_SUMMED_AT_ONCE)
            error = _fill(descriptor, offset + <int64_t>done, memory + done, step)
            if not error:
                # While the bytes are in the processor's cache.
                lake_granule_crcs(memory + done, step, found + done // LAKE_GRANULE)
                done += step
    if error < 0:
        raise EOFError("the file ends before")
    if error:
        raise OSError(error, os.strerror(error))
    return crcs


cdef bytes _room_for(size_t length):
    return PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(4 * lake_granule_count(length)))


cdef int _fill(int descriptor, int64_t offset, uint8_t *target, size_t length) noexcept nogil:
    """0, the error's number, or -1 when the file ends before."""
    cdef size_t done = 0
    cdef ssize_t count
    while done < length:
        count = pread(descriptor, target + done, length - done, offset + <int64_t>done)
        if count == 0:
            return -1
        if count > 0:
            done += <size_t>count
        elif errno != EINTR:
            return errno
    return 0
