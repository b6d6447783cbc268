# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Look-ups of keys in the keyed index, or in those of several members of a lake, native.

`lakefs.shared_index.keyed_index` and `lakefs.direct.key_homes` have the rules.  Kept here besides:
- No step runs Python code between the first look at the space and the last: the list of keys cannot change meanwhile.
- The interpreter's lock is held: 64 keys take some 10 us, less than giving it away and taking it back may.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from lakefs.granules.place cimport LAKE_ID_BYTES, LAKE_SEEKER_CAPSULE, LAKE_TIER_SEGMENT, lake_place, lake_seeker

cdef extern from *:
    """
    #define OPENSSL_SUPPRESS_DEPRECATED /* the functions of EVP allocate for each digest */
    #include <openssl/sha.h>
    #include <string.h>

    /* As in `lakefs.shared_index.key_format`. */
    #define LAKE_KEY_BYTES_MAX 64
    #define LAKE_KEY_ABSENT 0
    #define LAKE_KEY_DOUBTFUL 17
    #define LAKE_SPACE_WHOLE 18
    #define LAKE_SPACE_PARTIAL 19
    #define LAKE_OF_VALUE 2
    #define LAKE_OF_SPACE 3
    #define LAKE_KEYS_BATCH 64

    /* Writes the id under which a key of a space, or the space itself, is in the table. */
    static void lake_key_id(uint8_t what, uint32_t space, const uint8_t *key, size_t length, uint8_t *id)
    {
        uint8_t text[5 + LAKE_KEY_BYTES_MAX];
        SHA256_CTX context;
        text[0] = what;
        text[1] = (uint8_t)(space >> 24);
        text[2] = (uint8_t)(space >> 16);
        text[3] = (uint8_t)(space >> 8);
        text[4] = (uint8_t)space;
        if (length)
            memcpy(text + 5, key, length);
        id[0] = 1;
        SHA256_Init(&context);
        SHA256_Update(&context, text, 5 + length);
        SHA256_Final(id + 1, &context);
    }
    """
    enum:
        LAKE_KEYS_BATCH
        LAKE_KEY_ABSENT
        LAKE_KEY_BYTES_MAX
        LAKE_KEY_DOUBTFUL
        LAKE_OF_SPACE
        LAKE_OF_VALUE
        LAKE_SPACE_PARTIAL
        LAKE_SPACE_WHOLE

    void lake_key_id(uint8_t what, uint32_t space, const uint8_t *key, size_t length, uint8_t *id) nogil


cdef extern from "lakefs/shared_index/key_home.h":
    enum:
        LAKE_HOME_NOWHERE

    ctypedef struct lake_key_ring:
        const uint8_t *hash_key
        const uint8_t *positions
        const uint8_t *homes
        size_t count

    uint64_t lake_key_position(const uint8_t *hash_key, uint64_t space, const uint8_t *key, size_t length) nogil
    uint16_t lake_key_home(const lake_key_ring *ring, uint64_t position) nogil


cdef enum:
    HOMES_MAX = 64
    HOME_SHIFT = 48  # as `lakefs.shared_index.homes_format.SEGMENT_BITS` says
    HASH_KEY_BYTES = 32


cdef class Finder:
    """Look-ups of keys; see the subclasses."""

    def plan(self, uint32_t space, list keys not None, list rooms not None):
        """Return what may be read of values, each of which has so much room: (lengths, indexes, packed).

        `lengths` has 0 for a key without value, or whose value is longer than its room, and -1 for each other key;
        `indexes` and `packed` have the keys whose only chunk lies in a segment, and a
        `lakefs.shared_index.table_format.PLACE` of each.  ValueError for a key of no keyed blob, and when keys and rooms do
        not go together.
        """
        cdef lake_place places[LAKE_KEYS_BATCH]
        cdef Py_ssize_t begin, i, length, total = PyList_GET_SIZE(keys)
        cdef list some, lengths = [-1] * total, indexes = []
        cdef bytearray packed = bytearray()
        check_keys(keys)
        if PyList_GET_SIZE(rooms) != total:
            raise ValueError("each key has a room")
        for begin in range(0, total, LAKE_KEYS_BATCH):
            some = keys if total <= LAKE_KEYS_BATCH else keys[begin : begin + LAKE_KEYS_BATCH]
            length = PyList_GET_SIZE(some)
            self.look(space, some, places)
            for i in range(length):
                if places[i].tier == LAKE_KEY_ABSENT:
                    lengths[begin + i] = 0
                elif places[i].tier == LAKE_TIER_SEGMENT:
                    if places[i].stored_bytes > <long long>(<object>PyList_GET_ITEM(rooms, begin + i)):
                        lengths[begin + i] = 0
                        continue
                    indexes.append(begin + i)
                    packed += (<char *>(places + i))[: sizeof(lake_place)]
        return lengths, indexes, packed

    def match(self, uint32_t space, list keys not None, list sizes=None):
        """Return for each key True or False: it has a value, or none; None: it is not known here.

        `sizes`: the length that each value has to have (0: any); a key with another has none.  ValueError for a key of
        no keyed blob, and when keys and sizes do not go together.
        """
        cdef lake_place places[LAKE_KEYS_BATCH]
        cdef Py_ssize_t begin, i, total = PyList_GET_SIZE(keys)
        cdef list some, present
        check_keys(keys)
        if sizes is not None and PyList_GET_SIZE(sizes) != total:
            raise ValueError("each key has a size")
        if total > LAKE_KEYS_BATCH:
            present = []
            for begin in range(0, total, LAKE_KEYS_BATCH):
                some = keys[begin : begin + LAKE_KEYS_BATCH]
                present += self.match(space, some, None if sizes is None else sizes[begin : begin + LAKE_KEYS_BATCH])
            return present
        self.look(space, keys, places)
        present = [
            None if places[i].tier == LAKE_KEY_DOUBTFUL else places[i].tier != LAKE_KEY_ABSENT for i in range(total)
        ]
        if sizes is not None:
            for i in range(total):
                if present[i] is True:
                    present[i] = has_size(places + i, <long long>(<object>PyList_GET_ITEM(sizes, i)))
        return present

    cdef void look(self, uint32_t space, list keys, lake_place *places) noexcept:
        """Look up to LAKE_KEYS_BATCH keys up; nothing is known here."""
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(keys)):
            note_found(places + i, -1)


cdef class KeyFinder(Finder):
    """Look-ups of keys in one table."""

    cdef object table
    cdef lake_seeker seeker

    def __cinit__(self, table not None):
        self.table = table
        memcpy(&self.seeker, PyCapsule_GetPointer(table.seeker, LAKE_SEEKER_CAPSULE), sizeof(lake_seeker))

    cdef void look(self, uint32_t space, list keys, lake_place *places) noexcept:
        """Look up to LAKE_KEYS_BATCH keys up between two looks at their space.

        What is not in the table is absent if the space was whole both times, else DOUBTFUL.
        """
        cdef uint8_t ids[LAKE_KEYS_BATCH][LAKE_ID_BYTES]
        cdef uint8_t of_space[LAKE_ID_BYTES]
        cdef uint32_t before, after
        cdef Py_ssize_t i, total = PyList_GET_SIZE(keys)
        lake_key_id(LAKE_OF_SPACE, space, NULL, 0, of_space)
        before = self.state(of_space)
        for i in range(total):
            key = <object>PyList_GET_ITEM(keys, i)
            lake_key_id(LAKE_OF_VALUE, space, <const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), ids[i])
            self.seeker.prefetch(self.seeker.table, ids[i])
        for i in range(total):
            note_found(places + i, self.seeker.seek(self.seeker.table, ids[i], places + i))
        after = self.state(of_space)
        for i in range(total):
            weigh(places + i, before, after)

    cdef uint32_t state(self, const uint8_t *of_space) noexcept:
        cdef lake_place place
        return place.tier if self.seeker.seek(self.seeker.table, of_space, &place) == 1 else 0


cdef class HomesFinder(Finder):
    """Look-ups of keys in the tables of their homes, where these are here; nothing is known of others."""

    cdef list finders
    cdef uint64_t numbers[HOMES_MAX]
    cdef Py_ssize_t count
    cdef Py_buffer memory
    cdef bint has_memory
    cdef lake_key_ring ring

    def __cinit__(self, memory not None, Py_ssize_t vnodes, list finders not None, list numbers not None):
        """`memory`: hash key, positions, homes, as `lakefs.shared_index.homes_format` has them behind its header."""
        cdef Py_ssize_t at
        self.has_memory = False
        self.count = len(finders)
        if self.count > HOMES_MAX or len(numbers) != self.count:
            raise ValueError("each home has a number, and a finder")
        self.finders = [<KeyFinder?>finder for finder in finders]
        for at in range(self.count):
            self.numbers[at] = <uint64_t>(<uint16_t>numbers[at]) << HOME_SHIFT
        PyObject_GetBuffer(memory, &self.memory, PyBUF_SIMPLE)
        self.has_memory = True
        if vnodes < 0 or vnodes > (self.memory.len - HASH_KEY_BYTES) // 10 or self.memory.len < HASH_KEY_BYTES:
            raise ValueError("the memory is shorter than the ring")
        self.ring.hash_key = <const uint8_t *>self.memory.buf
        self.ring.positions = self.ring.hash_key + HASH_KEY_BYTES
        self.ring.homes = self.ring.positions + 8 * vnodes
        self.ring.count = vnodes

    def __dealloc__(self):
        if self.has_memory:
            PyBuffer_Release(&self.memory)

    def homes(self, uint32_t space, list keys not None):
        """Return for each key the place of its home in the list of finders; None if it is none of these."""
        cdef uint16_t home
        cdef list found = []
        check_keys(keys)
        for key in keys:
            home = self.home(space, key)
            found.append(None if home >= self.count else home)
        return found

    cdef uint16_t home(self, uint32_t space, bytes key) noexcept:
        cdef uint64_t position = lake_key_position(
            self.ring.hash_key, space, <const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
        )
        return lake_key_home(&self.ring, position)

    cdef void look(self, uint32_t space, list keys, lake_place *places) noexcept:
        """Look up to LAKE_KEYS_BATCH keys up, those of each home between two looks at their space there."""
        cdef uint8_t ids[LAKE_KEYS_BATCH][LAKE_ID_BYTES]
        cdef uint8_t of_space[LAKE_ID_BYTES]
        cdef uint16_t homes[LAKE_KEYS_BATCH]
        cdef uint32_t before[HOMES_MAX]
        cdef uint32_t after[HOMES_MAX]
        cdef bint is_used[HOMES_MAX]
        cdef Py_ssize_t i, total = PyList_GET_SIZE(keys)
        cdef uint16_t home
        cdef KeyFinder finder
        memset(is_used, 0, sizeof(is_used))
        lake_key_id(LAKE_OF_SPACE, space, NULL, 0, of_space)
        for i in range(total):
            key = <object>PyList_GET_ITEM(keys, i)
            homes[i] = home = self.home(space, key)
            if home >= self.count:
                continue
            finder = <KeyFinder>PyList_GET_ITEM(self.finders, home)
            if not is_used[home]:
                is_used[home] = True
                before[home] = finder.state(of_space)
            lake_key_id(LAKE_OF_VALUE, space, <const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), ids[i])
            finder.seeker.prefetch(finder.seeker.table, ids[i])
        for i in range(total):
            if homes[i] >= self.count:
                note_found(places + i, -1)
                continue
            finder = <KeyFinder>PyList_GET_ITEM(self.finders, homes[i])
            note_found(places + i, finder.seeker.seek(finder.seeker.table, ids[i], places + i))
        for i in range(self.count):
            if is_used[i]:
                after[i] = (<KeyFinder>PyList_GET_ITEM(self.finders, i)).state(of_space)
        for i in range(total):
            home = homes[i]
            if home >= self.count:
                continue
            weigh(places + i, before[home], after[home])
            if places[i].tier == LAKE_TIER_SEGMENT:
                if places[i].segment >> HOME_SHIFT:  # no segment of a store: it would be taken for another home's
                    places[i].tier = LAKE_KEY_DOUBTFUL
                places[i].segment |= self.numbers[home]


cdef void note_found(lake_place *place, int seen) noexcept:
    """Write what a look-up gave that has found the place (1), or nothing (0), or could not tell."""
    if seen != 1:
        memset(place, 0, sizeof(lake_place))
        place.tier = LAKE_KEY_ABSENT if seen == 0 else LAKE_KEY_DOUBTFUL


cdef void weigh(lake_place *place, uint32_t before, uint32_t after) noexcept:
    """Take from a look-up what its space does not support, by its state before and after."""
    if after != LAKE_SPACE_WHOLE and after != LAKE_SPACE_PARTIAL:  # no space that the table knows
        place.tier = LAKE_KEY_DOUBTFUL
    elif place.tier == LAKE_KEY_ABSENT and (before != LAKE_SPACE_WHOLE or after != LAKE_SPACE_WHOLE):
        place.tier = LAKE_KEY_DOUBTFUL


cdef object has_size(const lake_place *place, long long size):
    """Return True if a value has this length (0: any), or False; None if the entry does not tell: of an earlier engine."""
    if size == 0:
        return True
    return None if place.stored_bytes == 0 else place.stored_bytes == size


def key_id(uint32_t space, bytes key not None):
    """Return the id under which a key of a space is in the table.  ValueError for a key of no keyed blob."""
    cdef uint8_t identifier[LAKE_ID_BYTES]
    check_keys([key])
    lake_key_id(LAKE_OF_VALUE, space, <const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), identifier)
    return (<char *>identifier)[:LAKE_ID_BYTES]


cdef int check_keys(list keys) except -1:
    cdef Py_ssize_t i
    for i in range(PyList_GET_SIZE(keys)):
        key = <object>PyList_GET_ITEM(keys, i)
        if not PyBytes_CheckExact(key) or not 1 <= PyBytes_GET_SIZE(key) <= LAKE_KEY_BYTES_MAX:
            raise ValueError("a key is bytes, of 1 to 64")
    return 0
