# cython: language_level=3, boundscheck=False, wraparound=False
"""Writes cache lines back to memory that outlives a power failure, for which no system call does it (x86-64 only).

`clflush` is on every x86-64 and is ordered with stores to the same line (Intel SDM, volume 2A); the fence behind it
orders all of them before what follows.
"""

cdef extern from * nogil:
    """
    #include <stddef.h>
    #if defined(__x86_64__)
    #include <emmintrin.h>
    #define LAKE_WRITES_BACK 1
    static void lake_write_back(const unsigned char *memory, size_t length) {
        const unsigned char *line = (const unsigned char *)((size_t)memory & ~(size_t)63);
        for (; line < memory + length; line += 64) {
            _mm_clflush(line);
        }
        _mm_mfence();
    }
    #else
    #define LAKE_WRITES_BACK 0
    static void lake_write_back(const unsigned char *memory, size_t length) { (void)memory; (void)length; }
    #endif
    """
    const int LAKE_WRITES_BACK
    void lake_write_back(const unsigned char *memory, size_t length)

CAN_WRITE_BACK = bool(LAKE_WRITES_BACK)


def write_back(const unsigned char[::1] memory not None):
    """Write all cache lines of the memory back; durable on return if the memory itself is.  Releases the lock."""
    if memory.shape[0]:
        with nogil:
            lake_write_back(&memory[0], <size_t>memory.shape[0])
