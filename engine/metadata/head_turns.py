"""Turns of stamps for the heads of a lake: the counters of the names that lead, and what each head was sent of them.

    stamps_of    in the step in which an answer for a head's client is read: its set, noted as sent to that head
    turn         in the step in which a decision becomes visible: turns its stamps, and queues what heads were sent
    follow       a head asks: it has made these turns; it is sent the next ones, and a right, now or in a later step
    run          --  send each head its turns, or a right alone when it has waited long enough
    wait_settled --  a turn is made by all heads that have a right, or their rights have run out

A head repeats these counters in memory of its own, and its clients use them while its right lasts.  The model of this
is `tests/models/head_stamps.py`; the rules are those of its docstring.

Rules kept here:
- A head counts as one that was sent a stamp from the step on in which the answer was read.
- A group is durable, and a visible answer leaves, only when the turns before it are settled.  So no change, and no
  reading of it, is answered while a head may repeat what was before.
- A right passes to the head in one answer with the turns before it, and the head makes these first.
- Turns are sent behind the step that made them, and not in it: the append of their group has begun then.
- A right is for RIGHT_S at most, and never to the end of the leader's lease.  The head counts it from the sending of
  its request; the leader from the answer, and for longer, because clocks differ.
- A head that leaves keeps its right until that runs out, unless it has said that it uses it no more.
- Names that lead after others begin when all rights of those have run out (`RIGHTS_OVER_S`, `end`).  So that the next
  process of killed ones knows when that is, the end of a right is kept before it is given.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import trio

from engine.format.columns import Insertions
from engine.format.layouts import Mutation
from engine.tables.recorded_view import STAMPED, Record
from lakefs.errors import EngineBusy, InvalidArgument
from lakefs.ids import new_id16
from lakefs.limits import STAMP_COUNT
from lakefs.ports import Clock
from lakefs.stamps import stamps as shared_stamps
from lakefs.stamps.stamps import StampMemory, memory_bytes

RIGHT_S: Final = 1.0
"""Longest right of a head: so long does a change wait for one that is gone."""
_LONGER: Final = 1.05
"""The leader waits longer by this factor: no two clocks differ in their speed by a twentieth."""
RIGHTS_OVER_S: Final = RIGHT_S * _LONGER
"""After this time no right is left that was given before."""
_WAIT_S_MIN: Final = 0.001
"""The clock here is not trio's, where what is left may be too little to be any time."""
HEADS_MAX: Final = 1024
"""Heads that follow: 96 machines with some each.  32 KiB of bits for each."""
WAIT_NS_MAX: Final = 500_000_000
"""Longest wait of a head that asks for turns: half of a right."""
SLOTS_AT_ONCE: Final = 16384
"""Stamps in one answer to a head: 192 KiB."""
BASE_MAX: Final = 1 << 62


class Followed(NamedTuple):
    """Turns for a head: the number of the last one, their set, and the right in seconds."""

    number: int
    stamps: bytes
    right_s: float


Answer = Callable[[Followed], None]
"""Takes the answer to a head that asks; raises nothing."""


class FollowingHead:
    """A head that follows the turns: what it was sent, and what it has made of it.  Used on the loop."""

    def __init__(self, memory: StampMemory, base: int) -> None:
        self.id: Final = new_id16()
        self.base: Final = base
        self.noted: Final = bytearray(STAMP_COUNT // 8)
        """A bit for each slot whose present stamp it was sent."""
        self.right_until = -math.inf
        self.has_left = False
        self.answer: Answer | None = None
        """Takes the answer to its request, while that waits."""
        self.ask_until = math.inf
        """When it is answered at the latest, on trio's clock."""
        self._memory = memory
        self._queued: dict[int, None] = {}
        self._queued_first = self._queued_last = 0
        self._sent_first = self._sent_last = 0

    def stamps_of(self, records: list[Record]) -> bytes:
        """Return the set of stamps of records, which counts as sent from now on; b"" once the head has left."""
        return b"" if self.has_left else self._memory.of(records, self.base, self.noted)

    def queue(self, slots: list[int], number: int) -> None:
        """Let these slots be sent, as the turn of that number."""
        self._queued.update(dict.fromkeys(slots))
        self._queued_first = self._queued_first or number
        self._queued_last = number

    def take(self) -> bytes:
        """Return the next turns to be sent, as a set with today's values."""
        slots = list(self._queued)[:SLOTS_AT_ONCE]
        for slot in slots:
            del self._queued[slot]
        if not self.has_more and self._queued_last:
            self._sent_first = self._sent_first or self._queued_first
            self._sent_last = self._queued_last
            self._queued_first = self._queued_last = 0
        return self._memory.pack(slots, self.base)

    @property
    def has_more(self) -> bool:
        """True if there are turns that were not sent."""
        return bool(self._queued)

    @property
    def sent(self) -> int:
        """The number of the last turn that was sent whole."""
        return self._sent_last

    def say(self, number: int) -> None:
        """Note that the head has made the turns up to this one.  InvalidArgument if it was not sent it."""
        if number > self._sent_last:
            raise InvalidArgument(f"turn {number} was not sent to this head")
        if number == self._sent_last:
            self._sent_first = 0

    @property
    def owed(self) -> int:
        """The number of the first turn that the head has not said; 0: it has said all."""
        return self._sent_first or self._queued_first

    def owes(self, number: int, now: float) -> bool:
        """Return True while the head may use a stamp that turned with this number, or before."""
        return 0 < self.owed <= number and now < self.right_until


class HeadTurns:
    """The counters of the names that lead, and the heads that follow them.  Used on the loop."""

    def __init__(
        self,
        clock: Clock,
        left_s: Callable[[], float] = lambda: math.inf,
        keep_end: Callable[[float], None] = lambda end: None,
    ) -> None:
        """`left_s` returns for how long rights may be given now: the leader's lease, less its margin.

        `keep_end` is called with the end of the longest right, before it is given (`engine.store.given_rights`).
        """
        self._clock = clock
        self._keep_end = keep_end
        self._last_end = -math.inf
        self.left_s = left_s
        self._memory = StampMemory(mmap.mmap(-1, memory_bytes(STAMP_COUNT)), STAMPED)
        self._heads: list[FollowingHead] = []
        self._noted: list[bytearray] = []
        """The bits of each of the heads."""
        self._settling = trio.lowlevel.ParkingLot()
        self._sending = trio.lowlevel.ParkingLot()
        """The task in `run`, until there is something to send."""
        self._to_send: dict[FollowingHead, None] = {}
        """Heads with turns that have not been sent."""
        self.last = 0
        """The number of the last turn that a head was sent, or is to be."""
        self._all_turned = 0
        self._is_over = False
        self._look_at = math.inf
        """When `run` looks at the heads again, on trio's clock."""

    # --- heads -------------------------------------------------------------------------------------

    def open(self, base: int) -> FollowingHead:
        """Let a head follow, until `leave`.  EngineBusy: too many do; InvalidArgument."""
        if not 0 <= base <= BASE_MAX:
            raise InvalidArgument(f"{base} is no base of stamps")
        self._forget_gone()
        if len(self._heads) >= HEADS_MAX:
            raise EngineBusy(f"{len(self._heads)} heads follow the names already")
        head = FollowingHead(self._memory, base)
        self._heads.append(head)
        self._noted.append(head.noted)
        return head

    def leave(self, head: FollowingHead, *, has_right: bool = True) -> None:
        """End what a head follows; its right lasts until it runs out, unless `has_right` is False."""
        head.has_left = True
        if not has_right:
            head.right_until = -math.inf
        self._answer(head)
        self._forget_gone()
        self._settling.unpark_all()

    def say(self, head: FollowingHead, said: int) -> None:
        """Note the turns that a head has made.  InvalidArgument."""
        owed = head.owed
        head.say(said)
        if owed != head.owed and not self._is_owed(owed):
            self._settling.unpark_all()

    def follow(self, head: FollowingHead, wait_s: float, answer: Answer) -> Callable[[], None]:
        """Let a head be sent its next turns and a right, now or when there are any, after `wait_s` at the latest.

        Returns a call that gives the answer up.
        """
        assert head.answer is None, "a head asks once at a time"
        head.answer, head.ask_until = answer, trio.current_time() + wait_s
        if head.has_more or head.has_left or self._is_over or wait_s <= 0:
            self._answer(head)
        elif head.ask_until < self._look_at:
            self._sending.unpark_all()
        return partial(self._give_up, head, answer)

    async def run(self) -> None:
        """Answer the heads that ask, until cancelled."""
        while True:
            self._look_at = min((head.ask_until for head in self._heads), default=math.inf)
            if not self._to_send:
                with trio.move_on_at(self._look_at):
                    await self._sending.park()
            await trio.lowlevel.checkpoint()  # who appends the group, and was woken by its decision, goes first
            for head in self._to_send:
                self._answer(head)
            self._to_send.clear()
            now = trio.current_time()
            for head in self._heads:
                if head.ask_until <= now:
                    self._answer(head)

    @property
    def is_over(self) -> bool:
        """True once no rights are given any more."""
        return self._is_over

    async def end(self) -> None:
        """Give no rights from now on, and return when none is left."""
        self._is_over = True
        for head in list(self._heads):
            self._answer(head)
        while (left_s := max((head.right_until for head in self._heads), default=-math.inf) - self._now()) > 0:
            with trio.move_on_after(max(left_s, _WAIT_S_MIN)):
                await self._settling.park()

    # --- turns -------------------------------------------------------------------------------------

    def turn(self, mutations: list[Mutation | Insertions]) -> None:
        """Turn the stamps of changed records, and queue them for the heads that were sent them."""
        self._queue(self._memory.turn_noted(mutations, self._noted))

    def turn_all(self) -> None:
        """Turn every stamp, and queue all that were sent."""
        self._memory.turn_all()
        found = {
            index: [slot for slot in range(STAMP_COUNT) if noted[slot >> 3] >> (slot & 7) & 1]
            for index, noted in enumerate(self._noted)
        }
        for noted in self._noted:
            noted[:] = bytes(len(noted))
        self._queue({index: slots for index, slots in found.items() if slots})
        self._all_turned = self.last

    async def wait_all_turned(self) -> None:
        """Return when `turn_all`, if it was called, is settled: what was hidden before may be read then."""
        if self._all_turned:
            await self.wait_settled(self._all_turned)

    async def wait_settled(self, number: int) -> None:
        """Return when no head may use a stamp any more that turned with this number, or before.

        Without a checkpoint when none may.
        """
        while self._is_owed(number):
            now = self._now()
            left_s = max(head.right_until for head in self._heads if head.owes(number, now)) - now
            with trio.move_on_after(max(left_s, _WAIT_S_MIN)):
                await self._settling.park()

    def _is_owed(self, number: int) -> bool:
        """Return True while any head may use a stamp that turned with this number, or before."""
        now = self._now()
        return any(head.owes(number, now) for head in self._heads)

    def _queue(self, found: dict[int, list[int]]) -> None:
        if found:
            self.last += 1
            self._sending.unpark_all()
        for index, slots in found.items():
            head = self._heads[index]
            head.queue(slots, self.last)
            self._to_send[head] = None

    def _answer(self, head: FollowingHead) -> None:
        """Answer a head with its turns and a right, if it asks."""
        answer = head.answer
        if answer is not None:
            head.answer, head.ask_until = None, math.inf
            stamps = head.take()
            answer(Followed(head.sent, stamps, self._right_s(head)))

    def _give_up(self, head: FollowingHead, answer: Answer) -> None:
        if head.answer is answer:
            head.answer, head.ask_until = None, math.inf

    def _right_s(self, head: FollowingHead) -> float:
        """Give a head a right, behind all that was taken for it; returns its length, 0 for none."""
        right_s = 0.0 if self._is_over or head.has_more or head.has_left else min(RIGHT_S, self.left_s())
        if right_s <= 0:
            return 0.0
        head.right_until = max(head.right_until, self._now() + right_s * _LONGER)
        if head.right_until > self._last_end:
            self._last_end = head.right_until
            self._keep_end(self._last_end)
        return right_s

    def _forget_gone(self) -> None:
        now = self._now()
        self._heads = [head for head in self._heads if not head.has_left or now < head.right_until]
        self._noted = [head.noted for head in self._heads]

    def _now(self) -> float:
        return self._clock.monotonic()


def open_turns(clock: Clock, keep_end: Callable[[float], None]) -> HeadTurns | None:
    """Return new turns; None where the native module is not built, and heads ask for each answer."""
    return HeadTurns(clock, keep_end=keep_end) if shared_stamps.IS_BUILT else None
