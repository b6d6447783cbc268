"""Messages about memory that a client lends to the engine, so that payload moves without passing the socket."""

from __future__ import annotations

from lakefs.wire.base import Done, Failure, Message, Request
from lakefs.wire.object_messages import NameChange, NameResults
from lakefs.wire.session_messages import Stored


class MemoryLent(Message, frozen=True):
    """The number of the lent memory, valid on this connection."""

    memory: int


class LendMemory(Request, frozen=True):
    """Lend the memory whose descriptor comes along: a memfd, or a file on tmpfs or hugetlbfs, of `size_bytes` at least.

    `writable`: the engine may also write to it, for which the descriptor has to be open for reading and writing.
    The lending ends with ReturnMemory or with the connection.  On the Unix socket only.
    InvalidArgument, also when it is more than all lendings together may be; PermissionDenied; EngineBusy when it is
    not, and too much is lent already.
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


class SlotsLoaded(Message, frozen=True):
    """Lengths of what was loaded, 0 where nothing was; CRC32C of each granule of each chunk, 4 bytes each.

    `crcs` is empty when no checksums were asked for, `failures` when there are none.
    """

    lengths: list[int]
    crcs: list[bytes]
    failures: list[Failure | None] = []


class LoadSlots(Request, frozen=True):
    """Bring the payload of each chunk to its offset in memory that was lent writable.

    `lengths`, when given, are as many as chunks: the room of each slot.  The engine checks nothing: compare what
    arrived with the chunk's id, or with the answer's checksums (left out with `checksums` false).  A chunk that is not
    there, damaged, longer than its slot, outside the memory, or that overlaps another slot, has a failure of its own:
    ChunkNotFound, ChunkDamaged, InvalidArgument, SourceChanged (the memory was shrunk), StaleGrant (ask again).
    SessionLost when the memory is not lent on this connection (any more).
    Slots without a failure hold their payload; a slot with one may hold anything.  When it is answered, cancelled too,
    the memory is not written any more.
    """

    OP = 52
    REPLY = SlotsLoaded
    memory: int
    chunks: list[bytes]
    offsets: list[int]
    lengths: list[int] = []
    checksums: bool = True
