# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Stamps, native: the engine's side, and the reader's; `stamps.h` has the layout and the rules of readers.

Rules kept here besides:
- Only the thread that called `begin` unlocks the mutex.  glibc chains the robust mutexes that a thread holds through
  their own memory, so memory with a held mutex is never unmapped: it is leaked if another thread, or a forked child,
  frees the object.
- `ended` is set before the mutex is unlocked, and by any thread of the engine's process; never by a forked child.
- A counter has one writer, and is written with release order.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_New, PyCapsule_SetContext
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.types cimport pid_t
from posix.unistd cimport getpid

from lakefs.stamps.stamps cimport (
    LAKE_STAMPS_CAPSULE,
    LAKE_STAMPS_COUNTERS,
    LAKE_STAMPS_NO_RIGHT,
    LAKE_STAMP_BYTES,
    lake_stamps,
    lake_stamps_live,
    lake_stamps_read,
    lake_stamps_right_end,
    lake_stamps_stand,
)

from lakefs.limits import STAMPS_PER_ANSWER_MAX

cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    _Static_assert(sizeof(pthread_mutex_t) <= 64, "the mutex has 64 bytes");

    /* Returns the count of stamps that the header states, 0 if it is no header of this version. */
    static uint64_t lake_stamps_stated(const uint8_t *memory)
    {
        const lake_stamps_header *head = (const lake_stamps_header *)memory;
        if (__atomic_load_n(&head->magic, __ATOMIC_ACQUIRE) != LAKE_STAMPS_MAGIC
            || (head->version != LAKE_STAMPS_VERSION && head->version != LAKE_STAMPS_VERSION_WITH_END))
            return 0;
        return head->count;
    }

    static int lake_stamps_mine(const uint8_t *memory)
    {
        const lake_stamps_header *head = (const lake_stamps_header *)memory;
        uint32_t owner = __atomic_load_n(&head->owner, __ATOMIC_ACQUIRE);
        return !(owner & LAKE_STAMPS_OWNER_DIED) && (owner & LAKE_STAMPS_OWNER) == (uint32_t)syscall(SYS_gettid);
    }

    /* Locks the mutex of zeroed memory, and writes its header; returns 0 or an error number. */
    static int lake_stamps_begin(uint8_t *memory, uint64_t count, int has_end)
    {
        lake_stamps_header *head = (lake_stamps_header *)memory;
        pthread_mutex_t *mutex = (pthread_mutex_t *)(memory + LAKE_STAMPS_MUTEX);
        pthread_mutexattr_t kind;
        void *list = NULL;
        size_t list_bytes;
        int failed;
        /* Without this list the kernel would not mark the mutex of a killed engine. */
        if (syscall(SYS_get_robust_list, 0, &list, &list_bytes) || !list)
            return ENOTSUP;
        if ((failed = pthread_mutexattr_init(&kind)))
            return failed;
        if (!(failed = pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED))
            && !(failed = pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST)))
            failed = pthread_mutex_init(mutex, &kind);
        pthread_mutexattr_destroy(&kind);
        if (failed || (failed = pthread_mutex_lock(mutex)))
            return failed;
        if (!lake_stamps_mine(memory)) { /* another libc keeps the futex word elsewhere */
            pthread_mutex_unlock(mutex);
            return ENOTSUP;
        }
        head->version = has_end ? LAKE_STAMPS_VERSION_WITH_END : LAKE_STAMPS_VERSION;
        head->right_end = has_end ? LAKE_STAMPS_NO_RIGHT : 0;
        head->count = count;
        __atomic_store_n(&head->magic, LAKE_STAMPS_MAGIC, __ATOMIC_RELEASE);
        return 0;
    }

    /* Ends the stamps; returns 1 if the mutex is free now, 0 if another thread holds it. */
    static int lake_stamps_end(uint8_t *memory)
    {
        lake_stamps_header *head = (lake_stamps_header *)memory;
        __atomic_store_n(&head->ended, 1, __ATOMIC_RELEASE);
        return lake_stamps_mine(memory) && !pthread_mutex_unlock((pthread_mutex_t *)(memory + LAKE_STAMPS_MUTEX));
    }

    static inline void lake_stamps_turn(uint8_t *memory, uint64_t slot)
    {
        uint64_t *counter = (uint64_t *)(memory + LAKE_STAMPS_COUNTERS) + slot;
        __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + 1, __ATOMIC_RELEASE);
    }

    /* Raises the counter of a slot to a value, unless it is higher already. */
    static inline void lake_stamps_raise(uint8_t *memory, uint64_t slot, uint64_t value)
    {
        uint64_t *counter = (uint64_t *)(memory + LAKE_STAMPS_COUNTERS) + slot;
        if (__atomic_load_n(counter, __ATOMIC_RELAXED) < value)
            __atomic_store_n(counter, value, __ATOMIC_RELEASE);
    }

    static void lake_stamps_set_right_end(uint8_t *memory, uint64_t right_end)
    {
        __atomic_store_n(&((lake_stamps_header *)memory)->right_end, right_end, __ATOMIC_SEQ_CST);
    }

    /* Raises a part of the counter of a slot, which is the sum of its parts, to a value, unless it is higher already.
       Returns the counter as it was when the part had that value. */
    static inline uint64_t lake_stamps_raise_part(uint8_t *memory, uint64_t *part, uint64_t slot, uint64_t value)
    {
        uint64_t *counter = (uint64_t *)(memory + LAKE_STAMPS_COUNTERS) + slot;
        uint64_t sum = __atomic_load_n(counter, __ATOMIC_RELAXED);
        if (part[slot] >= value)
            return sum - (part[slot] - value);
        sum += value - part[slot];
        part[slot] = value;
        __atomic_store_n(counter, sum, __ATOMIC_RELEASE);
        return sum;
    }

    /* Returns the slot of a record, from its table and the hash of its key, among 2^bits slots. */
    static inline uint64_t lake_stamps_slot(int64_t hash, uint64_t table, int bits)
    {
        return (((uint64_t)hash + table * 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull) >> (64 - bits);
    }
    """
    uint64_t lake_stamps_stated(const uint8_t *) nogil
    int lake_stamps_begin(uint8_t *, uint64_t count, bint has_end) nogil
    void lake_stamps_raise(uint8_t *, uint64_t slot, uint64_t value) nogil
    uint64_t lake_stamps_raise_part(uint8_t *, uint64_t *part, uint64_t slot, uint64_t value) nogil
    void lake_stamps_set_right_end(uint8_t *, uint64_t right_end) nogil
    bint lake_stamps_end(uint8_t *) nogil
    void lake_stamps_turn(uint8_t *, uint64_t slot) nogil
    uint64_t lake_stamps_slot(int64_t hash, uint64_t table, int bits) nogil

cdef enum:
    SLOTS_MOST = 64
assert STAMPS_PER_ANSWER_MAX <= SLOTS_MOST
cdef Py_ssize_t _RECORDS_MAX = STAMPS_PER_ANSWER_MAX


cdef class StampMemory:
    cdef Py_buffer buffer
    cdef lake_stamps stamps
    cdef uint8_t *writable  # NULL over read-only memory
    cdef uint64_t tables
    cdef int bits
    cdef bint has_buffer
    cdef pid_t process  # that called begin; 0 before
    cdef bint is_locked

    def __cinit__(self, memory, tables=()):
        try:
            PyObject_GetBuffer(memory, &self.buffer, PyBUF_WRITABLE)
            self.writable = <uint8_t *>self.buffer.buf
        except (BufferError, TypeError):
            PyObject_GetBuffer(memory, &self.buffer, PyBUF_SIMPLE)
        self.has_buffer = True
        self.stamps.memory = <const uint8_t *>self.buffer.buf
        cdef Py_ssize_t counters_bytes = self.buffer.len - LAKE_STAMPS_COUNTERS
        if counters_bytes < 8 or <uint64_t>self.buffer.buf % 64:
            raise ValueError("memory of stamps is too short, or begins at no cache line")
        if self.writable != NULL:
            self.stamps.count = <uint64_t>counters_bytes // 8
        else:
            self.stamps.count = lake_stamps_stated(self.stamps.memory)
            if not self.stamps.count or self.stamps.count > <uint64_t>counters_bytes // 8:
                raise ValueError("this is no memory of stamps of this version")
        if self.stamps.count & (self.stamps.count - 1) or self.stamps.count == 1 or self.stamps.count > 1 << 32:
            raise ValueError("the count of stamps is no power of two, or too large")
        while 1 << self.bits < <int64_t>self.stamps.count:
            self.bits += 1
        for table in tables:
            if not 0 <= table < 64:
                raise ValueError("a table's number is at most 63")
            self.tables |= <uint64_t>1 << <int>table

    def __dealloc__(self):
        if not self.has_buffer:
            return
        if self.is_locked:
            self._end()
        if not self.is_locked:
            PyBuffer_Release(&self.buffer)

    # --- the engine's side -------------------------------------------------------------------------

    def begin(self, has_end=False):
        """Lock the mutex in this thread and write the header."""
        if self.writable == NULL or self.process:
            raise ValueError("stamps begin once, in memory of the engine")
        cdef int failed = lake_stamps_begin(self.writable, self.stamps.count, has_end)
        if failed:
            raise OSError(failed, "no robust mutex")
        self.process = getpid()
        self.is_locked = True

    def end(self):
        """No stamp stands any more."""
        if self.is_locked:
            self._end()

    cdef void _end(self) noexcept:
        # A forked child has the same memory: it would end its parent's stamps.
        if self.process == getpid() and lake_stamps_end(self.writable):
            self.is_locked = False

    def turn(self, list mutations):
        """Turn the stamps of changed records."""
        cdef uint64_t table
        if self.writable == NULL:
            raise ValueError("stamps are turned by the engine")
        for mutation in mutations:
            if isinstance(mutation, tuple):
                table = (<tuple>mutation)[1]
                if table < 64 and self.tables >> table & 1:
                    lake_stamps_turn(self.writable, self._slot(table, (<tuple>mutation)[2]))
            else:
                table = mutation.table
                if table < 64 and self.tables >> table & 1:
                    for key in <list?>mutation.keys:
                        lake_stamps_turn(self.writable, self._slot(table, key))

    def turn_all(self):
        """Turn every stamp."""
        if self.writable == NULL:
            raise ValueError("stamps are turned by the engine")
        cdef uint64_t slot
        for slot in range(self.stamps.count):
            lake_stamps_turn(self.writable, slot)

    def of(self, list records, uint64_t base=0, bytearray noted=None):
        """The set of stamps of records."""
        cdef uint32_t slots[SLOTS_MOST]
        cdef uint8_t *bits = NULL if noted is None else self._bits(noted)
        cdef Py_ssize_t count = 0, at
        cdef uint32_t slot
        cdef uint64_t value
        cdef char *into
        if len(records) > _RECORDS_MAX:
            return b""
        for record in records:
            slot = <uint32_t>self._slot((<tuple?>record)[0], (<tuple?>record)[1])
            for at in range(count):
                if slots[at] == slot:
                    break
            else:
                slots[count] = slot
                count += 1
        packed = PyBytes_FromStringAndSize(NULL, LAKE_STAMP_BYTES * count)
        into = PyBytes_AS_STRING(packed)
        for at in range(count):
            value = base + lake_stamps_read(&self.stamps, slots[at])
            if bits != NULL:
                bits[slots[at] >> 3] |= 1 << (slots[at] & 7)
            memcpy(into + LAKE_STAMP_BYTES * at, &slots[at], 4)
            memcpy(into + LAKE_STAMP_BYTES * at + 4, &value, 8)
        return packed

    # --- a leader of heads -------------------------------------------------------------------------

    def turn_noted(self, list mutations, list noted):
        """Turn the stamps of changed records; returns who had noted which slots, and forgets that."""
        cdef uint64_t table
        if self.writable == NULL:
            raise ValueError("stamps are turned by the engine")
        for each in noted:
            self._bits(<bytearray?>each)
        found = {}
        for mutation in mutations:
            if isinstance(mutation, tuple):
                table = (<tuple>mutation)[1]
                if table < 64 and self.tables >> table & 1:
                    self._turn_noted(self._slot(table, (<tuple>mutation)[2]), noted, found)
            else:
                table = mutation.table
                if table < 64 and self.tables >> table & 1:
                    for key in <list?>mutation.keys:
                        self._turn_noted(self._slot(table, key), noted, found)
        return found

    cdef int _turn_noted(self, uint64_t slot, list noted, dict found) except -1:
        cdef uint8_t *bits
        cdef uint8_t bit = 1 << (slot & 7)
        cdef Py_ssize_t index
        lake_stamps_turn(self.writable, slot)
        for index in range(len(noted)):
            bits = <uint8_t *>PyByteArray_AS_STRING(<bytearray>noted[index])
            if bits[slot >> 3] & bit:
                bits[slot >> 3] &= ~bit
                found.setdefault(index, []).append(slot)
        return 0

    cdef uint8_t *_bits(self, bytearray noted) except NULL:
        if <uint64_t>PyByteArray_GET_SIZE(noted) * 8 < self.stamps.count:
            raise ValueError("there is a bit for each slot")
        return <uint8_t *>PyByteArray_AS_STRING(noted)

    def pack(self, slots, uint64_t base=0):
        """The set of these slots."""
        cdef Py_ssize_t at = 0
        cdef uint64_t slot, value
        cdef uint32_t short_slot
        packed = PyBytes_FromStringAndSize(NULL, LAKE_STAMP_BYTES * len(slots))
        cdef char *into = PyBytes_AS_STRING(packed)
        for slot in slots:
            if slot >= self.stamps.count:
                raise ValueError("there is no such slot")
            short_slot = <uint32_t>slot
            value = base + lake_stamps_read(&self.stamps, slot)
            memcpy(into + at, &short_slot, 4)
            memcpy(into + at + 4, &value, 8)
            at += LAKE_STAMP_BYTES
        return packed

    # --- a head, which repeats a leader's counters -------------------------------------------------

    def raise_to(self, bytes stamps not None):
        """Raise counters to the values of a set."""
        cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(stamps)
        cdef Py_ssize_t length = PyBytes_GET_SIZE(stamps), offset
        cdef uint32_t slot
        cdef uint64_t value
        if self.writable == NULL or length % LAKE_STAMP_BYTES:
            raise ValueError("a set of stamps raises the counters of a head")
        for offset in range(0, length, LAKE_STAMP_BYTES):
            memcpy(&slot, at + offset, 4)
            memcpy(&value, at + offset + 4, 8)
            if slot >= self.stamps.count:
                raise ValueError("there is no such slot")
            lake_stamps_raise(self.writable, slot, value)

    def raise_all(self, uint64_t value):
        """Raise all counters to a value."""
        if self.writable == NULL:
            raise ValueError("a set of stamps raises the counters of a head")
        cdef uint64_t slot
        for slot in range(self.stamps.count):
            lake_stamps_raise(self.writable, slot, value)

    def parts(self):
        """The counters, as a part of them all."""
        cdef Py_ssize_t counters_bytes = 8 * <Py_ssize_t>self.stamps.count
        return bytearray((<char *>self.stamps.memory + LAKE_STAMPS_COUNTERS)[:counters_bytes])

    cdef uint64_t *_part(self, bytearray part) except NULL:
        if self.writable == NULL or <uint64_t>PyByteArray_GET_SIZE(part) != 8 * self.stamps.count:
            raise ValueError("a part of the counters of a head has a number for each slot")
        return <uint64_t *>PyByteArray_AS_STRING(part)

    def raise_part(self, bytearray part not None, bytes stamps not None):
        """Raise a part of the counters to the values of a set; returns the set of the counters as they were then."""
        cdef uint64_t *values = self._part(part)
        cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(stamps)
        cdef Py_ssize_t length = PyBytes_GET_SIZE(stamps), offset
        cdef uint32_t slot
        cdef uint64_t value
        if length % LAKE_STAMP_BYTES:
            raise ValueError("a set of stamps raises the counters of a head")
        packed = PyBytes_FromStringAndSize(NULL, length)
        cdef char *into = PyBytes_AS_STRING(packed)
        for offset in range(0, length, LAKE_STAMP_BYTES):
            memcpy(&slot, at + offset, 4)
            memcpy(&value, at + offset + 4, 8)
            if slot >= self.stamps.count:
                raise ValueError("there is no such slot")
            value = lake_stamps_raise_part(self.writable, values, slot, value)
            memcpy(into + offset, &slot, 4)
            memcpy(into + offset + 4, &value, 8)
        return packed

    def raise_whole_part(self, bytearray part not None, uint64_t value):
        """Raise a part of all counters to a value."""
        cdef uint64_t *values = self._part(part)
        cdef uint64_t slot
        for slot in range(self.stamps.count):
            lake_stamps_raise_part(self.writable, values, slot, value)

    def withdraw(self):
        """Let the right to use the stamps be over."""
        if self.writable == NULL:
            raise ValueError("a head has the right to use its stamps")
        lake_stamps_set_right_end(self.writable, LAKE_STAMPS_NO_RIGHT)

    @property
    def right_end_ns(self):
        return lake_stamps_right_end(&self.stamps)

    @right_end_ns.setter
    def right_end_ns(self, uint64_t right_end):
        if self.writable == NULL or right_end < LAKE_STAMPS_NO_RIGHT:
            raise ValueError("the end of a right is written by a head, and is not 0")
        lake_stamps_set_right_end(self.writable, right_end)

    # --- both --------------------------------------------------------------------------------------

    cdef uint64_t _slot(self, uint64_t table, object key) except? 0xffffffffffffffff:
        return lake_stamps_slot(hash(key), table, self.bits)

    # --- readers -----------------------------------------------------------------------------------

    @property
    def is_live(self):
        return bool(lake_stamps_live(&self.stamps))

    def read(self, slots):
        """The counters of slots."""
        cdef uint64_t slot
        found = []
        for slot in slots:
            if slot >= self.stamps.count:
                raise ValueError("there is no such slot")
            found.append(lake_stamps_read(&self.stamps, slot))
        return found

    def stand(self, bytes stamps not None):
        return lake_stamps_stand(&self.stamps, <const uint8_t *>PyBytes_AS_STRING(stamps), PyBytes_GET_SIZE(stamps))

    @property
    def native(self):
        capsule = PyCapsule_New(&self.stamps, LAKE_STAMPS_CAPSULE, _forget)
        PyCapsule_SetContext(capsule, <void *>self)
        Py_INCREF(self)
        return capsule


cdef void _forget(object capsule) noexcept:
    Py_DECREF(<object>PyCapsule_GetContext(capsule))
