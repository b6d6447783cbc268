# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Reads of many chunks from known places, native; `lakefs.grants.batch_plan` has the rules.

Rules kept here besides:
- The plan holds its targets' buffers for its whole life: none can be freed or resized during a read.
- The runs are read without the interpreter's lock; each run has its own counter of the bytes read.
- A job of two threads lives on the caller's stack: it ends before the call does.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from lakefs.granules.extent cimport lake_cells, lake_extent, lake_extent_copy, lake_extent_of_cell, lake_slab_of
from lakefs.granules.granules cimport LAKE_GRANULE
from lakefs.granules.place cimport LAKE_TIER_DRAM, LAKE_TIER_SEGMENT, lake_place
from lakefs.host.crc32c cimport lake_crc32c_begin

cdef extern from *:
    """
    #include "../../lakefs/grants/checked_reads.h"
    #include "../../lakefs/grants/copy_by_call.h"
    #include "../../lakefs/grants/helper_thread.h"

    #define LAKE_DATA 1
    #define LAKE_RUN_BYTES (512 << 10)
    #define LAKE_SEGMENTS 512
    #define LAKE_ASK_FROM (256 << 10)
    #define LAKE_HELPED_FROM (512 << 10)
    """
    enum:
        LAKE_DATA
        LAKE_RUN_BYTES
        LAKE_RUN_CHUNKS
        LAKE_SEGMENTS
        LAKE_ASK_FROM
        LAKE_HELPED_FROM
        LAKE_CHECKED_RUN_BYTES
        LAKE_CHECKED_BYTES_MAX

    ctypedef struct lake_run:
        uint64_t offset
        uint64_t bytes
        int64_t came
        uint32_t segment
        uint32_t first
        uint32_t count

    ctypedef struct lake_target:
        void *at
        uint64_t length

    ctypedef struct lake_checked_job:
        lake_run *runs
        const lake_target *targets
        const lake_place *places
        const int *files
        const int *flags
        uint64_t ask_from
        uint8_t *right
        uint32_t next
        uint32_t stop

    ctypedef struct helper_thread:
        pass

    void lake_read(
        lake_run *run, const lake_target *targets, const lake_place *places, int descriptor, int flags,
        uint64_t ask_from,
    ) nogil
    void lake_work_off(void *job) nogil
    bint lake_extent_copy_by_call(const lake_extent *source, size_t length, void *into) nogil
    int helper_start(helper_thread *helper)
    int helper_begin(helper_thread *helper, void (*work)(void *), void *job) nogil
    void helper_end(helper_thread *helper) nogil
    void helper_close(helper_thread *helper) nogil


lake_crc32c_begin()


cdef class HelperThread:
    """A native thread that takes a part of large reads."""

    cdef helper_thread *helper

    def __cinit__(self):
        cdef int failed
        self.helper = <helper_thread *>PyMem_Calloc(1, sizeof(helper_thread))
        if not self.helper:
            raise MemoryError
        failed = helper_start(self.helper)
        if failed:
            PyMem_Free(self.helper)
            self.helper = NULL
            raise OSError(failed, "no thread could be started")

    def __dealloc__(self):
        if self.helper:
            helper_close(self.helper)
            PyMem_Free(self.helper)

    def close(self):
        """End the thread, after the read that it takes part in."""
        with nogil:
            helper_close(self.helper)


cdef class ReadPlan:
    """The reads of `chunks` into `targets` that `places` allow; `places` has a `PLACE` for each chunk, in order."""

    cdef Py_ssize_t count
    cdef Py_ssize_t run_count
    cdef Py_ssize_t slot_count
    cdef uint8_t *in_slot
    cdef int segment_count
    cdef Py_buffer *held
    cdef lake_target *targets
    cdef lake_place *places
    cdef lake_run *found
    cdef uint64_t *known
    cdef uint64_t ask_from

    def __cinit__(
        self, list chunks not None, list targets not None, places not None, uint32_t longest,
        bint is_checked=False, bint asks=False,
    ):
        cdef Py_buffer raw
        cdef Py_ssize_t count = PyList_GET_SIZE(chunks)
        PyObject_GetBuffer(places, &raw, 0)
        try:
            if PyList_GET_SIZE(targets) != count or raw.len < count * <Py_ssize_t>sizeof(lake_place):
                raise ValueError("chunks, targets and places do not go together")
            self.held = <Py_buffer *>PyMem_Calloc(count + 1, sizeof(Py_buffer))
            self.targets = <lake_target *>PyMem_Calloc(count + 1, sizeof(lake_target))
            self.places = <lake_place *>PyMem_Calloc(count + 1, sizeof(lake_place))
            self.found = <lake_run *>PyMem_Calloc(count + 1, sizeof(lake_run))
            self.in_slot = <uint8_t *>PyMem_Calloc(count + 1, 1)
            self.known = <uint64_t *>PyMem_Calloc(min(count, <Py_ssize_t>LAKE_SEGMENTS) + 1, sizeof(uint64_t))
            if not (
                self.held and self.targets and self.places and self.found and self.known and self.in_slot
            ):
                raise MemoryError
            self.count = count
            self.ask_from = 1 if asks else LAKE_ASK_FROM
            memcpy(self.places, raw.buf, count * sizeof(lake_place))
        finally:
            PyBuffer_Release(&raw)
        self.plan(tuple(chunks), tuple(targets), longest, is_checked)

    def __dealloc__(self):
        cdef Py_ssize_t number
        if self.held:
            for number in range(self.count):
                PyBuffer_Release(&self.held[number])  # nothing where no buffer is held
        PyMem_Free(self.held)
        PyMem_Free(self.targets)
        PyMem_Free(self.places)
        PyMem_Free(self.found)
        PyMem_Free(self.known)
        PyMem_Free(self.in_slot)

    cdef int plan(self, tuple chunks, tuple targets, uint32_t longest, bint is_checked) except -1:
        cdef Py_ssize_t number, last = -1
        cdef uint64_t end = 0, room = 0
        cdef uint64_t run_bytes = LAKE_CHECKED_RUN_BYTES if is_checked else LAKE_RUN_BYTES
        cdef uint32_t longest_read = LAKE_CHECKED_BYTES_MAX if is_checked else longest
        cdef bint is_open = False
        cdef int segment
        cdef lake_place *place
        cdef lake_run *run = NULL
        for number in range(self.count):
            place = &self.places[number]
            if place.stored_bytes == 0 or not is_data(chunks[number]):
                continue
            if place.tier == LAKE_TIER_DRAM and place.stored_bytes <= longest:
                self.hold(number, targets[number])
                self.in_slot[number] = 1
                self.slot_count += 1
            if place.tier != LAKE_TIER_SEGMENT or place.stored_bytes > longest_read:
                continue
            self.hold(number, targets[number])
            if self.targets[number].length < place.stored_bytes:
                continue
            segment = self.segment_index(place.segment)
            if segment < 0:
                continue
            if (
                is_open
                and number == last + 1
                and run.segment == <uint32_t>segment
                and place.offset == end
                and place.stored_bytes <= min(room, <uint64_t>LAKE_GRANULE)
            ):
                run.count += 1
            else:
                run = &self.found[self.run_count]
                self.run_count += 1
                run.segment = segment
                run.offset = place.offset
                run.first = number
                run.count = 1
                room = run_bytes
            run.bytes += place.stored_bytes
            is_open = place.stored_bytes <= LAKE_GRANULE and run.count < LAKE_RUN_CHUNKS
            end = <uint64_t>place.offset + place.stored_bytes
            room = room - place.stored_bytes if room > place.stored_bytes else 0
            last = number
        return 0

    cdef int hold(self, Py_ssize_t number, target) except -1:
        PyObject_GetBuffer(target, &self.held[number], PyBUF_WRITABLE)
        self.targets[number].at = self.held[number].buf
        self.targets[number].length = <uint64_t>self.held[number].len
        return 0

    cdef int segment_index(self, uint64_t segment):
        """Return the segment's index among the plan's segments; -1 when there are too many."""
        cdef int index
        for index in range(self.segment_count - 1, -1, -1):
            if self.known[index] == segment:
                return index
        if self.segment_count == LAKE_SEGMENTS:
            return -1
        self.known[self.segment_count] = segment
        self.segment_count += 1
        return self.segment_count - 1

    @property
    def segments(self):
        """Segments whose descriptors `read` needs, in this order."""
        return [self.known[index] for index in range(self.segment_count)]

    @property
    def runs(self):
        """Count of runs."""
        return self.run_count

    @property
    def others(self):
        """Indexes of chunks whose place is known, but which are neither in a run nor for `copy`."""
        cdef Py_ssize_t number, next_run = 0
        cdef list others = []
        number = 0
        while number < self.count:
            if next_run < self.run_count and self.found[next_run].first == <uint32_t>number:
                number += self.found[next_run].count
                next_run += 1
                continue
            if self.places[number].tier and not self.in_slot[number]:
                others.append(number)
            number += 1
        return others

    @property
    def slots(self):
        """Count of chunks for `copy`: their places are in the DRAM tier, and they are no longer than `longest`."""
        return self.slot_count

    def copy(
        self, Py_ssize_t first, Py_ssize_t stop, generations not None, slabs not None, uint64_t slab_bytes,
        bint by_call=False,
    ):
        """Copy those of the chunks [first, stop) that are in slots; return the ones whose slot did not change.

        `by_call`: the targets may become shorter meanwhile, so the kernel copies, and says so.
        """
        cdef Py_buffer marks, memory
        cdef Py_ssize_t number
        cdef lake_place *place
        cdef lake_cells cells
        cdef lake_extent source
        cdef bint is_same
        cdef list arrived = []
        PyObject_GetBuffer(generations, &marks, 0)
        try:
            cells.generations, cells.count, cells.slab_bytes = <uint64_t *>marks.buf, marks.len // 8, slab_bytes
            for number in range(max(first, 0), min(stop, self.count)):
                if not self.in_slot[number]:
                    continue
                place = &self.places[number]
                found = slabs.get(lake_slab_of(place))
                if found is None or self.targets[number].length < place.stored_bytes:
                    continue
                PyObject_GetBuffer(found, &memory, 0)
                is_same = False
                if lake_extent_of_cell(&cells, <uint8_t *>memory.buf, memory.len, place, &source):
                    with nogil:
                        if by_call:
                            is_same = lake_extent_copy_by_call(
                                &source, place.stored_bytes, self.targets[number].at
                            )
                        else:
                            is_same = lake_extent_copy(
                                &source, 0, place.stored_bytes, <uint8_t *>self.targets[number].at
                            )
                PyBuffer_Release(&memory)
                if is_same:
                    arrived.append((number, place.stored_bytes, place.crc))
        finally:
            PyBuffer_Release(&marks)
        return arrived

    def parts(self, uint64_t part_bytes):
        """Return the runs in parts of at most `part_bytes`, or one run: first run and end of each part."""
        cdef Py_ssize_t at, first = 0
        cdef uint64_t size = 0
        cdef list parts = []
        for at in range(self.run_count):
            if at > first and size + self.found[at].bytes > part_bytes:
                parts.append((first, at))
                first, size = at, 0
            size += self.found[at].bytes
        if self.run_count:
            parts.append((first, self.run_count))
        return parts

    def read(self, Py_ssize_t first, Py_ssize_t stop, descriptors not None):
        """Read the runs [first, stop) by the descriptors of `segments`; return the chunks read whole, unchecked."""
        cdef Py_ssize_t at, number
        cdef int64_t left
        cdef lake_run *run
        cdef lake_place *place
        cdef list arrived = []
        self.read_runs(first, stop, descriptors)
        for at in range(first, stop):
            run = &self.found[at]
            left = run.came
            for number in range(run.first, run.first + run.count):
                place = &self.places[number]
                left -= place.stored_bytes
                if left < 0:
                    break
                arrived.append((number, place.stored_bytes, place.crc))
        return arrived

    def read_lengths(self, Py_ssize_t first, Py_ssize_t stop, descriptors not None, list lengths not None):
        """Like `read`, but write the length of each chunk read whole to its index in `lengths`."""
        cdef Py_ssize_t at, number
        cdef int64_t left
        cdef lake_run *run
        if PyList_GET_SIZE(lengths) != self.count:
            raise ValueError("chunks and lengths do not go together")
        self.read_runs(first, stop, descriptors)
        for at in range(first, stop):
            run = &self.found[at]
            left = run.came
            for number in range(run.first, run.first + run.count):
                left -= self.places[number].stored_bytes
                if left < 0:
                    break
                lengths[number] = self.places[number].stored_bytes

    def read_checked(self, descriptors not None, list lengths not None, HelperThread helper=None):
        """Read all runs and check their chunks; write the length of each right one to its index in `lengths`."""
        cdef int files[LAKE_SEGMENTS]
        cdef int flags[LAKE_SEGMENTS]
        cdef lake_checked_job job
        cdef Py_ssize_t number
        cdef uint64_t size = 0
        if PyList_GET_SIZE(lengths) != self.count:
            raise ValueError("chunks and lengths do not go together")
        self.take_descriptors(descriptors, files, flags)
        job.runs, job.targets, job.places = self.found, self.targets, self.places
        job.files, job.flags, job.ask_from = files, flags, self.ask_from
        job.next, job.stop = 0, <uint32_t>self.run_count
        job.right = <uint8_t *>PyMem_Calloc(self.count + 1, 1)
        if not job.right:
            raise MemoryError
        for number in range(self.run_count):
            size += self.found[number].bytes
        with nogil:
            if (
                helper is not None and self.run_count > 1 and size >= LAKE_HELPED_FROM
                and helper_begin(helper.helper, lake_work_off, &job)
            ):
                lake_work_off(&job)
                helper_end(helper.helper)
            else:
                lake_work_off(&job)
        try:
            if PyList_GET_SIZE(lengths) != self.count:  # another thread had the lock
                raise ValueError("chunks and lengths do not go together")
            for number in range(self.count):
                if job.right[number]:
                    lengths[number] = self.places[number].stored_bytes
        finally:
            PyMem_Free(job.right)

    cdef int take_descriptors(self, descriptors, int *files, int *flags) except -1:
        cdef Py_ssize_t at
        if len(descriptors) != self.segment_count:
            raise IndexError("not a descriptor for each segment")
        for at, held in enumerate(descriptors):
            if at == self.segment_count:
                break
            files[at], flags[at] = -1, 0
            if held is not None:
                files[at], flags[at] = held
        return 0

    cdef int read_runs(self, Py_ssize_t first, Py_ssize_t stop, descriptors) except -1:
        cdef int files[LAKE_SEGMENTS]
        cdef int flags[LAKE_SEGMENTS]
        cdef Py_ssize_t at
        cdef lake_run *run
        if not 0 <= first <= stop <= self.run_count:
            raise IndexError("no such runs")
        self.take_descriptors(descriptors, files, flags)
        with nogil:
            for at in range(first, stop):
                run = &self.found[at]
                lake_read(run, self.targets, self.places, files[run.segment], flags[run.segment], self.ask_from)
        return 0


def are_bytes(list targets not None):
    """Return True if all targets are views of contiguous writable bytes, as `ReadPlan` and checks take them."""
    cdef Py_buffer *view
    for target in targets:
        if not PyMemoryView_Check(target):
            return False
        view = PyMemoryView_GET_BUFFER(target)
        if view.readonly or view.ndim != 1 or view.itemsize != 1 or not PyBuffer_IsContiguous(view, b"C"):
            return False
        if view.format != NULL and (view.format[0] != b"B" or view.format[1] != 0):
            return False
    return True


cdef inline bint is_data(object chunk):
    return PyBytes_CheckExact(chunk) and PyBytes_GET_SIZE(chunk) > 0 and PyBytes_AS_STRING(chunk)[0] == LAKE_DATA
