# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What a client knows about names, native: `known.h` has the table.

Rules kept here:
- The interpreter's lock is held in every function, from beginning to end: that is what makes each of them one step, and
  why no thread sees memory that another has freed.  A read of 256 KiB takes 60 us.
- Memory and descriptors that are used natively are kept by references in `held` for as long as they are in use.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.unicode cimport PyUnicode_Check
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from lakefs.granules.content cimport (
    content_drop_segments,
    content_forget,
    content_note_missing,
    content_table,
    content_use_places,
    content_use_segment,
    content_use_slabs,
)
from lakefs.granules.granules cimport LAKE_GRANULE
from lakefs.host.crc32c cimport lake_crc32c_begin
from lakefs.host.python_hash cimport hash_by_python
from lakefs.host.span cimport span, span_of
from lakefs.stamps.kept_answers cimport kept_answer, kept_answers, kept_begin, kept_end, kept_forget
from lakefs.stamps.stamps cimport LAKE_STAMPS_CAPSULE, lake_stamps

from lakefs.limits import KNOWN_CONTENT_BYTES_MAX

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    """

cdef extern from "known.h" nogil:
    enum:
        KNOWN_BYTES_EXPECTED
        KNOWN_CHUNK_BYTES
        KNOWN_CONTENT_MAX
    ctypedef struct known_answer:
        kept_answer kept
        uint64_t serial, size_bytes
        span stat
        bint has_content
        uint8_t chunk[KNOWN_CHUNK_BYTES]
    ctypedef struct known:
        kept_answers answers
        content_table content
        uint64_t answered
    const known_answer *known_standing(const known *, span name)
    int known_keep(known *, const known_answer *parts)
    int known_content(known *, const known_answer *, uint8_t *into)

cdef extern from *:
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *length)
    void PyErr_Clear()

lake_crc32c_begin()
assert KNOWN_CONTENT_MAX == KNOWN_CONTENT_BYTES_MAX


cdef inline bint is_name(object name, span *into):
    """Set `into` to the UTF-8 of a name, which lives as long as it; False for what has none."""
    cdef Py_ssize_t length
    cdef const char *at
    if not PyUnicode_Check(name):
        return False
    at = PyUnicode_AsUTF8AndSize(name, &length)
    if at == NULL:
        PyErr_Clear()
        return False
    into.at, into.length = <const uint8_t *>at, <size_t>length
    return True


@cython.no_gc_clear  # its parts are in use until it is freed
cdef class KnownTable:
    cdef known *at
    cdef dict held

    def __cinit__(self, uint64_t memory_bytes):
        self.held = {}
        self.at = <known *>calloc(1, sizeof(known))
        if self.at == NULL:
            raise MemoryError("no memory for names")
        content_drop_segments(&self.at.content)
        if not kept_begin(&self.at.answers, hash_by_python, memory_bytes, KNOWN_BYTES_EXPECTED):
            raise MemoryError("no memory for names")

    def __dealloc__(self):
        if self.at != NULL:
            kept_forget(&self.at.answers)
            kept_end(&self.at.answers)
            free(self.at)

    # --- what the engine shares ----------------------------------------------------------------------------------

    def use_stamps(self, reader not None):
        if self.at.answers.count:
            raise ValueError("what is known rests on other stamps")
        memcpy(&self.at.answers.stamps, PyCapsule_GetPointer(reader.native, LAKE_STAMPS_CAPSULE), sizeof(lake_stamps))
        self.held["stamps"] = reader

    def use_places(self, table not None):
        content_use_places(&self.at.content, table, self.held)

    def use_segment(self, uint64_t segment, int descriptor, int flags):
        return content_use_segment(&self.at.content, segment, descriptor, flags)

    def drop_segments(self):
        content_drop_segments(&self.at.content)

    def use_slabs(self, const uint8_t[::1] generations not None, uint64_t slab_bytes, dict slabs not None):
        content_use_slabs(&self.at.content, generations, slab_bytes, slabs, self.held)

    def forget(self):
        kept_forget(&self.at.answers)
        memset(&self.at.answers.stamps, 0, sizeof(lake_stamps))
        content_forget(&self.at.content, self.held)

    # --- learning ------------------------------------------------------------------------------------------------

    def learn(self, list answers not None):
        cdef bytes stamps, stat, chunk
        cdef uint64_t size_bytes
        cdef known_answer parts
        cdef bint is_found = True
        wanted = set()
        for name, stamps, stat, chunk, size_bytes in answers:
            memset(&parts, 0, sizeof(parts))
            if stamps is None or stat is None:
                raise TypeError("an answer has stamps and a stat")
            if not is_name(name, &parts.kept.key):
                continue
            parts.kept.stamps = span_of(stamps)
            parts.stat = span_of(stat)
            if chunk is not None and len(chunk) == KNOWN_CHUNK_BYTES and size_bytes <= KNOWN_CONTENT_MAX:
                parts.has_content = True
                parts.size_bytes = size_bytes
                memcpy(parts.chunk, PyBytes_AS_STRING(chunk), KNOWN_CHUNK_BYTES)
            if not known_keep(self.at, &parts) or not parts.size_bytes:
                continue
            is_found &= content_note_missing(&self.at.content, parts.chunk, wanted)
        return wanted, is_found

    # --- answering -----------------------------------------------------------------------------------------------

    cdef const known_answer *standing(self, object name) except? NULL:
        cdef span text
        return known_standing(self.at, text) if is_name(name, &text) else NULL

    def stat(self, name):
        cdef const known_answer *answer = self.standing(name)
        if answer == NULL:
            return None
        return PyBytes_FromStringAndSize(<const char *>answer.stat.at, answer.stat.length)

    def read(self, name, bint with_stat=False):
        cdef const known_answer *answer = self.standing(name)
        if answer == NULL or not answer.has_content or with_stat and answer.size_bytes > LAKE_GRANULE:
            return None
        content = PyBytes_FromStringAndSize(NULL, answer.size_bytes)
        if not known_content(self.at, answer, <uint8_t *>PyBytes_AS_STRING(content)):
            return None
        chunk = PyBytes_FromStringAndSize(<const char *>answer.chunk, KNOWN_CHUNK_BYTES)
        if not with_stat:
            return content, chunk
        return content, chunk, PyBytes_FromStringAndSize(<const char *>answer.stat.at, answer.stat.length)

    def read_many(self, list names not None, list found not None, uint64_t room_bytes, list targets=None):
        cdef const known_answer *answer
        cdef Py_ssize_t at, first = len(found)
        if targets is not None and len(targets) != len(names):
            raise ValueError("as many targets as names")
        for at in range(first, len(names)):
            answer = self.standing(names[at])
            if answer == NULL or not answer.has_content:
                found.append(None)
                continue
            if answer.size_bytes > room_bytes:
                return
            room_bytes -= answer.size_bytes
            if targets is None:
                content = PyBytes_FromStringAndSize(NULL, answer.size_bytes)
                is_read = known_content(self.at, answer, <uint8_t *>PyBytes_AS_STRING(content))
            else:
                content = answer.size_bytes
                is_read = self.fill(answer, targets[at])
            if not is_read:
                found.append(None)
                continue
            chunk = PyBytes_FromStringAndSize(<const char *>answer.chunk, KNOWN_CHUNK_BYTES)
            found.append((content, chunk, answer.serial))

    cdef bint fill(self, const known_answer *answer, object target) except -1:
        """Fill the beginning of memory with content; False if it is not at hand, or does not fit."""
        cdef Py_buffer memory
        PyObject_GetBuffer(target, &memory, PyBUF_WRITABLE)
        is_read = <uint64_t>memory.len >= answer.size_bytes and known_content(self.at, answer, <uint8_t *>memory.buf)
        PyBuffer_Release(&memory)
        return is_read

    def stand(self, list names not None, list found not None):
        cdef const known_answer *answer
        cdef Py_ssize_t at
        for at in range(min(len(names), len(found))):
            if found[at] is None:
                continue
            answer = self.standing(names[at])
            if answer == NULL or answer.serial != <uint64_t>found[at][2]:
                return False
        return True

    # --- counts --------------------------------------------------------------------------------------------------

    def count(self, uint64_t answered):
        self.at.answered += answered

    @property
    def counts(self):
        return self.at.answers.count, self.at.answers.held_bytes, self.at.answered
