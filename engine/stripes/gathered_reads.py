"""Sends what readers ask of members: short reads of many readers as one request, and without a task for each.

    long asks    a request of their own, at once
    short asks   one request at a time to each member; what is asked while it is under way goes with the next one.
                 With other readers about, requests are sent when nobody has asked any more for some steps of the loop:
                 so those of clients whose requests arrive together go together

A request costs its member some tenths of a millisecond of CPU, whatever it asks for, and as much here.  A reader that
is alone waits for nobody.

Rules kept here:
- An answer is late after the member's p95 from its request on: what waits for another request adds to no request.
- A reader that ends gives up its asks.  A request that nobody waits for any more is given up, and makes place.
- An answer that is not that of its request fails all its asks.  What lies elsewhere than at an ask's target is copied:
  the target of one reader never keeps bytes of another.
- Asks are held back for HELD_S at most, by a reader that waits for its own (`settle`), also when it is cancelled.
- Otherwise nobody here looks at the clock: a reader that has waited for MEMBER_ANSWER_S calls `expire`.

Used on the loop.  Answers are taken in the task that receives them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import trio

from engine.members.ports import BeginningMembers, Begun
from engine.stripes.answer_times import AnswerTimes
from engine.stripes.chunk_read import Ask
from lakefs.errors import ChunkDamaged, EngineUnreachable, LakeError, ProtocolError
from lakefs.ids import MemberId
from lakefs.limits import BATCH_MAX, MEMBER_ANSWER_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

SHORT_BYTES: Final = 64 << 10
"""Payload of a part that goes with others: it fits the buffer of a socket."""
QUIET_STEPS: Final = 2
"""Steps of the loop in which nobody asks, until what was asked is sent: so many lead from a socket to an ask."""
HELD_S: Final = 0.005
"""Longest time for which asks are held back: less than a busy loop takes for as many requests one by one."""
TOGETHER_BYTES: Final = 1 << 20
"""Payload of a request of short parts."""


class Part:
    """Asks of one reader, to one member, that fit a request."""

    __slots__ = ("asks", "expires_at", "is_refused", "late_after_s", "late_at", "member", "sent", "size", "wake")

    def __init__(self, member: MemberId, asks: Sequence[Ask], late_after_s: float, wake: Callable[[], None]) -> None:
        """`late_after_s`: see `AnswerTimes`.  `wake` is called when the asks are answered, or the part is refused."""
        self.member = member
        self.asks = asks
        self.size = sum([len(ask.target) for ask in asks])
        self.wake: Callable[[], None] | None = wake
        """None once nobody waits for the answer."""
        self.sent: _Sent | None = None
        now = trio.current_time()
        self.late_after_s = late_after_s
        self.late_at = now + 2 * late_after_s
        """When its answer is late: counted from the request; until then, the request before it may take its time."""
        self.expires_at = now + MEMBER_ANSWER_S
        self.is_refused = False
        """True when there was no connection for it: the reader has to make one."""

    @property
    def is_under_way(self) -> bool:
        """True while an answer may come."""
        return self.wake is not None

    @property
    def is_answered(self) -> bool:
        """True when it was answered, and not refused."""
        return self.wake is None and not self.is_refused

    def begin(self, sent: _Sent | None) -> None:
        """Note that it is asked now."""
        self.sent = sent
        self.late_at = trio.current_time() + self.late_after_s

    def end(self, *, is_refused: bool = False) -> None:
        """Wake the reader, once."""
        wake, self.wake, self.is_refused = self.wake, None, is_refused
        if wake is not None:
            wake()


class GatheredReads:
    """Requests of all readers of a process."""

    def __init__(self, members: BeginningMembers, times: AnswerTimes) -> None:
        self._members = members
        self._times = times
        self._under_way: dict[MemberId, _Sent] = {}
        """The request of short parts that each member has; its members are those of the lake."""
        self._waiting: dict[MemberId, deque[Part]] = {}
        self.readers = 0
        """Readers that are under way."""
        self._asked = 0
        """Parts that were asked for since the last were sent."""
        self._is_settling = False

    def ask(self, part: Part) -> None:
        """Send a part, now or with others; it is refused while its member is not connected."""
        if part.size > SHORT_BYTES:
            self._send([part])
        elif part.member in self._under_way or self.readers > 1:
            self._waiting.setdefault(part.member, deque()).append(part)
            self._asked += 1
        else:
            self._send([part])

    async def settle(self) -> None:
        """Send what was asked when others have asked too; returns at once if nothing is held, or another does it."""
        if not self._asked or self._is_settling:
            return
        self._is_settling = True
        until = trio.current_time() + HELD_S
        try:
            seen, quiet = 0, 0
            while quiet < QUIET_STEPS and trio.current_time() < until:
                seen, quiet = self._asked, quiet + 1 if self._asked == seen else 0
                await trio.lowlevel.checkpoint()
        finally:
            self._is_settling = False
            self._asked = 0
            for member in [*self._waiting]:
                self._send_waiting(member)

    def give_up(self, part: Part) -> None:
        """Want no answer to a part."""
        part.wake = None
        if part.sent is None:
            return
        if not any(other.is_under_way for other in part.sent.parts):
            part.sent.begun.give_up()
            self._ended(part.sent)

    def expire(self, part: Part) -> None:
        """Take a part as not answered, and its member as lost if it was sent."""
        if part.sent is not None:
            part.sent.begun.expire()
        if part.is_under_way:
            for ask in part.asks:
                ask.read.failed(ask, EngineUnreachable("requests before it were not answered"))
            part.end()

    def _send(self, parts: list[Part]) -> None:
        """Send one request; refuses its parts if there is no connection for it."""
        sent = _Sent(parts, self._answered)
        member = parts[0].member
        targets = [ask.target for ask in sent.asks]
        begun = self._members.begin(member, read_request(sent.asks), targets, sent.answered)
        if begun is None:
            for part in parts:
                part.end(is_refused=True)
            return
        sent.begun = begun
        for part in parts:
            part.begin(sent)
        if sent.size <= SHORT_BYTES or len(parts) > 1:
            self._under_way.setdefault(member, sent)

    def _answered(self, sent: _Sent, result: Reply | LakeError) -> None:
        self._times.note(sent.member, trio.current_time() - sent.at)
        take_result(sent.asks, result)
        for part in sent.parts:
            part.end()
        self._ended(sent)

    def _ended(self, sent: _Sent) -> None:
        """Send what waited for a request, unless it is still held."""
        if self._under_way.get(sent.member) is sent:
            del self._under_way[sent.member]
            if not self._is_settling:
                self._send_waiting(sent.member)

    def _send_waiting(self, member: MemberId) -> None:
        """Send what waits for a member, if it has no request of short parts."""
        if member in self._under_way:
            return
        waiting = self._waiting.pop(member, None)
        while waiting and member not in self._under_way:
            if parts := _taken(waiting):
                self._send(parts)
        if waiting:
            self._waiting[member] = waiting


class _Sent:
    """A request under way."""

    __slots__ = ("_done", "asks", "at", "begun", "member", "parts", "size")

    begun: Begun

    def __init__(self, parts: Sequence[Part], done: Callable[[_Sent, Reply | LakeError], None]) -> None:
        self.parts = parts
        self.member = parts[0].member
        self.asks = [ask for part in parts for ask in part.asks]
        self.size = sum([part.size for part in parts])
        self.at = trio.current_time()
        self._done = done

    def answered(self, result: Reply | LakeError) -> None:
        """Take the answer."""
        self._done(self, result)


def _taken(waiting: deque[Part]) -> list[Part]:
    """Take the parts of the next request, of those that are still wanted."""
    parts: list[Part] = []
    room, count = TOGETHER_BYTES, BATCH_MAX
    while waiting and (not parts or (waiting[0].size <= room and len(waiting[0].asks) <= count)):
        part = waiting.popleft()
        if part.is_under_way:
            parts.append(part)
            room -= part.size
            count -= len(part.asks)
    return parts


def read_request(asks: Sequence[Ask]) -> m.ReadChunks:
    """Return the request for these asks."""
    return m.ReadChunks(
        [ask.read.chunk for ask in asks],
        [ask.begin for ask in asks],
        [len(ask.target) for ask in asks],
        [ask.shard for ask in asks],
    )


def take_result(asks: Sequence[Ask], result: Reply | LakeError) -> None:
    """Give each ask its piece of a member's answer, or the error of the request; give the answer's memory back."""
    if isinstance(result, LakeError):
        for ask in asks:
            ask.read.failed(ask, result)
        return
    try:
        _take(asks, result)
    finally:
        result.body.release()


def _take(asks: Sequence[Ask], reply: Reply) -> None:
    """Give each ask its piece of a member's answer, or its failure."""
    message, parts = reply.message, reply.body.parts
    assert isinstance(message, m.ReadChunksReply), "the answer to ReadChunks"
    pieces = message.pieces
    if not len(pieces) == len(message.chunk_lengths) == len(asks) or sum(p.length for p in pieces) != reply.body.nbytes:
        for ask in asks:
            ask.read.failed(ask, ProtocolError("the pieces of an answer are not those of its request"))
        return
    is_in_place = len(parts) == len(asks) and all(
        piece.length == len(ask.target) and isinstance(part, memoryview) and part.obj is ask.target.obj
        for ask, piece, part in zip(asks, pieces, parts, strict=True)
    )
    body = memoryview(b"") if is_in_place else memoryview(b"".join(parts))
    at = 0
    for ask, piece, chunk_bytes in zip(asks, pieces, message.chunk_lengths, strict=True):
        if piece.failure is not None:
            ask.read.failed(ask, piece.failure.as_error())
        elif chunk_bytes != ask.read.length:
            ask.read.failed(ask, ChunkDamaged(f"a shard of a chunk of {chunk_bytes} bytes, not of {ask.read.length}"))
        elif piece.offset != ask.begin or piece.length != len(ask.target):
            ask.read.failed(
                ask, ChunkDamaged(f"{piece.length} bytes from {piece.offset} of a shard; others were meant")
            )
        else:
            ask.read.answered(ask, ask.target if is_in_place else body[at : at + piece.length], piece.crcs)
        at += piece.length
