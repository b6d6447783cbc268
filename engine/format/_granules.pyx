# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""CRC32C of every granule (64 KiB) of a payload: of bytes in memory, and of bytes read into it.

A processor has the answer of one CRC instruction three cycles later, and begins another in each: so four granules are
gone through side by side.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t

import os

cdef extern from *:
    """
    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "the bytes of a store are little-endian"
    #endif
    #ifdef __x86_64__
    #include <nmmintrin.h>
    #endif
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

    /* Without an instruction for it: eight tables (Kounavis and Berry, "Slicing-by-8", 2005). */
    static uint32_t lake_tables[8][256];

    static void lake_make_tables(void) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; bit++)
                crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1)));
            lake_tables[0][i] = crc;
        }
        for (uint32_t i = 0; i < 256; i++)
            for (int slice = 1; slice < 8; slice++) {
                uint32_t crc = lake_tables[slice - 1][i];
                lake_tables[slice][i] = (crc >> 8) ^ lake_tables[0][crc & 255];
            }
    }

    static uint32_t lake_crc_by_tables(const uint8_t *from, size_t length) {
        uint32_t crc = 0xFFFFFFFFu;
        size_t at = 0;
        for (; at + 8 <= length; at += 8) {
            uint64_t word = lake_word(from + at) ^ crc;
            crc = 0;
            for (int slice = 0; slice < 8; slice++)
                crc ^= lake_tables[7 - slice][(word >> (8 * slice)) & 255];
        }
        for (; at < length; at++)
            crc = (crc >> 8) ^ lake_tables[0][(crc ^ from[at]) & 255];
        return ~crc;
    }

    static void lake_granules_by_tables(const uint8_t *from, size_t length, uint32_t *crcs) {
        for (size_t at = 0; at < length; at += GRANULE)
            *crcs++ = lake_crc_by_tables(from + at, length - at < GRANULE ? length - at : GRANULE);
    }

    #ifdef __x86_64__
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

    static void lake_granules_by_instruction(const uint8_t *from, size_t length, uint32_t *crcs) {
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
    #else
    static int lake_has_crc(void) { return 0; }
    #define lake_granules_by_instruction lake_granules_by_tables
    #endif

    static void (*lake_granule_crcs)(const uint8_t *, size_t, uint32_t *) = lake_granules_by_tables;

    static void lake_choose(void) {
        lake_make_tables();
        if (lake_has_crc())
            lake_granule_crcs = lake_granules_by_instruction;
    }
    """
    enum:
        GRANULE
        STEP_BYTES
        BRIEF_BYTES
    void lake_granule_crcs(const uint8_t *source, size_t length, uint32_t *crcs) noexcept nogil
    void lake_granules_by_tables(const uint8_t *source, size_t length, uint32_t *crcs) noexcept nogil
    void lake_choose()

cdef extern from "unistd.h" nogil:
    ssize_t pread(int descriptor, void *target, size_t length, int64_t offset)


lake_choose()


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


def granule_crcs_by_tables(const uint8_t[::1] payload not None):
    """`granule_crcs` as a processor without an instruction for CRC32C computes them."""
    cdef size_t length = payload.shape[0]
    cdef bytes crcs = _room_for(length)
    if length:
        lake_granules_by_tables(&payload[0], length, <uint32_t *>PyBytes_AS_STRING(crcs))
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
