"""`LentPayload`: a connection to a member on this machine, whose payload goes through lent memory.

    StoreShards   shards that lie in the area are named by their offsets; the member copies them, and compares the copy
                  with the checksums of the request, as with any memory that is lent to an engine

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
import structlog
import trio

from engine.members.lent_area import LentArea
from lakefs.client.trio.calls import Answered
from lakefs.client.trio.engine import RemoteEngine
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import Buffer
from lakefs.limits import MEMBER_ANSWER_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

LENT_FROM_BYTES: Final = 64 << 10
"""Payload of less is sent: a system call copies it with the request."""
_log: Final = structlog.get_logger(__name__)


async def lend(engine: RemoteEngine, area: LentArea) -> int:
    """Lend the area to a member; return its number there, 0 if it takes none.  EngineUnreachable."""
    if not engine.carries_descriptors or not engine.offers.lent_memory:
        return 0
    try:
        reply = await engine.call(m.LendMemory(area.size_bytes), descriptors=[area.descriptor])
    except EngineUnreachable:
        raise
    except LakeError as error:
        _log.warning("payload for a member goes through its socket", reason=error.message)
        return 0
    assert isinstance(reply.message, m.MemoryLent)
    return reply.message.memory


class LentPayload:
    """`MemberClient` over a connection to which the area is lent as `number`."""

    def __init__(self, engine: RemoteEngine, area: LentArea, number: int) -> None:
        self._engine = engine
        self._area = area
        self._number = number

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
        return await self._engine.call(request, body, into=into)

    def begin(self, request: m.Request, into: Sequence[memoryview], done: Answered) -> Callable[[], None] | None:
        """See `RemoteEngine.begin`."""
        return self._engine.begin(request, into, done)

    async def _call_to_end(self, request: m.Request) -> Reply:
        """Call; when cancelled, end when the member has answered, or cannot any more."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + MEMBER_ANSWER_S):
            return await self._engine.call(request)
        raise EngineUnreachable(f"a request was not answered within {MEMBER_ANSWER_S:g} s")
