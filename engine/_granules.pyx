# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""CRC32C of granules, native: the same as the twins of `engine.granules`, without the interpreter's lock.

A processor has the answer of one CRC instruction three cycles later, and begins another in each: so four granules are
gone through side by side.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t

import os

cdef extern from *:
    """
    #if !defined(__x86_64__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "the twin in Python serves here"
    #endif
    #include <nmmintrin.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/types.h>
    #include <unistd.h>

    #define GRANULE 65536
    #define LANES 4
    #define STEP_BYTES (LANES * GRANULE)
    #define BRIEF_BYTES (2 * GRANULE)  /* some microseconds, as giving the lock up and taking it costs */

    static inline uint64_t lake_word(const uint8_t *from) {
        uint64_t word;
        memcpy(&word, from, sizeof word);
        return word;
    }

    __attribute__((target("sse4.2")))
    static uint32_t lake_crc_of_one(const uint8_t *from, size_t length) {
        uint64_t crc = 0xFFFFFFFFu;
        size_t at = 0;
        for (; at + 8 <= length; at += 8)
            crc = _mm_crc32_u64(crc, lake_word(from + at));
        for (; at < length; at++)
            crc = _mm_crc32_u8((uint32_t)crc, from[at]);
        return ~(uint32_t)crc;
    }

    __attribute__((target("sse4.2")))
    static void lake_crc_of_four(const uint8_t *from, uint32_t *crcs) {
        uint64_t a = 0xFFFFFFFFu, b = a, c = a, d = a;
        for (size_t at = 0; at < GRANULE; at += 8) {
            a = _mm_crc32_u64(a, lake_word(from + at));
            b = _mm_crc32_u64(b, lake_word(from + GRANULE + at));
            c = _mm_crc32_u64(c, lake_word(from + 2 * GRANULE + at));
            d = _mm_crc32_u64(d, lake_word(from + 3 * GRANULE + at));
        }
        crcs[0] = ~(uint32_t)a;
        crcs[1] = ~(uint32_t)b;
        crcs[2] = ~(uint32_t)c;
        crcs[3] = ~(uint32_t)d;
    }

    static void lake_granule_crcs(const uint8_t *from, size_t length, uint32_t *crcs) {
        for (; length >= LANES * GRANULE; length -= LANES * GRANULE, from += LANES * GRANULE, crcs += LANES)
            lake_crc_of_four(from, crcs);
        while (length) {
            size_t one = length < GRANULE ? length : GRANULE;
            *crcs++ = lake_crc_of_one(from, one);
            from += one;
            length -= one;
        }
    }

    static int lake_has_crc(void) { return __builtin_cpu_supports("sse4.2"); }
    """
    enum:
        GRANULE
        STEP_BYTES
        BRIEF_BYTES
    void lake_granule_crcs(const uint8_t *source, size_t length, uint32_t *crcs) noexcept nogil
    int lake_has_crc()

cdef extern from "unistd.h" nogil:
    ssize_t pread(int descriptor, void *target, size_t length, int64_t offset)


if not lake_has_crc():
    raise ImportError("the processor has no instruction for CRC32C")


def granule_crcs(const uint8_t[::1] payload not None):
    """See `engine.granules.twin_granule_crcs`."""
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


def read_granules(int descriptor, int64_t offset, uint8_t[::1] target not None):
    """See `engine.granules.twin_read_granules`."""
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
            step = min(length - done, <size_t>STEP_BYTES)
            error = _fill(descriptor, offset + <int64_t>done, memory + done, step)
            if not error:
                # While the bytes are in the processor's cache.
                lake_granule_crcs(memory + done, step, found + done // GRANULE)
                done += step
    if error < 0:
        raise EOFError("the file ends before")
    if error:
        raise OSError(error, os.strerror(error))
    return crcs


cdef bytes _room_for(size_t length):
    return PyBytes_FromStringAndSize(NULL, 4 * ((length + GRANULE - 1) // GRANULE))


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
