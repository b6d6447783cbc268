# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The native door: parked connections, and answers that are repeated to them; `door.h` has the rules."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

import os
import select

from gateway.http.repeater cimport REPEATER_CAPSULE, door_ticket, repeater
from lakefs.host.span cimport bytes_of, span, span_of

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    """

cdef extern from "door.h" nogil:
    enum:
        DOOR_BYTES
        DOOR_ENDED
        DOOR_PEER_BYTES
    enum:
        DOOR_TO_RECEIVE
        DOOR_TO_SEND
    ctypedef struct door_connection:
        int64_t heard_ns, began_ns
        void *rest
        uint64_t held
        uint8_t is_parked, is_last, is_dormant, waits, peer_length
        uint8_t peer[DOOR_PEER_BYTES]
    ctypedef struct door:
        int epoll, loop
        uint8_t is_called
        repeater by
        door_connection *connections
        int connection_count, dormant, timed
        uint8_t *taken
    ctypedef struct door_handed:
        int descriptor, kind
        span received, unsent
        void *rest
    int64_t door_now_ns()
    int door_is_parked(const door *, int descriptor)
    void door_leave(door *, int descriptor)
    void door_begin(door *, int64_t until_ns)
    int door_await(door *, int64_t until_ns)
    void door_serve(door *, door_handed *)
    int door_long_under_way(door *, int64_t began_ns, door_handed *)
    void door_set_rest(door *, int descriptor, void *rest, int is_kept)
    void door_wait(door *, int descriptor, uint8_t wanted)
    int door_is_busy(const door *, int descriptor)
    int door_is_dormant(const door *, int descriptor)
    int door_let_go(door *, int descriptor)
    int door_end(door *, int descriptor)
    int door_answer(door *, door_ticket, span answer, door_handed *)
    int door_give_back(door *, door_ticket, span request, door_handed *)


@cython.no_gc_clear  # what repeats answers is in use until this is freed
cdef class Door:
    """Connections without a request under way, by their descriptors, which stay their owners'; but those of dormant
    connections are the door's.

    `by.native` is the port of what repeats answers (`repeater.h`).
    """

    cdef door *at
    cdef object by, epoll

    def __cinit__(self, by not None):
        self.at = <door *>calloc(1, sizeof(door))
        if self.at == NULL:
            raise MemoryError("no memory for the door")
        self.at.by = (<repeater *>PyCapsule_GetPointer(by.native, REPEATER_CAPSULE))[0]
        self.by = by
        self.epoll = select.epoll()
        self.at.epoll = self.epoll.fileno()
        self.at.loop = -1

    def __dealloc__(self):
        cdef int descriptor
        if self.at == NULL:
            return
        for descriptor in range(self.at.connection_count):
            door_end(self.at, descriptor)
            door_leave(self.at, descriptor)
        free(self.at.taken)
        free(self.at.connections)
        free(self.at)

    def fileno(self):
        """A descriptor that is readable while a parked connection is."""
        return self.at.epoll

    def close(self):
        """Release the descriptor; parked connections are no longer served."""
        self.epoll.close()
        self.at.epoll = -1

    def park(self, int descriptor, bytes peer not None, rest=None):
        """Receive from this connection from now on; OSError if the system does not watch it.

        `peer`: what the log says of its client; it is cut to 92 bytes.  `rest`: what `take_rest` of the
        repeater has returned, of an answer to go on with; then the connection is handed over when it has been sent.
        """
        self.make_room(descriptor)
        cdef door_connection *parked = self.at.connections + descriptor
        parked.peer_length = <uint8_t>min(<Py_ssize_t>DOOR_PEER_BYTES, len(peer))
        memcpy(parked.peer, <const char *>peer, parked.peer_length)
        self.epoll.register(descriptor, select.EPOLLIN)
        parked.is_parked, parked.is_last, parked.waits = 1, 0, DOOR_TO_RECEIVE
        parked.heard_ns = door_now_ns()
        if rest is not None:
            parked.began_ns = rest.began_ns
            door_set_rest(self.at, descriptor, <void *><size_t>rest.release(), 1)
            door_wait(self.at, descriptor, DOOR_TO_SEND)

    def leave(self, int descriptor):
        """Leave a connection to its owner, if it is parked; an answer under way is broken off."""
        door_leave(self.at, descriptor)

    def let_go(self, int descriptor):
        """Make a parked connection dormant: its descriptor is the door's, which closes it unless it hands it over.

        Return False, and change nothing, if it is busy or finishing, or its peer was cut.
        """
        return bool(door_let_go(self.at, descriptor))

    def end(self, int descriptor):
        """Close a dormant connection, in any state; return False if there is no such one."""
        return bool(door_end(self.at, descriptor))

    def is_dormant(self, int descriptor):
        """Return True for a connection that was let go, and has not been handed over."""
        return bool(door_is_dormant(self.at, descriptor))

    @property
    def dormant_count(self):
        """Count of dormant connections."""
        return self.at.dormant

    def dormant(self):
        """Return the descriptors of all dormant connections."""
        cdef int descriptor
        if not self.at.dormant:
            return []
        return [descriptor for descriptor in range(self.at.connection_count) if door_is_dormant(self.at, descriptor)]

    def peer(self, int descriptor):
        """Return the peer of a connection as it was last parked."""
        if not 0 <= descriptor < self.at.connection_count:
            return b""
        return PyBytes_FromStringAndSize(
            <const char *>self.at.connections[descriptor].peer, self.at.connections[descriptor].peer_length
        )

    def is_busy(self, int descriptor):
        """Return True for a parked connection with half a request, a request that is held, or an answer under way."""
        return bool(door_is_busy(self.at, descriptor))

    def finish(self, int descriptor):
        """Hand a connection over, with no bytes, when its busy time is over."""
        if door_is_parked(self.at, descriptor):
            self.at.connections[descriptor].is_last = 1

    def is_finishing(self, int descriptor):
        """Return True for a parked connection that is handed over when its busy time is over."""
        return bool(door_is_parked(self.at, descriptor) and self.at.connections[descriptor].is_last)

    def heard_ns(self, int descriptor):
        """Time of the monotonic clock when bytes of a parked connection last came or went, or when it was parked."""
        return self.at.connections[descriptor].heard_ns if door_is_parked(self.at, descriptor) else 0

    def began_ns(self, int descriptor):
        """Time of the monotonic clock when the last request of a parked connection began."""
        return self.at.connections[descriptor].began_ns if door_is_parked(self.at, descriptor) else 0

    def watch_loop(self, int descriptor):
        """End waits also when this descriptor is readable: the owner's loop has work of its own then."""
        self.epoll.register(descriptor, select.EPOLLIN)
        self.at.loop = descriptor

    def wait(self, int64_t until_ns):
        """Wait for connections, up to that time of the monotonic clock; return True if there are some to serve."""
        cdef int found
        with nogil:
            found = door_await(self.at, until_ns)
        return bool(found)

    @property
    def is_called(self):
        """True if the loop had other work when it was last looked at."""
        return bool(self.at.is_called)

    def begin(self, int64_t most_ns):
        """Begin a turn of at most about `most_ns`."""
        door_begin(self.at, door_now_ns() + most_ns)

    def serve(self):
        """Serve until no connection is ready, one is handed over, or the turn is over.

        Return None, or a connection that is its owner's again: (descriptor, received, unsent, rest).  `received` of None
        means that the connection has ended.  Else `unsent` bytes of an answer go out first, then its rest, if there is
        one: what `by.take_rest` has returned.
        """
        cdef door_handed handed
        with nogil:
            door_serve(self.at, &handed)
        return self.handed_over(&handed)

    def answer(self, int descriptor, uint64_t number, bytes answer not None):
        """Answer a request that is held, by its ticket; return, as `serve` does, its connection if it is handed over.

        The answer to a connection that has left is dropped.
        """
        cdef door_handed handed
        door_answer(self.at, door_ticket(descriptor, number), span_of(answer), &handed)
        return self.handed_over(&handed)

    def give_back(self, int descriptor, uint64_t number, bytes request not None):
        """Hand a connection over with the request that is held, by its ticket; return it as `serve` does; None: it left."""
        cdef door_handed handed
        door_give_back(self.at, door_ticket(descriptor, number), span_of(request), &handed)
        return self.handed_over(&handed)

    def late(self, int64_t idle_ns, int64_t stall_ns):
        """Return the descriptors of parked connections on which nothing has come for `idle_ns`, or gone for `stall_ns`.

        Those whose request is held wait for us.
        """
        cdef int64_t now_ns = door_now_ns(), allowed_ns
        cdef int descriptor
        found = []
        for descriptor in range(self.at.connection_count):
            if self.at.connections[descriptor].is_parked and not self.at.connections[descriptor].held:
                allowed_ns = idle_ns if self.at.connections[descriptor].rest == NULL else stall_ns
                if now_ns - self.at.connections[descriptor].heard_ns > allowed_ns:
                    found.append(descriptor)
        return found

    def quietest(self):
        """Return the parked connection that is not busy and was heard longest ago; -1 if there is none."""
        cdef int descriptor, found = -1
        for descriptor in range(self.at.connection_count):
            if self.at.connections[descriptor].is_parked and not door_is_busy(self.at, descriptor):
                if found < 0 or self.at.connections[descriptor].heard_ns < self.at.connections[found].heard_ns:
                    found = descriptor
        return found

    @property
    def timed(self):
        """Count of connections that `take_long` returns in time: with half a request, or content that is not kept."""
        return self.at.timed

    def take_long(self, int64_t began_ns):
        """Return, as `serve` does, a connection of `timed` on which that began before this time; None: there is none."""
        cdef door_handed handed
        door_long_under_way(self.at, began_ns, &handed)
        return self.handed_over(&handed)

    cdef object handed_over(self, const door_handed *handed):
        if handed.descriptor < 0:
            return None
        cdef const door_connection *of = self.at.connections + handed.descriptor
        received = None if handed.kind == DOOR_ENDED else bytes_of(handed.received)
        rest = None
        if handed.rest != NULL:
            rest = self.by.take_rest(<size_t>handed.rest, self.peer(handed.descriptor), of.began_ns)
        return handed.descriptor, received, bytes_of(handed.unsent), rest

    cdef int make_room(self, int descriptor) except -1:
        cdef int count = self.at.connection_count
        cdef door_connection *grown
        if descriptor < 0:
            raise ValueError("the connection is closed")
        if descriptor < count:
            return 0
        while count <= descriptor:
            count += 64 + count // 4
        grown = <door_connection *>realloc(self.at.connections, count * sizeof(door_connection))
        if grown == NULL:
            raise MemoryError("no memory for another connection")
        memset(grown + self.at.connection_count, 0, (count - self.at.connection_count) * sizeof(door_connection))
        self.at.connections, self.at.connection_count = grown, count
        return 0
