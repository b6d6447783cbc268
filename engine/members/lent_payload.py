"""`LentPayload`: a connection to a member on this machine, whose payload goes through lent memory.

    StoreShards   shards that lie in the area are named by their offsets; the member copies them, and compares the copy
                  with the checksums of the request, as with any memory that is lent to an engine
    ReadChunks    shards that are wanted in memory for reads are named with their places there; the member reads from
                  its disk to these, and the answer has no bytes

What lies elsewhere goes through the socket.

Rules kept here:
- The memory of a request's shards is the caller's again when the call ends.  So a call that is cancelled waits for the
  answer, or for the end of the connection, at most MEMBER_ANSWER_S: until then the member may read the slots.  One that
  reads them even later, because it was stopped, finds other bytes than the checksums say, and stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import outcome
import structlog
import trio

from engine.members.lent_area import LentArea
from engine.members.read_memory import ReadMemory
from lakefs.client.trio.calls import Answered
from lakefs.client.trio.engine import RemoteEngine
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import Buffer
from lakefs.limits import MEMBER_ANSWER_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

LENT_FROM_BYTES: Final = 64 << 10
"""Payload of less is sent: a system call copies it with the request."""
_log: Final = structlog.get_logger(__name__)


async def lend(engine: RemoteEngine, area: LentArea, *, writable: bool = False) -> int:
    """Lend an area to a member; return its number there, 0 if it takes none.  EngineUnreachable."""
    if not engine.carries_descriptors or not engine.offers.lent_memory:
        return 0
    try:
        reply = await engine.call(m.LendMemory(area.size_bytes, writable), descriptors=[area.descriptor])
    except EngineUnreachable:
        raise
    except LakeError as error:
        _log.warning("payload for a member goes through its socket", reason=error.message)
        return 0
    assert isinstance(reply.message, m.MemoryLent)
    return reply.message.memory


class LentPayload:
    """`MemberClient` over a connection to which the area is lent as `number`."""

    def __init__(
        self, engine: RemoteEngine, area: LentArea, number: int, reads: ReadMemory | None = None, reads_number: int = 0
    ) -> None:
        """`reads`: lent for writing as `reads_number`, if that is not 0."""
        self._engine = engine
        self._area = area
        self._number = number
        self._reads = reads if reads_number else None
        self._reads_number = reads_number

    @property
    def draining(self) -> bool:
        """See `MemberClient`."""
        return self._engine.draining

    async def wait_ended(self) -> None:
        """See `MemberClient`."""
        await self._engine.wait_ended()

    async def call(self, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()) -> Reply:
        """See `MemberClient`."""
        if isinstance(request, m.StoreShards) and sum(map(len, body)) >= LENT_FROM_BYTES:
            offsets = self._area.offsets_of(body)
            if offsets is not None:
                return await self._call_to_end(msgspec.structs.replace(request, memory=self._number, offsets=offsets))
        if self._reads is not None and isinstance(request, m.ReadChunks) and into and not body:
            return await self._call_read(request, into)
        return await self._engine.call(request, body, into=into)

    def begin(self, request: m.Request, into: Sequence[memoryview], done: Answered) -> Callable[[], None] | None:
        """See `RemoteEngine.begin`."""
        if self._reads is not None and isinstance(request, m.ReadChunks) and request.shards and into:
            offsets = self._reads.offsets_of(into)
            if offsets is not None:
                return self._begin_read(self._reads, request, offsets, into, done)
        return self._engine.begin(request, into, done)

    async def _call_read(self, request: m.ReadChunks, into: Sequence[memoryview]) -> Reply:
        """Call; when cancelled, end at once, and let the memory wait for the member's answer."""
        results: list[outcome.Outcome[Reply]] = []
        came = trio.Event()

        def answered(result: outcome.Outcome[Reply]) -> None:
            results.append(result)
            came.set()

        give_up = self.begin(request, into, answered)
        if give_up is None:
            return await self._engine.call(request, into=into)
        try:
            await came.wait()
        except trio.Cancelled:
            give_up()
            raise
        return results.pop().unwrap()

    def _begin_read(
        self, memory: ReadMemory, request: m.ReadChunks, offsets: list[int], into: Sequence[memoryview], done: Answered
    ) -> Callable[[], None] | None:
        read = _LentRead(memory, into, done)
        lent = msgspec.structs.replace(request, memory=self._reads_number, targets=offsets)
        return None if self._engine.begin(lent, into, read.answered) is None else read.give_up

    async def _call_to_end(self, request: m.Request) -> Reply:
        """Call; when cancelled, end when the member has answered, or cannot any more."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + MEMBER_ANSWER_S):
            return await self._engine.call(request)
        raise EngineUnreachable(f"a request was not answered within {MEMBER_ANSWER_S:g} s")


class _LentRead:
    """A read whose bytes the member writes to `into`."""

    __slots__ = ("_done", "_into", "_memory")

    def __init__(self, memory: ReadMemory, into: Sequence[memoryview], done: Answered) -> None:
        self._memory = memory
        self._into = into
        self._done: Answered | None = done

    def give_up(self) -> None:
        """Want no answer; the memory is kept until it comes."""
        self._done = None

    def answered(self, result: outcome.Outcome[Reply]) -> None:
        """Take the answer: the bytes are in place."""
        into, self._into = self._into, ()
        if isinstance(result, outcome.Value):
            reply = result.value
            if not reply.body.parts and isinstance(reply.message, m.ReadChunksReply):
                reply.body = Body(_parts_of(reply.message.pieces, into), reply.body.release)
        elif isinstance(result, outcome.Error) and isinstance(result.error, EngineUnreachable):
            self._memory.retire(into)
        done, self._done = self._done, None
        if done is not None:
            done(result)
        elif isinstance(result, outcome.Value):
            result.value.body.release()


def _parts_of(pieces: Sequence[m.ReadPiece], into: Sequence[memoryview]) -> list[Buffer]:
    """Return the pieces that were written to their places; none if they do not fit them."""
    if len(pieces) != len(into) or any(piece.length > len(view) for piece, view in zip(pieces, into, strict=True)):
        return []
    return [view[: piece.length] for piece, view in zip(pieces, into, strict=True) if piece.length]
