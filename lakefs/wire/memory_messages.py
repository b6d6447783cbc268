"""Messages about lent memory: memory of a client that the engine reads and writes, so no payload passes the socket."""

from __future__ import annotations

from lakefs.wire.base import Done, Failure, Message, Request
from lakefs.wire.object_messages import NameChange, NameResults
from lakefs.wire.session_messages import Stored


class MemoryLent(Message, frozen=True):
    """The number of the lent memory, valid on this connection."""

    memory: int


class LendMemory(Request, frozen=True):
    """Lend the memory whose descriptor is sent along: a memfd, or a file on tmpfs or hugetlbfs.

    The file has at least `size_bytes`.  `writable`: the engine may also write to it; the descriptor must then be open
    for reading and writing.  The lending ends with ReturnMemory or with the connection.  On the Unix socket only.
    InvalidArgument, also for more than all lendings together may have; PermissionDenied; EngineBusy when there is no
    room for it now because too much is lent already.
    """

    OP = 49
    REPLY = MemoryLent
    size_bytes: int
    writable: bool = False


class ReturnMemory(Request, frozen=True):
    """End a lending; one that has ended already is ignored.

    After the answer the engine no longer touches the memory: all requests that use it have ended.
    """

    OP = 53
    REPLY = Done
    memory: int


class StoreSlots(Request, frozen=True):
    """Store slots of lent memory as data chunks, each 1 B to 4 MiB; the engine copies them before it hashes.

    SourceChanged when the memory was shrunk.  SessionLost when it is not, or no longer, lent on this connection.
    """

    OP = 51
    REPLY = Stored
    session: bytes
    memory: int
    offsets: list[int]
    lengths: list[int]


class PutSlots(Request, frozen=True):
    """Like PutObjects, from slots of lent memory: each slot is the content of one name.  Errors as in StoreSlots."""

    OP = 54
    REPLY = NameResults
    memory: int
    offsets: list[int]
    lengths: list[int]
    changes: list[NameChange]
    durable: bool = True


class SlotsLoaded(Message, frozen=True):
    """Lengths of the loaded payloads, 0 where none was; for each chunk the CRC32Cs of its granules, 4 bytes each.

    `crcs` is empty when the request asked for no checksums, `failures` when no slot failed.
    """

    lengths: list[int]
    crcs: list[bytes]
    failures: list[Failure | None] = []


class LoadSlots(Request, frozen=True):
    """Write the payload of each chunk to its offset in memory that was lent writable.

    `lengths`, if given, has the room of each slot, one for each chunk.  The engine does not check the payload: the
    client compares it with the chunk's id, or with the answer's checksums (left out with `checksums` false).  A slot
    has a failure of its own when its chunk does not exist, is damaged or is longer than the slot, or when the slot is
    outside the memory or overlaps another: ChunkNotFound, ChunkDamaged, InvalidArgument, SourceChanged (the memory was
    shrunk), StaleGrant (ask again).  SessionLost when the memory is not, or no longer, lent on this connection.
    Slots without a failure hold their payload; a slot with one may hold anything.  After the answer, also that of a
    cancelled request, the engine no longer writes to the memory.
    """

    OP = 52
    REPLY = SlotsLoaded
    memory: int
    chunks: list[bytes]
    offsets: list[int]
    lengths: list[int] = []
    checksums: bool = True
