# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The shared index's table, native; `lakefs.shared_index.table` has the rules for readers and the writer.

Rules kept here besides:
- A reader copies each entry whole, with atomic loads, into memory of its own: nothing is decided on bytes that can
  still change.
- No step on the table runs Python code: a list cannot change while its ids are looked up.
- Each loop is bounded by a constant, whatever the table's bytes are.
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

from lakefs.shared_index.table_format import entries_max, is_capacity, stripe_shift, table_bytes

cdef extern from *:
    """
    #include "../host/crc32c.h"
    #include "place.h"
    #include <stddef.h>
    #include <string.h>

    #define LAKE_PROBE_SLOTS 64
    #define LAKE_SHIFT_SLOTS 1024
    #define LAKE_STRIPES 4096
    #define LAKE_STRIPES_OFFSET 4096
    #define LAKE_ENTRIES_OFFSET (LAKE_STRIPES_OFFSET + 4 * LAKE_STRIPES)
    #define LAKE_VACANT 0
    #define LAKE_DEAD 255
    #define LAKE_ATTEMPTS 8
    #define LAKE_BATCH 64

    typedef union {
        struct {
            uint32_t version;
            uint8_t kind, tier;
            uint16_t distance;
            uint8_t digest[32];
            uint64_t segment;
            uint32_t offset, stored_bytes, crc, check;
        };
        uint32_t halves[16];
        uint64_t words[8];
    } lake_entry;
    _Static_assert(sizeof(lake_entry) == 64, "an entry is a cache line");

    typedef struct {
        lake_entry *entries;
        uint32_t *stripes;
        uint64_t capacity, limit, count, dead;
        int home_shift, stripe_shift;
    } lake_table;

    static inline uint32_t lake_crc(const lake_entry *entry)
    {
        return lake_crc32c((const uint8_t *)entry, offsetof(lake_entry, check));
    }

    static inline void lake_pause(void)
    {
    #if defined(__x86_64__)
        __builtin_ia32_pause();
    #endif
    }

    static inline uint64_t lake_home(const lake_table *table, const uint8_t *digest)
    {
        uint64_t head;
        memcpy(&head, digest, 8);
        return head >> table->home_shift;
    }

    static inline void lake_prefetch(const lake_table *table, const uint8_t *chunk)
    {
        const lake_entry *entry = table->entries + lake_home(table, chunk + 1);
        __builtin_prefetch(entry);
        __builtin_prefetch(entry + 1);
    }

    static inline uint32_t *lake_stripe(const lake_table *table, uint64_t slot)
    {
        uint64_t stripe = slot >> table->stripe_shift;
        return table->stripes + (stripe < LAKE_STRIPES ? stripe : LAKE_STRIPES - 1);
    }

    /* --- readers --------------------------------------------------------------------------------- */

    /* Loads an entry; returns 1 if it was loaded whole. */
    static inline int lake_load(const lake_entry *at, lake_entry *into)
    {
        uint32_t version = __atomic_load_n(&at->version, __ATOMIC_ACQUIRE);
        for (int i = 0; i < 8; i++)
            into->words[i] = __atomic_load_n(at->words + i, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return !(version & 1) && into->version == version
            && __atomic_load_n(&at->version, __ATOMIC_RELAXED) == version;
    }

    /* Returns 1 found, 0 not present, -1 changed during the lookup.

       An entry's first word is its version, kind, tier and distance in one: if it is even, it is that of a complete
       entry.  The second word begins the digest; only an entry that matches there is loaded whole. */
    static inline int lake_look(const lake_table *table, const uint8_t *chunk, uint64_t home, lake_entry *found)
    {
        const lake_entry *at = table->entries + home;
        uint64_t head;
        memcpy(&head, chunk + 1, 8);
        for (uint64_t distance = 0; distance < LAKE_PROBE_SLOTS; distance++, at++) {
            uint64_t first = __atomic_load_n(at->words, __ATOMIC_ACQUIRE);
            if (first & 1)
                return -1;
            if (((first >> 32) & 255) == LAKE_VACANT || first >> 48 < distance)
                return 0;
            if (__atomic_load_n(at->words + 1, __ATOMIC_RELAXED) != head)
                continue;
            if (!lake_load(at, found))
                return -1;
            if (found->kind == chunk[0] && !memcmp(found->digest, chunk + 1, 32))
                return lake_crc(found) == found->check ? 1 : -1;
        }
        return 0;
    }

    /* Returns 1 found, 0 not present at a moment of the call, -1: it cannot be told. */
    static int lake_seek(const lake_table *table, const uint8_t *chunk, lake_entry *found)
    {
        uint64_t home = lake_home(table, chunk + 1);
        uint32_t *first = lake_stripe(table, home);
        uint32_t *last = lake_stripe(table, home + LAKE_PROBE_SLOTS - 1);
        for (int attempt = 0; attempt < LAKE_ATTEMPTS; attempt++) {
            uint32_t first_before = __atomic_load_n(first, __ATOMIC_ACQUIRE);
            uint32_t last_before = __atomic_load_n(last, __ATOMIC_ACQUIRE);
            int seen = lake_look(table, chunk, home, found);
            if (seen == 1)
                return 1;
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (seen == 0 && !((first_before | last_before) & 1)
                && first_before == __atomic_load_n(first, __ATOMIC_RELAXED)
                && last_before == __atomic_load_n(last, __ATOMIC_RELAXED))
                return 0;
            lake_pause();
        }
        return -1;
    }

    static inline int lake_find(const lake_table *table, const uint8_t *chunk, lake_entry *found)
    {
        return lake_seek(table, chunk, found) == 1;
    }

    static inline void lake_tell(const lake_entry *found, void *into)
    {
        lake_place place = {found->segment, found->offset, found->stored_bytes, found->crc, found->tier};
        memcpy(into, &place, sizeof(place));
    }

    /* The ports for other native modules. */
    static int lake_find_place(const void *table, const uint8_t *chunk, lake_place *place)
    {
        lake_entry found;
        if (!lake_find(table, chunk, &found))
            return 0;
        lake_tell(&found, place);
        return 1;
    }

    static int lake_seek_place(const void *table, const uint8_t *id, lake_place *place)
    {
        lake_entry found;
        int seen = lake_seek(table, id, &found);
        if (seen == 1)
            lake_tell(&found, place);
        return seen;
    }

    static void lake_prefetch_place(const void *table, const uint8_t *id)
    {
        lake_prefetch(table, id);
    }

    /* --- places as the grants of an answer (msgpack; `lakefs.wire.grants.Grant`) ---------------- */

    #define LAKE_GRANT_BYTES 35  /* at most: array 1, tier 1, slab 3 and generation 9, four numbers of 5, a zero */
    #define LAKE_ARRAY_BYTES 5

    static inline uint8_t *lake_pack_number(uint8_t *at, uint64_t number)
    {
        if (number < 0x80) {
            *at++ = (uint8_t)number;
        } else if (number <= 0xff) {
            *at++ = 0xcc;
            *at++ = (uint8_t)number;
        } else if (number <= 0xffff) {
            uint16_t big = __builtin_bswap16((uint16_t)number);
            *at++ = 0xcd;
            memcpy(at, &big, 2);
            at += 2;
        } else if (number <= 0xffffffffu) {
            uint32_t big = __builtin_bswap32((uint32_t)number);
            *at++ = 0xce;
            memcpy(at, &big, 4);
            at += 4;
        } else {
            uint64_t big = __builtin_bswap64(number);
            *at++ = 0xcf;
            memcpy(at, &big, 8);
            at += 8;
        }
        return at;
    }

    static uint8_t *lake_pack_array(uint8_t *at, uint32_t length)
    {
        if (length < 16) {
            *at++ = (uint8_t)(0x90 | length);
        } else if (length <= 0xffff) {
            uint16_t big = __builtin_bswap16((uint16_t)length);
            *at++ = 0xdc;
            memcpy(at, &big, 2);
            at += 2;
        } else {
            uint32_t big = __builtin_bswap32(length);
            *at++ = 0xdd;
            memcpy(at, &big, 4);
            at += 4;
        }
        return at;
    }

    /* Packs one grant; returns its end, or NULL for a tier that grants do not have. */
    static inline uint8_t *lake_pack_grant(uint8_t *at, const lake_entry *found)
    {
        uint64_t segment = found->segment, generation = 0;
        if (found->tier == LAKE_TIER_DRAM) {
            segment = found->segment >> LAKE_GENERATION_BITS;
            generation = found->segment & ((UINT64_C(1) << LAKE_GENERATION_BITS) - 1);
        } else if (found->tier != LAKE_TIER_SEGMENT) {
            return NULL;
        }
        *at++ = 0x98;
        at = lake_pack_number(at, found->tier);
        at = lake_pack_number(at, segment);
        at = lake_pack_number(at, found->offset);
        at = lake_pack_number(at, found->stored_bytes);
        at = lake_pack_number(at, found->stored_bytes);
        *at++ = 0;
        at = lake_pack_number(at, found->crc);
        return lake_pack_number(at, generation);
    }

    /* --- the writer: it alone changes the table, so it reads entries without atomic loads --------- */

    static void lake_write(lake_entry *at, const lake_entry *wanted, uint64_t distance)
    {
        lake_entry entry = *wanted;
        entry.version = at->version + 2;
        entry.distance = (uint16_t)distance;
        entry.check = entry.kind == LAKE_VACANT ? 0 : lake_crc(&entry);
        __atomic_store_n(&at->version, at->version | 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        __atomic_store_n(at->halves + 1, entry.halves[1], __ATOMIC_RELAXED);
        for (int i = 1; i < 8; i++)
            __atomic_store_n(at->words + i, entry.words[i], __ATOMIC_RELAXED);
        __atomic_store_n(&at->version, entry.version, __ATOMIC_RELEASE);
    }

    static void lake_turn_stripes(lake_table *table, uint64_t first_slot, uint64_t last_slot)
    {
        uint32_t *last = lake_stripe(table, last_slot);
        for (uint32_t *stripe = lake_stripe(table, first_slot); stripe <= last; stripe++)
            __atomic_store_n(stripe, *stripe + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }

    /* Finds the slot of the chunk (returns 1), or the slot where it belongs (0): home + LAKE_PROBE_SLOTS is none. */
    static int lake_search(const lake_table *table, const uint8_t *chunk, uint64_t home, uint64_t *slot)
    {
        for (uint64_t distance = 0; distance < LAKE_PROBE_SLOTS; distance++) {
            const lake_entry *entry = table->entries + home + distance;
            *slot = home + distance;
            if (entry->kind == LAKE_VACANT || entry->distance < distance)
                return 0;
            if (entry->kind == chunk[0] && !memcmp(entry->digest, chunk + 1, 32))
                return 1;
        }
        *slot = home + LAKE_PROBE_SLOTS;
        return 0;
    }

    /* Counts slots from `slot` to the empty one behind its run; -1: one is too far from home, or they are too many. */
    static int lake_run(const lake_table *table, uint64_t slot)
    {
        for (int length = 0; length < LAKE_SHIFT_SLOTS; length++) {
            const lake_entry *entry = table->entries + slot + length;
            if (entry->kind == LAKE_VACANT)
                return length;
            if (entry->distance + 1 >= LAKE_PROBE_SLOTS)
                return -1;
        }
        return -1;
    }

    static int lake_put(lake_table *table, const uint8_t *chunk, const lake_entry *wanted)
    {
        uint64_t home = lake_home(table, chunk + 1), slot;
        int is_present = lake_search(table, chunk, home, &slot);
        if (!is_present) {
            if (slot == home + LAKE_PROBE_SLOTS || table->count + table->dead >= table->limit)
                return 0;
            int length = lake_run(table, slot);
            if (length < 0)
                return 0;
            for (lake_entry *at = table->entries + slot + length; at > table->entries + slot; at--)
                lake_write(at, at - 1, at[-1].distance + 1);
            table->count++;
        }
        lake_write(table->entries + slot, wanted, slot - home);
        return 1;
    }

    static int lake_remove(lake_table *table, const uint8_t *chunk)
    {
        static const lake_entry vacant;
        uint64_t home = lake_home(table, chunk + 1), slot;
        if (!lake_search(table, chunk, home, &slot))
            return 0;
        table->count--;
        uint64_t end = slot + 1;
        while (table->entries[end].kind != LAKE_VACANT && table->entries[end].distance) {
            if (++end - slot > LAKE_SHIFT_SLOTS) {
                lake_entry dead = vacant;
                dead.kind = LAKE_DEAD;
                memcpy(dead.digest, chunk + 1, 32);
                lake_write(table->entries + slot, &dead, slot - home);
                table->dead++;
                return 1;
            }
        }
        lake_turn_stripes(table, slot, end - 1);
        for (lake_entry *at = table->entries + slot; at < table->entries + end - 1; at++)
            lake_write(at, at + 1, at[1].distance - 1);
        lake_write(table->entries + end - 1, &vacant, 0);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        lake_turn_stripes(table, slot, end - 1);
        return 1;
    }

    static void lake_clear(lake_table *table)
    {
        static const lake_entry vacant;
        uint64_t slots = table->capacity + LAKE_PROBE_SLOTS;
        lake_turn_stripes(table, 0, slots - 1);
        for (uint64_t slot = 0; slot < slots; slot++)
            if (table->entries[slot].kind != LAKE_VACANT)
                lake_write(table->entries + slot, &vacant, 0);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        lake_turn_stripes(table, 0, slots - 1);
        table->count = table->dead = 0;
    }

    static int lake_audit(lake_table *table)
    {
        uint64_t count = 0, dead = 0, slots = table->capacity + LAKE_PROBE_SLOTS;
        int64_t before = -1;
        for (uint64_t slot = 0; slot < slots; slot++) {
            const lake_entry *entry = table->entries + slot;
            if (entry->version & 1)
                return 0;
            if (entry->kind == LAKE_VACANT) {
                before = -1;
                continue;
            }
            if (entry->distance > before + 1 || entry->distance >= LAKE_PROBE_SLOTS
                || lake_home(table, entry->digest) + entry->distance != slot || lake_crc(entry) != entry->check)
                return 0;
            if (entry->kind == LAKE_DEAD)
                dead++;
            else if (entry->kind == 1 || entry->kind == 2)
                count++;
            else
                return 0;
            before = entry->distance;
        }
        table->count = count;
        table->dead = dead;
        return 1;
    }
    """
    enum:
        LAKE_ARRAY_BYTES
        LAKE_BATCH
        LAKE_ENTRIES_OFFSET
        LAKE_GRANT_BYTES
        LAKE_STRIPES_OFFSET

    ctypedef struct lake_entry:
        uint8_t kind
        uint8_t tier
        uint8_t digest[32]
        uint64_t segment
        uint32_t offset
        uint32_t stored_bytes
        uint32_t crc

    ctypedef struct lake_place:
        pass

    const char *LAKE_PLACES_CAPSULE

    ctypedef struct lake_places:
        const void *table
        int (*find)(const void *, const uint8_t *, lake_place *) noexcept nogil

    const char *LAKE_SEEKER_CAPSULE

    ctypedef struct lake_seeker:
        const void *table
        void (*prefetch)(const void *, const uint8_t *) noexcept nogil
        int (*seek)(const void *, const uint8_t *, lake_place *) noexcept nogil

    ctypedef struct lake_table:
        lake_entry *entries
        uint32_t *stripes
        uint64_t capacity
        uint64_t limit
        uint64_t count
        uint64_t dead
        int home_shift
        int stripe_shift

    void PyObject_GC_UnTrack(void *tracked)
    void lake_crc32c_begin() nogil
    void lake_prefetch(const lake_table *table, const uint8_t *chunk) nogil
    int lake_find(const lake_table *table, const uint8_t *chunk, lake_entry *found) nogil
    void lake_tell(const lake_entry *found, void *into) nogil
    int lake_find_place(const void *table, const uint8_t *chunk, lake_place *place) noexcept nogil
    int lake_seek_place(const void *table, const uint8_t *id, lake_place *place) noexcept nogil
    void lake_prefetch_place(const void *table, const uint8_t *id) noexcept nogil
    uint8_t *lake_pack_array(uint8_t *at, uint32_t length) nogil
    uint8_t *lake_pack_grant(uint8_t *at, const lake_entry *found) nogil
    int lake_put(lake_table *table, const uint8_t *chunk, const lake_entry *wanted) nogil
    int lake_remove(lake_table *table, const uint8_t *chunk) nogil
    void lake_clear(lake_table *table) nogil
    int lake_audit(lake_table *table) nogil
    void *memcpy(void *target, const void *source, size_t length) nogil
    void *memset(void *target, int value, size_t length) nogil

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
        """A capsule by which other native modules look places up (`place.h`); valid as long as this object."""
        return PyCapsule_New(&self.port, LAKE_PLACES_CAPSULE, NULL)

    @property
    def seeker(self):
        """A capsule by which other native modules learn also what is not present (`place.h`); as `native`."""
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
