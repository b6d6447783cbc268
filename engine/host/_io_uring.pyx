# cython: language_level=3
"""An io_uring instance over the raw system calls: rings mapped here, no library.  Types are in `_io_uring.pyi`.

It reads, and nothing else: writes are O_DIRECT, from threads.  Operations come in batches: arrays in memory of C, from which the entries of the ring are made and into which their
results go, so that a read costs no Python object.  A batch is told of when all of it has ended.

Rules kept here:
- A batch holds the memory of its operations (`Py_buffer`), and each operation in flight holds its batch until its
  completion was taken from the ring: no memory that the kernel may still write to is given back, whatever the caller
  drops, and whatever is cancelled.
- At most `entries` operations are in flight, and the completion ring has room for twice as many: it never overflows.
- Tail of the submissions: stored with release, after the entries.  Tail of the completions: loaded with acquire,
  before the entries.  Head of the completions: stored with release, after the entries were copied.
- Without SQPOLL the kernel looks at submissions only inside `io_uring_enter`: those that it did not take are taken back.
- One thread at a time.  The interpreter's lock is released inside the system calls only.

What the kernel or a filter of system calls refuses is OSError from the constructor; `engine.host.io_queue` decides what then.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport Py_INCREF, Py_DECREF, PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

import errno as _errno
import os

cdef extern from *:
    """
    #include <errno.h>
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/eventfd.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #ifndef __NR_io_uring_setup
    #define __NR_io_uring_setup 425
    #define __NR_io_uring_enter 426
    #define __NR_io_uring_register 427
    #endif

    /* linux/io_uring.h, written out: the headers of the building machine may be older than its kernel. */
    typedef struct {
        uint8_t opcode, flags; uint16_t ioprio; int32_t fd;
        uint64_t off, addr; uint32_t len, op_flags;
        uint64_t user_data, pad[3];
    } ring_sqe;
    typedef struct { uint64_t user_data; int32_t res; uint32_t flags; } ring_cqe;
    typedef struct {
        uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1; uint64_t user_addr;
    } ring_sq_offsets;
    typedef struct {
        uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1; uint64_t user_addr;
    } ring_cq_offsets;
    typedef struct {
        uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
        ring_sq_offsets sq_off; ring_cq_offsets cq_off;
    } ring_params;
    _Static_assert(sizeof(ring_sqe) == 64 && offsetof(ring_sqe, user_data) == 32, "struct io_uring_sqe");
    _Static_assert(sizeof(ring_cqe) == 16, "struct io_uring_cqe");
    _Static_assert(sizeof(ring_params) == 120, "struct io_uring_params");

    #define RING_ENTER_GETEVENTS 1u
    #define RING_REGISTER_EVENTFD 4u
    #define RING_CQ_EVENTFD_DISABLED 1u
    #define RING_SETUP_CLAMP (1u << 4)
    #define RING_SETUP_SUBMIT_ALL (1u << 7)
    #define RING_SETUP_COOP_TASKRUN (1u << 8)
    /* SINGLE_MMAP, NODROP, and RW_CUR_POS, which came with the plain reads and writes (Linux 5.6). */
    #define RING_FEATURES_NEEDED (1u | 2u | 8u)
    #define RING_OFF_SQ_RING 0ull
    #define RING_OFF_SQES 0x10000000ull

    static int ring_open(uint32_t entries, uint32_t flags, ring_params *params) {
        memset(params, 0, sizeof *params);
        params->flags = flags;
        int fd = (int)syscall(__NR_io_uring_setup, entries, params);
        return fd < 0 ? -errno : fd;
    }
    static int ring_enter(int fd, uint32_t submit, uint32_t wait, uint32_t flags) {
        int count = (int)syscall(__NR_io_uring_enter, fd, submit, wait, flags, NULL, 0);
        return count < 0 ? -errno : count;
    }
    static int ring_register_eventfd(int fd, int event) {
        return syscall(__NR_io_uring_register, fd, RING_REGISTER_EVENTFD, &event, 1) < 0 ? -errno : 0;
    }
    static int ring_event(void) {
        int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        return fd < 0 ? -errno : fd;
    }
    static void *ring_map(int fd, size_t length, uint64_t offset) {
        return mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t)offset);
    }
    static uint32_t load_acquire(uint32_t *place) { return __atomic_load_n(place, __ATOMIC_ACQUIRE); }
    static void store_release(uint32_t *place, uint32_t value) { __atomic_store_n(place, value, __ATOMIC_RELEASE); }
    """
    ctypedef struct ring_sqe:
        uint8_t opcode
        int32_t fd
        uint64_t off, addr
        uint32_t len
        uint64_t user_data
    ctypedef struct ring_cqe:
        uint64_t user_data
        int32_t res
    ctypedef struct ring_sq_offsets:
        uint32_t head, tail, array
    ctypedef struct ring_cq_offsets:
        uint32_t head, tail, cqes, flags
    ctypedef struct ring_params:
        uint32_t sq_entries, cq_entries, features
        ring_sq_offsets sq_off
        ring_cq_offsets cq_off
    uint32_t RING_ENTER_GETEVENTS, RING_CQ_EVENTFD_DISABLED, RING_FEATURES_NEEDED
    uint32_t RING_SETUP_CLAMP, RING_SETUP_SUBMIT_ALL, RING_SETUP_COOP_TASKRUN
    uint64_t RING_OFF_SQ_RING, RING_OFF_SQES
    void *MAP_FAILED
    int EAGAIN, EBUSY, ECANCELED, EINTR, EINVAL, ENOMEM, ENOSYS
    int ring_open(uint32_t entries, uint32_t flags, ring_params *params) nogil
    int ring_enter(int fd, uint32_t submit, uint32_t wait, uint32_t flags) nogil
    int ring_register_eventfd(int fd, int event) nogil
    int ring_event() nogil
    void *ring_map(int fd, size_t length, uint64_t offset) nogil
    int munmap(void *address, size_t length) nogil
    int posix_close "close"(int fd) nogil
    void *memset(void *place, int byte, size_t length) nogil
    uint32_t load_acquire(uint32_t *place) nogil
    void store_release(uint32_t *place, uint32_t value) nogil

NOP = 0
READ = 22

cdef enum:
    _NOP = 0
    _READ = 22

cdef enum:
    _LENGTH_MAX = 0x7FFFF000  # MAX_RW_COUNT of Linux

cdef struct Operation:
    Py_buffer view
    void *address
    uint64_t offset
    uint32_t length
    int32_t descriptor
    int32_t result
    uint8_t opcode
    bint has_view

cdef struct Slot:
    PyObject *batch
    Py_ssize_t index
    uint32_t next_free


cdef class Batch:
    """Operations that are submitted together; filled once, submitted to one ring, once."""

    cdef Operation *_operations
    cdef Py_buffer _memory
    cdef bint _has_memory
    cdef readonly Py_ssize_t room
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t submitted
    cdef readonly Py_ssize_t pending
    cdef public object task

    def __cinit__(self, Py_ssize_t room):
        self.room = max(room, 0)
        self._operations = <Operation *> calloc(max(room, 1), sizeof(Operation))
        if self._operations == NULL:
            raise MemoryError

    def __dealloc__(self):  # in flight it is held by the ring
        if self._operations != NULL:
            self._let_go()
            free(self._operations)

    def add(self, int opcode, int descriptor, buffer, uint64_t offset):
        cdef Operation *operation = self._next()
        if opcode == _READ:
            PyObject_GetBuffer(buffer, &operation.view, PyBUF_WRITABLE)
            operation.has_view = True
            if operation.view.len > _LENGTH_MAX:
                operation.has_view = False
                PyBuffer_Release(&operation.view)
                raise ValueError("more than one system call moves")
            operation.address = operation.view.buf
            operation.length = <uint32_t> operation.view.len
        elif opcode != _NOP:
            raise ValueError(f"no operation {opcode}")
        operation.opcode = <uint8_t> opcode
        operation.descriptor = descriptor
        operation.offset = offset
        self._added()

    def add_reads(self, places, buffer):
        if self._has_memory:
            raise ValueError("the batch has its memory")
        PyObject_GetBuffer(buffer, &self._memory, PyBUF_WRITABLE)
        self._has_memory = True
        cdef char *at = <char *> self._memory.buf
        cdef Py_ssize_t left = self._memory.len
        cdef Py_ssize_t length
        cdef Operation *operation
        for file, offset, size in places:
            operation = self._next()
            length = size
            if not 0 < length <= min(left, _LENGTH_MAX):
                raise ValueError("a place that the memory has no room for")
            operation.opcode = _READ
            operation.descriptor = file.fileno()
            operation.offset = offset
            operation.address = at
            operation.length = <uint32_t> length
            at += length
            left -= length
            self._added()

    cdef Operation *_next(self) except NULL:
        if self.count == self.room or self.submitted:
            raise ValueError("the batch takes no more operations")
        return &self._operations[self.count]

    cdef void _added(self) noexcept:
        self._operations[self.count].result = -ECANCELED
        self.count += 1
        self.pending += 1

    cdef void _prepare(self, Py_ssize_t index, ring_sqe *entry) noexcept:
        cdef Operation *operation = &self._operations[index]
        memset(entry, 0, sizeof(ring_sqe))
        entry.opcode = operation.opcode
        entry.fd = operation.descriptor
        if operation.opcode != _NOP:
            entry.addr = <uint64_t> <size_t> operation.address
            entry.len = operation.length
            entry.off = operation.offset

    cdef bint _ended(self, Py_ssize_t index, int32_t result):
        """An operation has ended; whether it was the last."""
        self._operations[index].result = result
        self.pending -= 1
        if self.pending == 0:
            self._let_go()
            return True
        return False

    cdef _let_go(self):
        cdef Py_ssize_t index
        for index in range(self.count):
            if self._operations[index].has_view:
                self._operations[index].has_view = False
                PyBuffer_Release(&self._operations[index].view)
        if self._has_memory:
            self._has_memory = False
            PyBuffer_Release(&self._memory)

    def give_up(self):
        self.pending -= self.count - self.submitted
        self.submitted = self.count
        if self.pending == 0:
            self._let_go()
        return self.pending == 0

    def results(self):
        return [self._operations[index].result for index in range(self.count)]

    def are_whole(self):
        cdef Py_ssize_t index
        return [
            self._operations[index].result == <int64_t> self._operations[index].length
            for index in range(self.count)
        ]


cdef class Ring:
    """One ring: batches in by `submit`, out by `reap` when they have ended, completions announced by an eventfd."""

    cdef int _fd
    cdef int _event
    cdef bint _busy
    cdef bint _is_plain
    cdef void *_rings
    cdef size_t _rings_bytes
    cdef ring_sqe *_sqes
    cdef size_t _sqes_bytes
    cdef ring_cqe *_cqes
    cdef uint32_t *_sq_head
    cdef uint32_t *_sq_tail
    cdef uint32_t *_cq_head
    cdef uint32_t *_cq_tail
    cdef uint32_t *_cq_flags
    cdef uint32_t _sq_mask
    cdef uint32_t _cq_mask
    cdef Slot *_slots
    cdef uint32_t _free
    cdef readonly int entries
    cdef readonly int in_flight

    def __cinit__(self, int entries, *, bint plain=False):
        self._fd = -1
        self._event = -1
        if entries <= 0:
            raise ValueError("a ring has at least one entry")
        self._is_plain = plain
        cdef ring_params params
        self._open(entries, &params)
        if params.features & RING_FEATURES_NEEDED != RING_FEATURES_NEEDED:
            raise _refusal(ENOSYS)
        self._map(&params)
        self.entries = params.sq_entries
        self._slots = <Slot *> calloc(params.sq_entries, sizeof(Slot))
        if self._slots == NULL:
            raise MemoryError
        cdef uint32_t index
        for index in range(params.sq_entries):
            self._slots[index].next_free = index + 1
        self._event = ring_event()
        if self._event < 0:
            raise _refusal(-self._event)
        cdef int code = ring_register_eventfd(self._fd, self._event)
        if code < 0:
            raise _refusal(-code)

    cdef _open(self, int entries, ring_params *params):
        cdef uint32_t wanted = RING_SETUP_CLAMP | RING_SETUP_SUBMIT_ALL | RING_SETUP_COOP_TASKRUN
        self._fd = -EINVAL if self._is_plain else ring_open(entries, wanted, params)
        if self._fd == -EINVAL:  # before Linux 5.19
            self._fd = ring_open(entries, RING_SETUP_CLAMP, params)
        if self._fd < 0:
            raise _refusal(-self._fd)

    cdef _map(self, ring_params *params):
        cdef size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t)
        cdef size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(ring_cqe)
        self._rings_bytes = max(sq_bytes, cq_bytes)
        cdef void *mapped = ring_map(self._fd, self._rings_bytes, RING_OFF_SQ_RING)
        if mapped == MAP_FAILED:
            raise _refusal(ENOMEM)
        self._rings = mapped
        self._sqes_bytes = params.sq_entries * sizeof(ring_sqe)
        mapped = ring_map(self._fd, self._sqes_bytes, RING_OFF_SQES)
        if mapped == MAP_FAILED:
            raise _refusal(ENOMEM)
        self._sqes = <ring_sqe *> mapped
        cdef char *base = <char *> self._rings
        self._sq_head = <uint32_t *> (base + params.sq_off.head)
        self._sq_tail = <uint32_t *> (base + params.sq_off.tail)
        self._cq_head = <uint32_t *> (base + params.cq_off.head)
        self._cq_tail = <uint32_t *> (base + params.cq_off.tail)
        # Before Linux 5.8 events cannot be muted, and the offset is 0, where something else lies.
        if params.cq_off.flags and not self._is_plain:
            self._cq_flags = <uint32_t *> (base + params.cq_off.flags)
        self._cqes = <ring_cqe *> (base + params.cq_off.cqes)
        self._sq_mask = params.sq_entries - 1
        self._cq_mask = params.cq_entries - 1
        cdef uint32_t *array = <uint32_t *> (base + params.sq_off.array)
        cdef uint32_t index
        for index in range(params.sq_entries):
            array[index] = index

    cdef void _mute(self, uint32_t flag) noexcept:
        if self._cq_flags != NULL:
            store_release(self._cq_flags, flag)

    def eventfd(self):
        self._check_open()
        return self._event

    def submit(self, Batch batch not None):
        self._check_open()
        cdef Py_ssize_t first = batch.submitted
        cdef Py_ssize_t count = batch.count - first
        if count > self.entries - self.in_flight:
            count = self.entries - self.in_flight
        if count <= 0:
            return 0
        cdef uint32_t tail = self._sq_tail[0]
        cdef Py_ssize_t index
        for index in range(count):
            self._take_slot(batch, first + index, &self._sqes[(tail + <uint32_t> index) & self._sq_mask])
        batch.submitted += count
        self.in_flight += <int> count
        # Who submits reaps next: what completes meanwhile need not wake anybody.
        self._mute(RING_CQ_EVENTFD_DISABLED)
        store_release(self._sq_tail, tail + <uint32_t> count)
        cdef uint32_t pending = <uint32_t> count
        cdef int taken = 0
        self._busy = True
        with nogil:
            while pending:
                taken = ring_enter(self._fd, pending, 0, 0)
                if taken > 0:
                    pending -= <uint32_t> taken
                elif taken != -EINTR:
                    break
        self._busy = False
        self._mute(0)
        if pending:
            # Not taken: the kernel is short of something, or refuses.
            tail += <uint32_t> count - pending
            store_release(self._sq_tail, tail)
            batch.submitted -= pending
            self.in_flight -= <int> pending
            self._take_back(tail, pending)
            if pending == count and (self.in_flight == 0 or taken not in (-EAGAIN, -EBUSY, -ENOMEM)):
                raise _refusal(-taken if taken < 0 else EAGAIN)
        return count - pending

    cdef void _take_slot(self, Batch batch, Py_ssize_t index, ring_sqe *entry) noexcept:
        cdef uint32_t chosen = self._free
        cdef Slot *slot = &self._slots[chosen]
        batch._prepare(index, entry)
        entry.user_data = chosen
        Py_INCREF(batch)
        slot.batch = <PyObject *> batch
        slot.index = index
        self._free = slot.next_free

    cdef _take_back(self, uint32_t begin, uint32_t count):
        """Give up what lies prepared from this position on."""
        cdef uint32_t chosen
        for position in range(count):
            chosen = <uint32_t> self._sqes[(begin + <uint32_t> position) & self._sq_mask].user_data
            self._leave_slot(chosen)

    cdef Batch _leave_slot(self, uint32_t chosen):
        cdef Slot *slot = &self._slots[chosen]
        cdef Batch batch = <Batch> slot.batch
        Py_DECREF(batch)
        slot.batch = NULL
        slot.next_free = self._free
        self._free = chosen
        return batch

    def reap(self):
        self._check_open()
        cdef list ended = []
        cdef ring_cqe *completion
        cdef uint32_t chosen, head
        cdef int32_t result
        cdef Py_ssize_t index
        cdef Batch batch
        while True:
            head = self._cq_head[0]
            if head == load_acquire(self._cq_tail):
                return ended
            completion = &self._cqes[head & self._cq_mask]
            chosen, result = <uint32_t> completion.user_data, completion.res
            store_release(self._cq_head, head + 1)
            self.in_flight -= 1
            index = self._slots[chosen].index
            batch = self._leave_slot(chosen)
            if batch._ended(index, result):
                ended.append(batch)

    def wait(self, int count):
        self._check_open()
        self._wait(min(count, self.in_flight))

    cdef _wait(self, int count):
        cdef int code = 0
        cdef uint32_t ready
        self._busy = True
        with nogil:
            while True:
                ready = load_acquire(self._cq_tail) - self._cq_head[0]
                if <int> ready >= count:
                    break
                code = ring_enter(self._fd, 0, <uint32_t> count, RING_ENTER_GETEVENTS)
                if code < 0 and code != -EINTR:
                    break
        self._busy = False
        if <int> ready < count:
            raise _refusal(-code)

    def close(self):
        if self._busy:
            raise RuntimeError("the ring is in use")
        self._close()

    cdef _close(self):
        if self._fd < 0:
            return
        if self.in_flight:
            self._wait(self.in_flight)  # the kernel writes to memory that is given back next
            self.reap()
        if self._sqes != NULL:
            munmap(self._sqes, self._sqes_bytes)
            self._sqes = NULL
        if self._rings != NULL:
            munmap(self._rings, self._rings_bytes)
            self._rings = NULL
        posix_close(self._fd)
        self._fd = -1
        if self._event >= 0:
            posix_close(self._event)
            self._event = -1
        free(self._slots)
        self._slots = NULL

    def __dealloc__(self):
        self._close()

    cdef _check_open(self):
        if self._fd < 0:
            raise ValueError("the ring is closed")
        if self._busy:
            raise RuntimeError("the ring is in use by another thread")


cdef _refusal(int code):
    return OSError(code, os.strerror(code))
