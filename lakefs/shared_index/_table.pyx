# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The shared index's table, native; `lakefs.shared_index.table` has the rules for readers and the writer.

`table.h` has what readers do in C, `table_writer.h` the changes, `packed_grants.h` the grants of answers.

Rule kept here besides:
- No step on the table runs Python code: a list cannot change while its ids are looked up.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from lakefs.shared_index.table_format import entries_max, is_capacity, stripe_shift, table_bytes

from lakefs.granules.place cimport LAKE_PLACES_CAPSULE, LAKE_SEEKER_CAPSULE, lake_place, lake_places, lake_seeker
from lakefs.host.crc32c cimport lake_crc32c_begin

cdef extern from "lakefs/shared_index/table.h":
    enum:
        LAKE_BATCH
        LAKE_ENTRIES_OFFSET
        LAKE_STRIPES_OFFSET

    ctypedef struct lake_entry:
        uint8_t kind
        uint8_t tier
        uint8_t digest[32]
        uint64_t segment
        uint32_t offset
        uint32_t stored_bytes
        uint32_t crc

    ctypedef struct lake_table:
        lake_entry *entries
        uint32_t *stripes
        uint64_t capacity
        uint64_t limit
        uint64_t count
        uint64_t dead
        int home_shift
        int stripe_shift

    void lake_prefetch(const lake_table *table, const uint8_t *chunk) nogil
    int lake_find(const lake_table *table, const uint8_t *chunk, lake_entry *found) nogil
    void lake_tell(const lake_entry *found, void *into) nogil
    int lake_find_place(const void *table, const uint8_t *chunk, lake_place *place) noexcept nogil
    int lake_seek_place(const void *table, const uint8_t *id, lake_place *place) noexcept nogil
    void lake_prefetch_place(const void *table, const uint8_t *id) noexcept nogil

cdef extern from "lakefs/shared_index/packed_grants.h":
    enum:
        LAKE_ARRAY_BYTES
        LAKE_GRANT_BYTES
    uint8_t *lake_pack_array(uint8_t *at, uint32_t length) nogil
    uint8_t *lake_pack_grant(uint8_t *at, const lake_entry *found) nogil

cdef extern from "lakefs/shared_index/table_writer.h":
    int lake_put(lake_table *table, const uint8_t *chunk, const lake_entry *wanted) nogil
    int lake_remove(lake_table *table, const uint8_t *chunk) nogil
    void lake_clear(lake_table *table) nogil
    int lake_audit(lake_table *table) nogil

cdef extern from *:
    void PyObject_GC_UnTrack(void *tracked)

lake_crc32c_begin()


cdef inline const uint8_t *id_bytes(object chunk) except NULL:
    """Return the 33 bytes of a well-formed id."""
    cdef const uint8_t *raw
    if not PyBytes_CheckExact(chunk) or PyBytes_GET_SIZE(chunk) != 33:
        raise ValueError("an id has 33 bytes and a kind that is known")
    raw = <const uint8_t *>PyBytes_AS_STRING(chunk)
    if raw[0] != 1 and raw[0] != 2:
        raise ValueError("an id has 33 bytes and a kind that is known")
    return raw


cdef inline tuple found_tuple(const lake_entry *found):
    cdef tuple place = (found.tier, found.segment, found.offset, found.stored_bytes, found.crc)
    PyObject_GC_UnTrack(<void *>place)  # numbers only: the collector need not track it
    return place


cdef class SharedTable:
    """A table in memory that the caller maps; over read-only memory it only finds."""

    cdef lake_table table
    cdef lake_places port
    cdef lake_seeker seeker_port
    cdef Py_buffer memory
    cdef bint is_held
    cdef bint is_writable

    def __cinit__(self, memory, unsigned long long capacity):
        self.is_held = False
        if not is_capacity(capacity):
            raise ValueError(f"a table has no {capacity} slots")
        with memoryview(memory) as view:
            self.is_writable = not view.readonly
        PyObject_GetBuffer(memory, &self.memory, PyBUF_WRITABLE if self.is_writable else PyBUF_SIMPLE)
        self.is_held = True
        if self.memory.len < table_bytes(capacity):
            raise ValueError(f"{self.memory.len} bytes are too few for a table of {capacity} slots")
        if <size_t>self.memory.buf % 8:
            raise ValueError("a table begins at a multiple of 8")
        self.table.entries = <lake_entry *>(<char *>self.memory.buf + LAKE_ENTRIES_OFFSET)
        self.table.stripes = <uint32_t *>(<char *>self.memory.buf + LAKE_STRIPES_OFFSET)
        self.table.capacity = capacity
        self.table.limit = entries_max(capacity)
        self.table.count = self.table.dead = 0
        self.table.home_shift = 65 - int(capacity).bit_length()
        self.table.stripe_shift = stripe_shift(capacity)
        self.port.table = &self.table
        self.port.find = lake_find_place
        self.seeker_port.table = &self.table
        self.seeker_port.prefetch = lake_prefetch_place
        self.seeker_port.seek = lake_seek_place

    def __dealloc__(self):
        if self.is_held:
            PyBuffer_Release(&self.memory)

    @property
    def capacity(self):
        """Count of homes."""
        return self.table.capacity

    @property
    def count(self):
        """Count of chunks that this writer put, or `audit` found."""
        return self.table.count

    @property
    def dead(self):
        """Count of slots lost to entries marked dead."""
        return self.table.dead

    @property
    def native(self):
        """A capsule by which other native modules look places up (`lakefs/granules/place.h`); valid as long as this object."""
        return PyCapsule_New(&self.port, LAKE_PLACES_CAPSULE, NULL)

    @property
    def seeker(self):
        """A capsule by which other native modules learn also what is not present (`lakefs/granules/place.h`); as `native`."""
        return PyCapsule_New(&self.seeker_port, LAKE_SEEKER_CAPSULE, NULL)

    def find(self, chunk):
        """Return the chunk's place; None when it is not known here."""
        cdef lake_entry found
        if lake_find(&self.table, id_bytes(chunk), &found):
            return found_tuple(&found)
        return None

    def find_many(self, list chunks not None):
        """Return `find` of each chunk, in order."""
        cdef lake_entry found[LAKE_BATCH]
        cdef const uint8_t *ids[LAKE_BATCH]
        cdef bint known[LAKE_BATCH]
        cdef Py_ssize_t begin, i, length, total = PyList_GET_SIZE(chunks)
        cdef list results = [None] * total
        for begin in range(0, total, LAKE_BATCH):
            length = min(<Py_ssize_t>LAKE_BATCH, PyList_GET_SIZE(chunks) - begin)
            for i in range(length):
                ids[i] = id_bytes(<object>PyList_GET_ITEM(chunks, begin + i))
                lake_prefetch(&self.table, ids[i])
            for i in range(length):
                known[i] = lake_find(&self.table, ids[i], &found[i])
            for i in range(length):
                if known[i]:
                    results[begin + i] = found_tuple(&found[i])
        return results

    def find_packed(self, list chunks not None, into not None):
        """Write a `lakefs.shared_index.table_format.PLACE` for each chunk into `into`; return the count found.

        Tier 0: not known.  Makes no Python objects.
        """
        cdef lake_entry found[LAKE_BATCH]
        cdef const uint8_t *ids[LAKE_BATCH]
        cdef Py_buffer target
        cdef lake_place *place
        cdef Py_ssize_t begin, i, length, count = 0, total = PyList_GET_SIZE(chunks)
        PyObject_GetBuffer(into, &target, PyBUF_WRITABLE)
        try:
            if target.len < total * <Py_ssize_t>sizeof(lake_place):
                raise ValueError("there is no room for so many places")
            place = <lake_place *>target.buf
            for begin in range(0, total, LAKE_BATCH):
                length = min(<Py_ssize_t>LAKE_BATCH, total - begin)
                for i in range(length):
                    ids[i] = id_bytes(<object>PyList_GET_ITEM(chunks, begin + i))
                    lake_prefetch(&self.table, ids[i])
                for i in range(length):
                    if lake_find(&self.table, ids[i], &found[0]):
                        lake_tell(&found[0], place)
                        count += 1
                    else:
                        memset(place, 0, sizeof(lake_place))
                    place += 1
        finally:
            PyBuffer_Release(&target)
        return count

    def pack_grants(self, list chunks not None, list instead=None):
        """Return grants of chunks in msgpack, as an answer has them, and the length of the shortest chunk.

        None unless all chunks are known, in segments or slabs.  A place that `instead` has for a chunk is used without
        a lookup.
        """
        cdef lake_entry found
        cdef const uint8_t *ids[LAKE_BATCH]
        cdef uint8_t *packed
        cdef uint8_t *at
        cdef PyObject *given
        cdef uint32_t shortest = 0xFFFFFFFF
        cdef Py_ssize_t begin, i, length, total = PyList_GET_SIZE(chunks)
        if instead is not None and PyList_GET_SIZE(instead) != total:
            raise ValueError("as many chunks as places in their stead")
        packed = <uint8_t *>malloc(LAKE_ARRAY_BYTES + total * LAKE_GRANT_BYTES)
        if packed == NULL:
            raise MemoryError("no memory for the grants of an answer")
        try:
            at = lake_pack_array(packed, <uint32_t>total)
            for begin in range(0, total, LAKE_BATCH):
                length = min(<Py_ssize_t>LAKE_BATCH, total - begin)
                for i in range(length):
                    ids[i] = id_bytes(<object>PyList_GET_ITEM(chunks, begin + i))
                    lake_prefetch(&self.table, ids[i])
                for i in range(length):
                    given = <PyObject *>None if instead is None else PyList_GET_ITEM(instead, begin + i)
                    if given != <PyObject *>None:
                        found.tier, found.segment, found.offset, found.stored_bytes, found.crc = <object>given
                    elif not lake_find(&self.table, ids[i], &found):
                        return None
                    at = lake_pack_grant(at, &found)
                    if at == NULL:
                        return None
                    shortest = min(shortest, found.stored_bytes)
            return PyBytes_FromStringAndSize(<char *>packed, at - packed), shortest
        finally:
            free(packed)

    def put(
        self,
        chunk,
        unsigned char tier,
        unsigned long long segment,
        unsigned int offset,
        unsigned int stored_bytes,
        unsigned int crc,
    ):
        """Put or replace the chunk's entry; return False when the table has no room for it."""
        cdef lake_entry wanted
        cdef const uint8_t *raw = id_bytes(chunk)
        self.check_writable()
        memset(&wanted, 0, sizeof(wanted))
        wanted.kind = raw[0]
        wanted.tier = tier
        memcpy(wanted.digest, raw + 1, 32)
        wanted.segment = segment
        wanted.offset = offset
        wanted.stored_bytes = stored_bytes
        wanted.crc = crc
        return bool(lake_put(&self.table, raw, &wanted))

    def remove(self, chunk):
        """Remove the chunk; return True if it was present."""
        cdef const uint8_t *raw = id_bytes(chunk)
        self.check_writable()
        return bool(lake_remove(&self.table, raw))

    def clear(self):
        """Remove all chunks."""
        self.check_writable()
        with nogil:
            lake_clear(&self.table)

    def audit(self):
        """Return True if every entry is whole and in its place; sets `count` and `dead`.  Releases the GIL."""
        cdef int is_good
        with nogil:
            is_good = lake_audit(&self.table)
        return bool(is_good)

    cdef int check_writable(self) except -1:
        if not self.is_writable:
            raise TypeError("the table is read-only")
        return 0
