"""Messages about memory that a client lends to the engine, so that payload moves without passing the socket."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request
from lakefs.wire.object_messages import NameChange, NameResults
from lakefs.wire.session_messages import Stored


class MemoryLent(Message, frozen=True):
    """The number of the lent memory, valid on this connection."""

    memory: int


class LendMemory(Request, frozen=True):
    """Lend the memory whose descriptor comes along: a memfd, or a file on tmpfs or hugetlbfs, of `size_bytes` at least.

    `writable`: the engine may also write to it, for which the descriptor has to be open for reading and writing.
    The lending ends with ReturnMemory or with the connection.  On the Unix socket only.
    InvalidArgument, PermissionDenied, EngineBusy when too much is lent already.
    """

    OP = 49
    REPLY = MemoryLent
    size_bytes: int
    writable: bool = False


class ReturnMemory(Request, frozen=True):
    """End a lending; one that has ended already is ignored.

    When it is answered, the engine touches the memory no more: requests that use it have come to their ends.
    """

    OP = 53
    REPLY = Done
    memory: int


class StoreSlots(Request, frozen=True):
    """Store slots of lent memory as data chunks, each 1 B to 4 MiB; the engine copies them before it hashes.

    SourceChanged when the memory was shrunk.  SessionLost when it is not lent on this connection (any more).
    """

    OP = 51
    REPLY = Stored
    session: bytes
    memory: int
    offsets: list[int]
    lengths: list[int]


class PutSlots(Request, frozen=True):
    """As PutObjects, from slots of lent memory: each is the content of one name.  Errors as of StoreSlots."""

    OP = 54
    REPLY = NameResults
    memory: int
    offsets: list[int]
    lengths: list[int]
    changes: list[NameChange]
    durable: bool = True
