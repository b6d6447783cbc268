# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The native layer of a mount, for Python; `layer.h` has what it does, `content.h` and `appends.h` what its reads and
writes rest on.

This module is loaded with its symbols global, and before pyfuse3: see `fuse.native.layer`, which alone imports it.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EINVAL, errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport free, malloc
from posix.uio cimport iovec

import os

cdef extern from "content.h" nogil:
    enum:
        LAKE_PIECES_MOST
    ctypedef struct lake_content:
        pass
    ctypedef struct lake_contents:
        uint64_t handle_count
        uint64_t not_cached
        uint64_t failed
    lake_contents lake_all
    lake_content *lake_content_make(uint64_t size, const uint64_t *lengths, uint32_t count)
    uint64_t lake_content_length(lake_content *, uint32_t index)
    bint lake_content_knows(lake_content *, uint32_t index)
    int lake_content_teach(lake_content *, uint32_t index, const uint8_t *memory, int descriptor, uint64_t place,
                           int nowait, const uint8_t *crcs, size_t crcs_bytes)
    int lake_contents_add(uint64_t handle, lake_content *)
    void lake_contents_remove(uint64_t handle)
    bint lake_content_end_now(lake_content *)
    void lake_content_wait(lake_content *)
    void lake_content_release(lake_content *)

cdef extern from "appends.h" nogil:
    ctypedef struct lake_append:
        pass
    ctypedef struct lake_append_table:
        uint64_t writes
        uint64_t bytes
        uint64_t failed
    lake_append_table lake_appends
    int lake_append_begin(lake_append *, uint64_t handle, int descriptor, uint64_t end, uint64_t limit)
    uint64_t lake_append_found(lake_append *, int64_t *time_ns)
    bint lake_append_end_now(lake_append *)
    void lake_append_wait(lake_append *)

cdef extern from "layer.h" nogil:
    ctypedef struct lake_layer:
        const char *why_not
        int session
        int is_attached
        int may_wake
        int has_passthrough
        int last_is_mapped
        int awake
        uint64_t reads, read_bytes, queued_ever, wakes, opens_set
    lake_layer lake
    void lake_arm(int threads, int passthrough)
    int lake_attach(int device)
    void lake_end()
    ssize_t lake_read(int session, void *into, size_t room, void *unused)
    ssize_t lake_write(int session, iovec *parts, int count, void *unused)
    int lake_backing_open(int descriptor)
    int lake_backing_close(uint32_t id)
    int lake_want_opened(uint64_t handle, uint32_t set, uint32_t cleared, int32_t backing)
    bint lake_unwant_opened(uint64_t handle)


cdef object _failed(int number):
    return OSError(number, os.strerror(number))


def arm(int threads, bint passthrough):
    lake_arm(threads, passthrough)


def why_not():
    return "" if lake.why_not == NULL else lake.why_not.decode()


def end():
    with nogil:
        lake_end()


def answers_reads():
    return bool(lake.is_attached and lake.may_wake)


def has_passthrough():
    return bool(lake.has_passthrough)


def write_is_mapped():
    return bool(lake.last_is_mapped)


def open_backing(int descriptor):
    cdef int found = lake_backing_open(descriptor)
    if found < 0:
        raise _failed(-found)
    return found


def close_backing(uint32_t backing):
    cdef int failed = lake_backing_close(backing)
    if failed:
        raise _failed(failed)


def answer_open(uint64_t handle, int32_t backing, uint32_t flags, uint32_t without):
    cdef int failed = lake_want_opened(handle, flags, without, backing)
    if failed:
        raise _failed(failed)


def take_back_open(uint64_t handle):
    return lake_unwant_opened(handle)


def remove(uint64_t handle):
    lake_contents_remove(handle)


def counters():
    return {
        "reads": lake.reads,
        "read_bytes": lake.read_bytes,
        "writes": lake_appends.writes,
        "write_bytes": lake_appends.bytes,
        "failed_writes": lake_appends.failed,
        "passed_on": lake.queued_ever,
        "wakes": lake.wakes,
        "opens_set": lake.opens_set,
        "not_cached": lake_all.not_cached,
        "failed_checks": lake_all.failed,
        "handles": lake_all.handle_count,
    }


@cython.no_gc_clear  # the memories stay until its reads have ended
cdef class Content:
    cdef lake_content *content
    cdef bint is_ended
    cdef list memories

    def __init__(self, uint64_t size, lengths):
        cdef uint64_t *given
        cdef Py_ssize_t count = len(lengths), at = 0
        if self.content != NULL:
            raise ValueError("a content is made once")
        self.memories = []
        if not 0 < count <= LAKE_PIECES_MOST:
            raise ValueError(f"{count} pieces; at most {LAKE_PIECES_MOST} can be read natively")
        given = <uint64_t *>malloc(count * sizeof(uint64_t))
        if given == NULL:
            raise MemoryError
        try:
            for length in lengths:
                if at == count:
                    raise ValueError("the lengths grew")
                given[at] = length
                at += 1
            if at != count:
                raise ValueError("the lengths shrank")
            self.content = lake_content_make(size, given, <uint32_t>count)
            if self.content == NULL:
                raise _failed(errno)
        finally:
            free(given)

    def __dealloc__(self):
        if self.content != NULL:
            if lake_content_end_now(self.content):
                with nogil:
                    lake_content_wait(self.content)
            lake_content_release(self.content)

    cdef void _end(self) noexcept:
        if not self.is_ended:
            self.is_ended = True
            if lake_content_end_now(self.content):
                with nogil:
                    lake_content_wait(self.content)
            self.memories = []

    def end(self):
        self._end()

    def knows(self, uint32_t index):
        return lake_content_knows(self.content, index)

    def teach(self, uint32_t index, int descriptor, uint64_t place, int nowait, bytes crcs not None):
        self._teach(index, NULL, descriptor, place, nowait, crcs)

    def teach_memory(self, uint32_t index, memory, bytes crcs not None):
        cdef const uint8_t[::1] view = memory
        if self.is_ended or not view.shape[0] or <uint64_t>view.shape[0] != lake_content_length(self.content, index):
            raise _failed(EINVAL)
        self.memories.append(view)
        self._teach(index, &view[0], -1, 0, 0, crcs)

    cdef object _teach(self, uint32_t index, const uint8_t *memory, int descriptor, uint64_t place, int nowait,
                       bytes crcs):
        cdef int failed = lake_content_teach(
            self.content, index, memory, descriptor, place, nowait, <const uint8_t *>PyBytes_AS_STRING(crcs),
            PyBytes_GET_SIZE(crcs))
        if failed:
            raise _failed(failed)

    def add(self, uint64_t handle):
        cdef int failed = lake_contents_add(handle, self.content)
        if failed:
            raise _failed(failed)


cdef class Append:
    cdef lake_append append
    cdef bint is_begun

    def __init__(self, uint64_t handle, int descriptor, uint64_t end, uint64_t limit):
        cdef int failed
        if self.is_begun:
            raise ValueError("an append is made once")
        failed = lake_append_begin(&self.append, handle, descriptor, end, limit)
        if failed:
            raise _failed(failed)
        self.is_begun = True

    def __dealloc__(self):
        if self.is_begun:
            self._end()

    def found(self):
        cdef int64_t time_ns = 0
        cdef uint64_t end = lake_append_found(&self.append, &time_ns)
        return end, time_ns

    cdef void _end(self) noexcept:
        if lake_append_end_now(&self.append):
            with nogil:
                lake_append_wait(&self.append)

    def end(self):
        self._end()


def attach(int device):
    cdef int failed = lake_attach(device)
    if failed:
        raise _failed(failed)
    return lake.session


def receive(Py_ssize_t room):
    cdef bytes into = PyBytes_FromStringAndSize(NULL, room)
    cdef ssize_t length = lake_read(lake.session, PyBytes_AS_STRING(into), room, NULL)
    if length < 0:
        raise _failed(errno)
    return into[:length]


def send(bytes head not None, bytes body not None):
    cdef bytearray copied = bytearray(body)
    cdef iovec parts[2]
    parts[0].iov_base = PyBytes_AS_STRING(head)
    parts[0].iov_len = PyBytes_GET_SIZE(head)
    parts[1].iov_base = <char *>copied
    parts[1].iov_len = len(copied)
    if lake_write(lake.session, parts, 2 if body else 1, NULL) < 0:
        raise _failed(errno)
