"""The door: where connections without a request under way wait, and known answers are repeated without their tasks.

    connection   next_bytes  --  parked: native code receives; what it knows it answers; the rest is handed over
    run          --  in the gap of trio's loop: wait until a parked connection is readable, serve, wake the tasks of
                     those handed over
    answer       --  to a request that native code holds: its connection stays parked
    give_back    --  such a request to its task
    adopt        --  a connection without a task: it gets one by `attend` when it is handed over

Rules kept here:
- A parked connection is the door's alone.  Its task gets it back with every byte that was received and not answered,
  as if it had received them itself, and with the rest of an answer that its client was too slow for: the task sends
  that first.
- A dormant connection is the door's, descriptor and all: an entry of its table, and no Python object.  It waits and is
  answered as any parked one.  Handed over, its descriptor is `attend`'s; those that are left are closed at the end.
- At most about `_TASKS_MAX` parked connections keep their tasks: the one that was parked longest ago goes dormant, so
  the heap never grows with their number, which would leave it in pieces when they go dormant later.
- A request that is held keeps its connection parked, and nothing is received there until it is answered.
- The door decides nothing.  What repeats answers is given to it (`repeater.h`), and knows what it was taught.
- A turn serves for `_TURN_NS` at most.  Then other tasks run, if there are any; without, the next turn follows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
import outcome
import trio

from gateway.http.loop_gap import Gap, HasTasks, gap
from gateway.http.messages import ResponseSender
from lakefs.errors import LakeError

if TYPE_CHECKING:
    from gateway.http._door import Door as NativeDoor, Handed, Repeats, Rest

    IS_BUILT: bool
else:
    try:
        from gateway.http._door import Door as NativeDoor
    except ImportError:
        NativeDoor = None
    IS_BUILT = NativeDoor is not None

GoOn = Callable[["Rest"], Awaitable["Rest | None"]]
"""Sends a rest natively; returns what is left of it when its next bytes are not at hand, None when all was sent."""
SendRest = Callable[["Rest", GoOn, ResponseSender], Awaitable[None]]
_TURN_NS: Final = 1_000_000
_LONG_S: Final = 0.05
"""Age at which half a request is handed over, and an answer under way so that its task has its content kept: gc leaves
it to a slow client then."""
_NS: Final = 1_000_000_000
_TASKS_MAX: Final = 128
"""Parked connections with a task: half a MiB.  A new task costs 35 to 50 us of the next request that Python answers."""
_LOOKED_AT_MAX: Final = 2


class Failed(NamedTuple):
    """The end of a request that was tried at the door."""

    error: LakeError
    began_ns: int
    """Time of the monotonic clock when the request began."""


class HandedOver(NamedTuple):
    """A connection that is its task's again: `received` is None if it has ended.

    `unsent` goes out first, and then the rest of the answer, if there is one (`Door.send_rest`).  If the
    request that was received has `failed`, it was tried, and is answered with that error.
    """

    received: bytes | None
    unsent: bytes
    rest: Rest | None = None
    failed: Failed | None = None


class _Waiting(NamedTuple):
    """The task of a parked connection."""

    task: trio.lowlevel.Task
    let_go: Callable[[], None] | None
    """Called when it becomes dormant; None: it must not."""


Attend = Callable[[int, str, HandedOver], None]
"""Gives a dormant connection a task: its descriptor is the callee's, `peer` is its client's address."""


class Ticket(Protocol):
    """A request that is held, for its answer."""

    @property
    def descriptor(self) -> int:
        """Its connection's."""
        ...

    @property
    def number(self) -> int:
        """Given to no other request."""
        ...


class Door:
    """The parked connections of one server.  `run` serves them, in a task of its owner."""

    def __init__(
        self, by: Repeats, before_turn: Callable[[], None], after_turn: Callable[[], None], send_rest: SendRest
    ) -> None:
        """`before_turn` and `after_turn` are called around each turn of the loop; they must not wait."""
        self._native = NativeDoor(by)
        self.send_rest: Final = send_rest
        """Sends the rest of an answer that takes long, or that native code could not go on with."""
        self.attend: Attend = lambda descriptor, peer, handed: os.close(descriptor)
        """Set by the server.  It must not wait."""
        self._waiting: dict[int, _Waiting] = {}
        """Tasks by descriptor, in the order in which they were parked."""
        self._before_turn = before_turn
        self._after_turn = after_turn
        self._gap: Gap | None = None
        self._failed = trio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Serve parked connections until cancelled; those left are handed over as ended, dormant ones are closed."""
        with gap(self._native.watch_loop, self._serve_in_gap, self._has_failed) as self._gap:
            try:
                if self._gap is not None:
                    self._gap.enter()  # connections may be parked already
                while self._gap is None:
                    with trio.move_on_after(_LONG_S if self._native.timed else math.inf):
                        await trio.lowlevel.wait_readable(self._native.fileno())
                    self._turn()
                await self._failed.wait()
                assert self._failure is not None
                raise self._failure
            finally:
                self._gap = None
                for descriptor in list(self._waiting):
                    self.leave(descriptor)
                for descriptor in self._native.dormant():
                    self._native.end(descriptor)
                self._native.close()

    def _turn(self) -> None:
        self._before_turn()
        self._native.begin(_TURN_NS)
        while (handed := self._native.serve()) is not None:
            self._hand_over(handed)
        if self._native.timed:
            self._hand_over_long()
        self._after_turn()

    def _serve_in_gap(self, most_s: float, has_tasks: HasTasks) -> bool:
        """Serve in the place of trio's wait, which would last so long; see `gateway.http.loop_gap`."""
        native = self._native
        if not self._waiting and not native.dormant_count:
            if self._gap is not None:
                self._gap.leave()
            return False
        end_ns = monotonic_ns() + int(most_s * _NS)
        while True:
            soon_ns = monotonic_ns() + int(_LONG_S * _NS)
            if native.wait(min(end_ns, soon_ns) if native.timed else end_ns) or native.timed:
                self._turn()
            if native.is_called:  # trio will not wait
                return False
            if has_tasks() or monotonic_ns() >= end_ns:
                return True

    def _has_failed(self, error: BaseException) -> None:
        self._failure = error
        self._failed.set()

    def _hand_over_long(self) -> None:
        before_ns = monotonic_ns() - int(_LONG_S * _NS)
        while (handed := self._native.take_long(before_ns)) is not None:
            self._hand_over(handed)

    async def next_bytes(
        self, descriptor: int, peer: bytes, *, let_go: Callable[[], None] | None = None, rest: Rest | None = None
    ) -> HandedOver:
        """Park a connection until it is handed over; `peer` is for the log.  OSError if it cannot be watched.

        With the `rest` of an answer, that is sent first, and the connection handed over then.  With `let_go` it may
        become dormant: that is called, from then on its descriptor is the door's, and its task gets it as ended.
        """
        self._park(descriptor, peer, rest)
        if len(self._waiting) >= _TASKS_MAX:
            self._let_oldest_go()
        self._waiting[descriptor] = _Waiting(trio.lowlevel.current_task(), let_go)

        def abort(_: Callable[[], Any]) -> trio.lowlevel.Abort:
            self._native.leave(descriptor)
            del self._waiting[descriptor]
            return trio.lowlevel.Abort.SUCCEEDED

        found = await trio.lowlevel.wait_task_rescheduled(abort)
        assert isinstance(found, HandedOver)
        return found

    def _park(self, descriptor: int, peer: bytes, rest: Rest | None = None) -> None:
        self._native.park(descriptor, peer, rest)
        if self._gap is not None:
            self._gap.enter()

    def leave(self, descriptor: int) -> None:
        """Hand a connection over as ended, if it is parked; called before its descriptor is closed."""
        self._native.leave(descriptor)
        self._wake(descriptor, HandedOver(None, b""))

    def adopt(self, descriptor: int, peer: bytes) -> bool:
        """Park a connection without a task: it is dormant, and its descriptor the door's.

        Return False if its peer is too long to be kept.  OSError if it cannot be watched.
        """
        self._park(descriptor, peer)
        if self._native.let_go(descriptor):
            return True
        self._native.leave(descriptor)
        return False

    def _let_oldest_go(self) -> None:
        """Make the connection dormant that was parked longest ago; a busy one keeps its task, as if parked last."""
        for _ in range(_LOOKED_AT_MAX):
            descriptor = next(iter(self._waiting))
            task, let_go = waiting = self._waiting.pop(descriptor)
            if let_go is not None and self._native.let_go(descriptor):
                let_go()
                trio.lowlevel.reschedule(task, outcome.Value(HandedOver(None, b"")))
                return
            self._waiting[descriptor] = waiting

    @property
    def dormant_count(self) -> int:
        """Count of connections without a task."""
        return self._native.dormant_count

    def dormant(self) -> list[int]:
        """Return the descriptors of connections without a task."""
        return self._native.dormant()

    def end(self, descriptor: int) -> bool:
        """Close a connection without a task, in any state; return False if it is none."""
        return self._native.end(descriptor)

    def answer(self, ticket: Ticket, answer: bytes) -> None:
        """Answer a request that is held; its connection stays parked if its client takes all of the answer.

        The answer to a client that has gone is dropped.
        """
        self._hand_over(self._native.answer(ticket.descriptor, ticket.number, answer))

    def give_back(self, ticket: Ticket, request: bytes, failure: LakeError | None = None) -> None:
        """Hand a connection over with the request that is held, as if it had just been received.

        With a `failure` the request was tried, and must not be tried again: its task answers with that.
        """
        failed = None if failure is None else Failed(failure, self._native.began_ns(ticket.descriptor))
        self._hand_over(self._native.give_back(ticket.descriptor, ticket.number, request), failed)

    def is_quiet(self, descriptor: int) -> bool:
        """Return True for a parked connection that is not busy."""
        return self._native.heard_ns(descriptor) != 0 and not self._native.is_busy(descriptor)

    def finish(self, descriptor: int) -> None:
        """Hand a connection over, with no bytes, when its busy time is over."""
        self._native.finish(descriptor)

    def is_finishing(self, descriptor: int) -> bool:
        """Return True for a parked connection that is handed over, to end, when its busy time is over."""
        return self._native.is_finishing(descriptor)

    def late(self, idle_s: float, stall_s: float) -> list[int]:
        """Return the parked connections on which nothing came for `idle_s`, or went for `stall_s` of an answer."""
        return self._native.late(int(idle_s * _NS), int(stall_s * _NS))

    def quietest(self) -> int:
        """Return the parked connection that has been idle longest; -1 if there is none."""
        return self._native.quietest()

    def _hand_over(self, handed: Handed | None, failed: Failed | None = None) -> None:
        """Wake the task of a connection that native code has handed over, if it has; a dormant one gets a task."""
        if handed is None:
            return
        descriptor, received, unsent, rest = handed
        found = HandedOver(received, unsent, rest, failed)
        if descriptor in self._waiting:
            self._wake(descriptor, found)
        else:
            self.attend(descriptor, msgspec.json.decode(self._native.peer(descriptor), type=str), found)

    def _wake(self, descriptor: int, handed: HandedOver) -> None:
        waiting = self._waiting.pop(descriptor, None)
        if waiting is not None:
            trio.lowlevel.reschedule(waiting.task, outcome.Value(handed))
