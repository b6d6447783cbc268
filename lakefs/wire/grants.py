"""Messages about places of chunks, and about memory that engine and client share; see `lakefs.wire.messages`.

Grants say where chunks are; pins keep chunks at their places.  A client reads the shared index, the stamps of names and
the slabs of the DRAM tier itself.  Memory that a client lends is read and written by the engine, so no payload passes
the socket.
"""

from __future__ import annotations

from lakefs.wire.base import Done, Failure, Message, NameChange, NameResults, Request
from lakefs.wire.fabric_messages import FabricMemory
from lakefs.wire.session_messages import Stored


class Grant(Message, frozen=True, gc=False):
    """The place of a chunk's bytes; `medium` is one of `lakefs.wire.media`.

    `crc` is the CRC of the payload (if it is one granule), or of the vector of granule CRCs that follows the payload.
    `epoch` lets a reader notice a moved chunk; correctness rests on the check of the bytes (`lakefs.content.verify`).
    """

    medium: int
    segment: int = 0
    offset: int = 0
    stored_bytes: int = 0
    logical_bytes: int = 0
    codec: int = 0
    crc: int = 0
    epoch: int = 0


class Pinned(Message, frozen=True):
    """A grant for each chunk, in order; MEDIUM_NONE for one that does not exist and was not pinned."""

    grants: list[Grant]


class PinChunks(Request, frozen=True):
    """Keep chunks at their places: neither gc nor compaction punches or unlinks them, whatever happens to their names.

    For readers with mappings of their own.  Pins are counted: a chunk that this connection has pinned already stays at
    its place and gets one more pin.  Pins end with UnpinChunks, or with the connection.  PermissionDenied over TCP;
    EngineBusy when too much is pinned.
    """

    OP = 45
    REPLY = Pinned
    chunks: list[bytes]


class UnpinChunks(Request, frozen=True):
    """Remove one pin of each chunk; a chunk that is not pinned is ignored."""

    OP = 46
    REPLY = Done
    chunks: list[bytes]


class SharedIndexOpened(Message, frozen=True):
    """A read-only descriptor of the shared index, sent with this frame.  It has room for `entries` chunks."""

    entries: int


class OpenSharedIndex(Request, frozen=True):
    """Get the shared index: the table of chunks' places, which a client maps and reads.  See `docs/format.md`.

    PermissionDenied over TCP; UnsupportedVersion when this engine shares none.  A table whose magic has become
    zeros was replaced by a larger one: send this request again.
    """

    OP = 47
    REPLY = SharedIndexOpened


# --- stamps ------------------------------------------------------------------------------------------


class StampsOpened(Message, frozen=True):
    """A read-only descriptor of the engine's stamps, sent with this frame."""


class OpenStamps(Request, frozen=True):
    """Get the memory of stamps, by which a client knows that answers with stamps still stand.

    PermissionDenied over TCP; UnsupportedVersion when this engine has none (HelloReply lacks FEATURE_STAMPS).
    """

    OP = 58
    REPLY = StampsOpened


# --- slabs of the DRAM tier --------------------------------------------------------------------------


class SlabsOpened(Message, frozen=True):
    """Slabs whose read-only descriptors arrive with this frame, in order, then the descriptor of the generations.

    Missing slabs are left out.  `slab_bytes` is the length of each; 0, and no descriptor: the engine has no tier.
    """

    slabs: list[int]
    slab_bytes: int


class OpenSlabs(Request, frozen=True):
    """Get descriptors of slabs, at most 63 a request; on the Unix socket only.  See `lakefs.grants.dram_slabs`."""

    OP = 48
    REPLY = SlabsOpened
    slabs: list[int]


class NoteReads(Request, frozen=True):
    """Report chunks that the client read without a Locate, at most 4,096: the tier keeps chunks that are read often.

    `keys` of `space`, at most 4,096: keyed blobs that it read without a KeyedMatch; keys read often are evicted late.
    SpaceNotFound, for keys of a space that does not exist.
    """

    OP = 57
    REPLY = Done
    chunks: list[bytes]
    space: int = 0
    keys: list[bytes] = []


# --- lent memory -------------------------------------------------------------------------------------


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

    With `fabric` the slots lie in that memory, and the engine READs them; `memory` is 0.

    SourceChanged when the memory was shrunk.  SessionLost when it is not, or no longer, lent on this connection; with
    `fabric`, when the connection has no queue pair, or lost it.
    """

    OP = 51
    REPLY = Stored
    session: bytes
    memory: int
    offsets: list[int]
    lengths: list[int]
    fabric: FabricMemory | None = None


class PutSlots(Request, frozen=True):
    """Like PutObjects, from slots of lent memory: each slot is the content of one name.  Errors as in StoreSlots."""

    OP = 54
    REPLY = NameResults
    memory: int
    offsets: list[int]
    lengths: list[int]
    changes: list[NameChange]
    durable: bool = True
    fabric: FabricMemory | None = None


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
    cancelled request, the engine no longer writes to the memory.  With `fabric` the slots lie in that memory, and the
    engine WRITEs them; `memory` is 0.  SessionLost too when the connection has no queue pair, or lost it.
    """

    OP = 52
    REPLY = SlotsLoaded
    memory: int
    chunks: list[bytes]
    offsets: list[int]
    lengths: list[int] = []
    checksums: bool = True
    fabric: FabricMemory | None = None


class ReadPiece(Message, frozen=True):
    """A piece of the body: whole granules (or the whole chunk) from `offset`, and their CRC32Cs, 4 bytes each.

    `length` 0 and a failure when it could not be read.
    """

    offset: int
    length: int
    crcs: bytes
    failure: Failure | None = None
