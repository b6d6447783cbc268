"""Marks of one walk, sent to the members that may free the marked chunks: numbered batches, a few under way for each.

    async with open_marks(members, generation, homes) as marks:      GcBegin at each
        marks.add(chunk) ...; await marks.flush()                    GcMark: whole batches
        await marks.finish()                                         GcMark: the rest; returns when all are answered
        marks.receivers                                              who has every mark of its partitions

Rules kept here:
- A member that does not begin, or misses one batch, is left out from then on: it is sent neither marks nor the sweep.
  The reason is kept for the report.
- A batch that may have been lost is sent again, with its number: the member counts it once.  A member that has started
  again since has no marks of the walk, and says so.
- Memory: `flush` waits while two batches of a member are under way.  All members together have at most
  MARKS_PENDING_MAX chunks in batches that are filled, and as many in each of the two that are under way; beside that
  what `add` was given between two flushes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from engine.host.tasks import plain_errors
from engine.lake_gc.lake_gc_bounds import MARKS_PENDING_MAX
from engine.lake_gc.lake_gc_homes import CycleHomes
from engine.members.ports import Members
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import ChunkId, GcGeneration, MemberId, new_id16
from lakefs.limits import BATCH_MAX, MARKS_WINDOW
from lakefs.wire import messages as m

_BATCH_MIN: Final = 128
"""Chunks of a batch where a lake has thousands of members."""
_PAUSES_S: Final = (0.2, 2.0, 5.0)
"""Pauses before a batch is sent again: a connection is lost more often than a member."""


class MemberMarks:
    """The marks that one member was sent, and the reason why it frees nothing, if there is one."""

    def __init__(self, member: MemberId) -> None:
        self.member: Final = member
        self.waiting: Final[list[ChunkId]] = []
        self.batches = 0
        self.chunks = 0
        self.left_out_because = ""
        self.slots: Final = trio.Semaphore(MARKS_WINDOW)

    def leave_out(self, reason: str) -> None:
        """Send the member nothing more; the first reason is kept."""
        self.left_out_because = self.left_out_because or reason
        self.waiting.clear()


@asynccontextmanager
async def open_marks(members: Members, generation: GcGeneration, homes: CycleHomes) -> AsyncIterator[Marks]:
    """Begin the cycle at the members, and send marks until the block ends.  Members that do not begin are left out."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            marks = Marks(members, generation, homes, nursery)
            await marks.begin()
            yield marks
            nursery.cancel_scope.cancel()


class Marks:
    """The marks of one walk.  Made by `open_marks`."""

    def __init__(self, members: Members, generation: GcGeneration, homes: CycleHomes, nursery: trio.Nursery) -> None:
        self.walk: Final = new_id16()
        self.of_members: Final = {member: MemberMarks(member) for member in homes.members}
        self._members = members
        self._generation = generation
        self._nursery = nursery
        self._batch = max(_BATCH_MIN, min(BATCH_MAX, MARKS_PENDING_MAX // max(1, len(homes.members))))
        self._shift = 16 - homes.partition_bits
        waiting = {member: marks.waiting for member, marks in self.of_members.items()}
        self._waiting = [tuple([waiting[member] for member in homes]) for homes in homes.of_partition]
        """Lists of each partition's members: what is added to them is sent."""

    @property
    def receivers(self) -> list[MemberMarks]:
        """The members that have begun, and missed nothing."""
        return [marks for marks in self.of_members.values() if not marks.left_out_because]

    async def begin(self) -> None:
        """Begin the cycle at each member; returns when all have answered, or were found away."""

        async def begin_at(marks: MemberMarks) -> None:
            try:
                reply = await self._members.call(marks.member, m.GcBegin(self._generation, self.walk))
                reply.body.release()
            except LakeError as error:
                marks.leave_out(f"it has not begun the cycle: {error.message}")

        async with trio.open_nursery() as nursery:
            for marks in self.of_members.values():
                nursery.start_soon(begin_at, marks)

    def add(self, chunk: ChunkId) -> None:
        """Mark a chunk at all members that may free it."""
        for waiting in self._waiting[(chunk[1] << 8 | chunk[2]) >> self._shift]:
            waiting.append(chunk)

    async def flush(self) -> None:
        """Send whole batches; waits while a member has two under way.  Call it after some thousand marks."""
        for marks in self.of_members.values():
            if len(marks.waiting) >= self._batch or marks.left_out_because:
                await self._send(marks, self._batch)

    async def finish(self) -> None:
        """Send all that is left; returns when each batch was answered, or its member left out."""
        for marks in self.of_members.values():
            await self._send(marks, 1)
        for marks in self.of_members.values():
            for _ in range(MARKS_WINDOW):
                await marks.slots.acquire()
            for _ in range(MARKS_WINDOW):
                marks.slots.release()

    async def _send(self, marks: MemberMarks, least: int) -> None:
        """Send batches while at least so many chunks are waiting."""
        while len(marks.waiting) >= least and not marks.left_out_because:
            await marks.slots.acquire()
            batch = marks.waiting[: self._batch]
            del marks.waiting[: self._batch]
            self._nursery.start_soon(self._send_batch, marks, marks.batches, batch)
            marks.batches += 1
            marks.chunks += len(batch)
        if marks.left_out_because:
            marks.waiting.clear()

    async def _send_batch(self, marks: MemberMarks, number: int, batch: list[ChunkId]) -> None:
        request = m.GcMark(self.walk, number, [*batch])
        try:
            for pause_s in _PAUSES_S:
                if marks.left_out_because or await self._is_sent(marks, request):
                    return
                await trio.sleep(pause_s)
            reply = await self._members.call(marks.member, request)
            reply.body.release()
        except LakeError as error:
            marks.leave_out(f"marks did not reach it: {error.message}")
        finally:
            marks.slots.release()

    async def _is_sent(self, marks: MemberMarks, request: m.GcMark) -> bool:
        """Send a batch; False if it may have been lost."""
        try:
            reply = await self._members.call(marks.member, request)
        except EngineUnreachable:
            return False
        reply.body.release()
        return True
