"""The port between the door and what it repeats, for Cython; `repeater.h` has the rules."""

from libc.stdint cimport int64_t, uint64_t

from lakefs.host.span cimport span

cdef extern from "gateway/http/repeater.h" nogil:
    const char *REPEATER_CAPSULE

    ctypedef struct door_ticket:
        int descriptor
        uint64_t number

    ctypedef struct repeated:
        pass

    ctypedef struct repeater:
        void *context
        void (*begin)(void *)
        size_t (*repeat)(void *, span, int64_t, door_ticket, repeated *)
        void (*sent)(void *, span, uint64_t)
        span (*piece)(void *, void *)
        int (*taken)(void *, void *, size_t)
        void (*ended)(void *, void *, span, uint64_t, int)
