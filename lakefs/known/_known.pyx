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

from lakefs.limits import KNOWN_CONTENT_BYTES_MAX

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    """

cdef extern from "known.h" nogil:
    enum:
        CONTENT_SEGMENTS
        CONTENT_SLABS
        GRANULE_BYTES
        KNOWN_BYTES_EXPECTED
        KNOWN_CHUNK_BYTES
        KNOWN_CONTENT_MAX
        LAKE_TIER_SEGMENT
        CONTENT_GENERATION_BITS
    const char *LAKE_PLACES_CAPSULE
    const char *LAKE_STAMPS_CAPSULE
    ctypedef struct span:
        const uint8_t *at
        size_t length
    ctypedef struct lake_place:
        uint64_t segment
        uint32_t tier
    ctypedef struct lake_places:
        pass
    ctypedef struct lake_stamps:
        pass
    bint lake_stamps_stand(const lake_stamps *, const uint8_t *set, uint64_t set_bytes)
    ctypedef struct content_segment:
        uint64_t segment
        int descriptor, flags
    ctypedef struct content_table "content":
        lake_places places
        content_segment segments[512]
        span slabs[4096]
        const uint64_t *generations
        uint64_t generation_count, slab_bytes
    ctypedef struct kept_answer:
        span key, stamps
    ctypedef uint64_t (*span_hash)(span) noexcept nogil
    ctypedef struct kept_answers:
        lake_stamps stamps
        uint64_t held_bytes, count
    int kept_begin(kept_answers *, span_hash, uint64_t limit_bytes, uint64_t expected_bytes)
    void kept_forget(kept_answers *)
    void kept_end(kept_answers *)
    ctypedef struct known_answer:
        kept_answer kept
        uint64_t serial, size_bytes
        span stat
        bint has_content
        uint8_t chunk[33]
    ctypedef struct known:
        kept_answers answers
        content_table content
        uint64_t answered
    void lake_crc32c_begin()
    const known_answer *known_standing(const known *, span name)
    int known_keep(known *, const known_answer *parts)
    int known_content(known *, const known_answer *, uint8_t *into)
    ctypedef enum known_where:
        KNOWN_AT_HAND
        KNOWN_WANTED
        KNOWN_NOWHERE
    known_where known_locate(known *, const uint8_t *chunk, lake_place *place)
    const content_segment *content_find(content_table *, uint64_t segment)
    content_segment *content_room(content_table *, uint64_t segment)

cdef extern from *:
    """
    static uint64_t hash_by_python(span text)
    {
        return (uint64_t)PyHash_GetFuncDef()->hash(text.at, (Py_ssize_t)text.length);
    }
    """
    uint64_t hash_by_python(span text) noexcept nogil
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *length)
    void PyErr_Clear()

lake_crc32c_begin()
assert KNOWN_CONTENT_MAX == KNOWN_CONTENT_BYTES_MAX


cdef inline span span_of(bytes text) noexcept:
    cdef span made
    made.at = <const uint8_t *>PyBytes_AS_STRING(text)
    made.length = <size_t>PyBytes_GET_SIZE(text)
    return made


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
        cdef int slot
        self.held = {}
        self.at = <known *>calloc(1, sizeof(known))
        if self.at == NULL:
            raise MemoryError("no memory for names")
        for slot in range(CONTENT_SEGMENTS):
            self.at.content.segments[slot].descriptor = -1
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
        memcpy(&self.at.content.places, PyCapsule_GetPointer(table.native, LAKE_PLACES_CAPSULE), sizeof(lake_places))
        self.held["places"] = table

    def use_segment(self, uint64_t segment, int descriptor, int flags):
        cdef content_segment *slot
        if content_find(&self.at.content, segment) != NULL:
            return segment
        slot = content_room(&self.at.content, segment)
        before = slot.segment if slot.descriptor >= 0 else None
        slot.segment, slot.descriptor, slot.flags = segment, descriptor, flags
        return before

    def drop_segments(self):
        cdef int slot
        for slot in range(CONTENT_SEGMENTS):
            self.at.content.segments[slot].descriptor = -1

    def use_slabs(self, const uint8_t[::1] generations not None, uint64_t slab_bytes, dict slabs not None):
        cdef const uint8_t[::1] memory
        self.drop_slabs()
        if generations.shape[0] < 8:
            return
        held = [generations]
        for number, found in slabs.items():
            memory = found
            if 0 <= number < CONTENT_SLABS and memory.shape[0]:
                held.append(memory)
                self.at.content.slabs[<int>number].at = &memory[0]
                self.at.content.slabs[<int>number].length = memory.shape[0]
        self.held["slabs"] = held
        self.at.content.generations = <const uint64_t *>&generations[0]
        self.at.content.generation_count = generations.shape[0] // 8
        self.at.content.slab_bytes = slab_bytes

    cdef void drop_slabs(self) noexcept:
        self.at.content.generations = NULL
        self.at.content.generation_count = 0
        memset(self.at.content.slabs, 0, sizeof(self.at.content.slabs))

    def forget(self):
        kept_forget(&self.at.answers)
        self.drop_slabs()
        self.drop_segments()
        memset(&self.at.answers.stamps, 0, sizeof(lake_stamps))
        memset(&self.at.content.places, 0, sizeof(lake_places))
        self.held.clear()

    # --- learning ------------------------------------------------------------------------------------------------

    def learn(self, list answers not None):
        cdef bytes stamps, stat, chunk
        cdef uint64_t size_bytes
        cdef known_answer parts
        cdef lake_place place
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
            where = known_locate(self.at, parts.chunk, &place)
            if where == KNOWN_NOWHERE:
                is_found = False
            elif where == KNOWN_WANTED:
                is_segment = place.tier == LAKE_TIER_SEGMENT
                number = place.segment if is_segment else place.segment >> CONTENT_GENERATION_BITS
                wanted.add((place.tier, number))
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
        if answer == NULL or not answer.has_content or with_stat and answer.size_bytes > GRANULE_BYTES:
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
