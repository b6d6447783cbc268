"""Ports of a head: the members as one process reaches them, and chunks as they lie over the members.

`Members` hides connections: a member that is away answers at once with EngineUnreachable.  `Stripes` hides members: a
head's handlers store and read whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from lakefs.cluster.table import Table
from lakefs.errors import LakeError
from lakefs.ids import Buffer, ChunkId, GcGeneration, MemberId
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Request

MEMBER_RETURN_S: Final = 10.0
"""Time for which a write that has nowhere else to go waits for a member that went away, counted from that moment.

The process of a member that was killed is started again after 0.2 s, and opens its store in 1 to 3 s.
"""


class Known(Protocol):
    """The state of a lake, as far as a process knows it."""

    @property
    def tables(self) -> Sequence[Table]:
        """The tables of the ring epochs that are not retired, newest first; never empty."""
        ...

    @property
    def generation(self) -> GcGeneration:
        """The gc generation, as far as this process knows; it may be stale."""
        ...


class Members(Known, Protocol):
    """The members of a lake, and the tables that say what lies where."""

    def is_up(self, member: MemberId) -> bool:
        """Return True unless the member was found away, and has not answered since."""
        ...

    async def call(
        self, member: MemberId, request: Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        """Send a request to a member and return its reply; connects when needed.

        EngineUnreachable at once while the member is known to be away, or when its answer does not arrive in time.
        StaleEpoch when the member knows a newer table than the request's: `tables` is newer when this is raised.
        The memory of `body` is the caller's again when this returns or raises, also when cancelled.  That of `into` is
        only when this returns or raises a LakeError: after a cancelled call it may still be written to.
        """
        ...


class Begun(Protocol):
    """A request that was sent, and whose answer is still to come."""

    def give_up(self) -> None:
        """Want no answer: `done` is not called.  The memory of `into` may still be written to.  Again: nothing."""
        ...

    def expire(self) -> None:
        """Take the member for lost, because the answer took MEMBER_ANSWER_S; `done` gets the error now."""
        ...


@runtime_checkable
class BeginningMembers(Protocol):
    """Members to which requests are sent without a task that waits for each."""

    def begin(
        self, member: MemberId, request: Request, into: Sequence[memoryview], done: Callable[[Reply | LakeError], None]
    ) -> Begun | None:
        """Send a request now; `done` is called with its reply or error, once, in a later step, and raises nothing.

        None, and nothing was sent, while there is no connection to the member that takes it: `Members.call` makes one.
        """
        ...


class ReturningMembers(Members, Protocol):
    """Members that may be waited for."""

    async def wait_return(self, member: MemberId) -> bool:
        """Wait until a member that went away only just now is up again.

        Return False if it is not within MEMBER_RETURN_S of its going, at once when that time is over.
        """
        ...


class NewChunk(NamedTuple):
    """A chunk to store: its id, its bytes, which are whole and hashed, and the CRC32C of each of its granules."""

    chunk: ChunkId
    payload: memoryview
    crcs: bytes


class Wanted(NamedTuple):
    """A range of a chunk to read, of at least one byte.  `chunk_bytes` is the chunk's length; 0: not known.

    `length` 0: to the chunk's end.
    """

    chunk: ChunkId
    chunk_bytes: int
    offset: int = 0
    length: int = 0


class Got(NamedTuple):
    """A range that was read and checked: whole granules around what was wanted, and their CRC32Cs.

    `offset` is that of `payload` in the chunk, which has `chunk_bytes` in all.
    """

    offset: int
    payload: memoryview
    crcs: bytes
    chunk_bytes: int


class Stripes(Protocol):
    """Chunks, each erasure-coded over the members of its row."""

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """Return the length of each chunk that is stored: all its shards are, durable and touched in that generation.

        0 for a chunk that is absent.

        Missing shards of a chunk that is there otherwise are not made here: such a chunk is "absent", and stored anew.
        """
        ...

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        """Store chunks; return for each if it was new.  All are durable, and touched in that generation, on return.

        All shards are stored, at homes, substitutes or other members of the row; or so many that the chunk is read
        when one more member goes, and its partition was noted as dirty before this returns.
        ClusterDegraded when too few members are up for that, StoreFull when too few have room: nothing may be bound to
        any of the chunks.  Cancelled, some shards may be stored; gc frees them.
        """
        ...

    async def lengths(self, chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        """Return the length of each chunk as its members say it; nothing is read while they agree.

        A chunk's error is that of a read.
        """
        ...

    async def read(self, wanted: Sequence[Wanted]) -> list[Got | LakeError]:
        """Read ranges of chunks; each is checked: whole chunks by their BLAKE3, ranges by their granules' CRC32C.

        Missing data shards are decoded from others.  ChunkNotFound when no shard of a chunk is found anywhere,
        ClusterDegraded when too few shards are, CorruptionError when they do not make the chunk, InvalidArgument when
        the range is not in it.
        """
        ...
