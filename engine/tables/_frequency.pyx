# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""How often chunks were read lately: a count-min sketch with conservative update, halved now and then.

An estimate may be too high, when chunks share counters, and is never too low until counts are halved.  A row takes eight
bytes of the digest as they are: digests are uniform.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cdef extern from *:
    """
    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "digests are read as little-endian numbers"
    #endif
    """
    void __builtin_prefetch(const void *)

cdef enum:
    ROWS = 4
    BATCH = 64
    COUNT_MAX = 15
    DIGEST_BYTES = 32


cdef class Sketch:
    """Four rows of `width` counters (a power of two), halved each time that `sample` reads were counted.

    A read adds `step` to its counters, which end at 15: with a step above 1 a chunk that was read once is told from one
    that was read before, for as many halvings as the step has bits.
    """

    cdef uint8_t *_cells
    cdef uint64_t _mask
    cdef uint64_t _sample
    cdef uint64_t _counted
    cdef uint8_t _step
    cdef readonly uint64_t halvings

    def __cinit__(self, uint64_t width, uint64_t sample, uint8_t step=1):
        if width == 0 or width & (width - 1) or sample == 0:
            raise ValueError("a sketch is a power of two wide, and halved at times")
        if not 1 <= step <= COUNT_MAX:
            raise ValueError("a read adds 1 to 15")
        self._mask = width - 1
        self._sample = sample
        self._step = step
        self.halvings = 0
        self._counted = 0
        self._cells = <uint8_t *>calloc(ROWS, width)
        if self._cells == NULL:
            raise MemoryError("no memory for the counts of reads")

    def __dealloc__(self):
        free(self._cells)

    def halve_after(self, uint64_t sample):
        """Halve from now on each time that so many reads were counted."""
        if sample == 0:
            raise ValueError("a sketch is halved after a read at least")
        self._sample = sample

    def note(self, bytes chunk not None):
        """Count a read; about how many there were lately."""
        cdef uint8_t *cells[ROWS]
        self._find(chunk, cells)
        return self._note(cells)

    def note_many(self, list chunks not None):
        """Count a read of each; a byte for each says about how many there were lately."""
        cdef uint8_t *cells[BATCH][ROWS]
        cdef Py_ssize_t begin, i, length, total = len(chunks)
        cdef bytes counts = PyBytes_FromStringAndSize(NULL, total)
        cdef uint8_t *into = <uint8_t *>PyBytes_AS_STRING(counts)
        cdef int row
        for begin in range(0, total, BATCH):
            length = min(<Py_ssize_t>BATCH, total - begin)
            for i in range(length):
                self._find(<bytes?>chunks[begin + i], cells[i])
                for row in range(ROWS):
                    __builtin_prefetch(cells[i][row])
            for i in range(length):
                into[begin + i] = self._note(cells[i])
        return counts

    def estimate(self, bytes chunk not None):
        """About how many reads there were lately."""
        cdef uint8_t *cells[ROWS]
        self._find(chunk, cells)
        return _least(cells)

    cdef int _find(self, bytes chunk, uint8_t **cells) except -1:
        cdef uint64_t eighths[ROWS]
        cdef int row
        cdef Py_ssize_t length = PyBytes_GET_SIZE(chunk)
        if length < DIGEST_BYTES:
            raise ValueError("a chunk's id ends with its digest")
        memcpy(eighths, PyBytes_AS_STRING(chunk) + length - DIGEST_BYTES, DIGEST_BYTES)
        for row in range(ROWS):
            cells[row] = self._cells + <uint64_t>row * (self._mask + 1) + (eighths[row] & self._mask)
        return 0

    cdef uint8_t _note(self, uint8_t **cells) noexcept:
        cdef uint8_t least = _least(cells)
        cdef int row
        if least < COUNT_MAX:
            least = min(COUNT_MAX, least + self._step)
            for row in range(ROWS):
                if cells[row][0] < least:
                    cells[row][0] = least
        self._counted += 1
        if self._counted >= self._sample:
            self._halve()
        return least

    cdef void _halve(self) noexcept:
        cdef uint64_t at
        for at in range(ROWS * (self._mask + 1)):
            self._cells[at] >>= 1
        self._counted //= 2
        self.halvings += 1


cdef uint8_t _least(uint8_t **cells) noexcept:
    cdef uint8_t least = cells[0][0]
    cdef int row
    for row in range(1, ROWS):
        if cells[row][0] < least:
            least = cells[row][0]
    return least
