"""`BlockingDriver` runs operations on a blocking connection, for `lakefs.client.blocking.lake.Lake`.

Requests are pipelined; local reads and checks run in a few threads.  One operation runs at a time; a second thread
waits.

An interrupted operation (Ctrl-C) closes the connection, because a frame may be half received.  The engine then drops
the unfinished put, and the next operation connects anew.

A child of `os.fork` also connects anew: at its first operation, with descriptors and threads of its own.  Leases, pins
and lendings of the parent's connection stay the parent's.  After a fork that Python does not see, by a library in C,
the lake refuses operations (InvalidArgument).
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable, InvalidArgument
from lakefs.host.forks import NO_FORK, follow_forks
from lakefs.host.work_threads import Work, WorkThreads
from lakefs.known.counts import NOTHING_KNOWN, KnownCounts
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CLIENT_THREADS, MIB
from lakefs.put.shared_memory import LentMemories
from lakefs.shares.engine_shares import EngineShares
from lakefs.steps.steps import Send, Start, Step, Steps, Ticket, Wait
from lakefs.wire.engine_port import BlockingEngineClient
from lakefs.wire.messages import Request

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric
    from lakefs.grants.batch_plan import HelperThread
    from lakefs.known.known_names import KnownNames

T = TypeVar("T")
AT_ONCE_BYTES = 2 * MIB
"""Most cached content that the caller's thread reads itself: no event loop waits for it.  Threads share more."""
_NEVER: Final = -1
UNWIND_STEPS_MAX = 100
"""Most steps of a cleanup: far more than any has."""


@dataclass
class _Flight:
    """The requests and work that one operation has started and not finished."""

    engine: BlockingEngineClient
    """The engine client of this operation; a child forked during the operation has another."""
    sends: dict[int, Ticket] = field(default_factory=dict)
    works: set[Work[Any]] = field(default_factory=set)


class BlockingDriver:
    """One engine's connection, what it shares on it, threads, and `run`."""

    _known: KnownNames | None = None
    _helper: HelperThread | None = None
    _helper_is_due = True

    def __init__(
        self,
        engine: BlockingEngineClient,
        *,
        check: Check = Check.BLAKE3,
        repeats: bool = True,
        fabric: ClientFabric | None = None,
    ) -> None:
        """`repeats`: answer for known names without a request.  `fabric`: RDMA to the engine, closed with this."""
        self._engine = engine
        self.shares = EngineShares(self, engine.epoch, fabric)
        """All that the engine shares with this client."""
        self._threads: WorkThreads | None = None
        self._lock = threading.RLock()
        self.is_closed = False
        self._reads_by_name = 0 if repeats else _NEVER
        """Reads by name before `_known` was made."""
        self._process = os.getpid()
        """The process that uses the connection.  Another one would take its answers, and does not have its threads."""
        self.steps = LakeSteps(
            self.shares.descriptors,
            engine.offers,
            network=engine.address.startswith("tcp"),
            check=check,
            at_once_bytes=AT_ONCE_BYTES,
            is_held=self.is_held,
            fabric=fabric,
        )
        follow_forks(self)

    def close(self) -> None:
        """Close the connection; unfinished puts and leases end with it.  Does nothing in another process."""
        if not self.is_own:
            return
        with self._lock:
            self.is_closed = True
            if self._threads is not None:
                self._threads.close()
                self._threads = None
            with NO_FORK:
                helper, self._helper = self._helper, None
            if helper is not None:
                helper.close()
            try:
                self.shares.close()
            finally:
                self._engine.close()

    def run(self, steps: Steps[T]) -> T:
        """Run an operation of `LakeSteps`, or any other steps, to its end; return its result."""
        if not self.is_own:
            steps.close()
            raise InvalidArgument("this lake was connected by another process; connect anew in this one")
        with self._lock:
            if self.is_closed:
                steps.close()
                raise EngineUnreachable("this lake was closed")
            flight = _Flight(self._engine)
            try:
                if self._engine.epoch != self.shares.epoch:
                    self.shares.look()
                return self._drive(steps, flight)
            except BaseException as error:
                unwind(steps, error)
                raise
            finally:
                if self._engine is flight.engine:
                    for ticket in flight.sends.values():
                        self._engine.cancel(ticket)
                    for work in flight.works:
                        if not work.cancel():
                            work.wait()

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter, if no operation runs and sending need not wait; True if sent."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self.is_closed and self._engine.tell(request)
        finally:
            self._lock.release()

    def _drive(self, steps: Steps[T], flight: _Flight) -> T:
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as end:
                return cast(T, end.value)
            answer, error = None, None
            try:
                answer = self._take(step, flight)
            except BaseException as raised:  # noqa: BLE001 - thrown into the operation, which raises it
                if isinstance(raised, KeyboardInterrupt):
                    self._engine.close()
                error = raised

    def _take(self, step: Step, flight: _Flight) -> Any:
        """Do one step of an operation and return its answer."""
        if self._engine is not flight.engine:
            raise EngineUnreachable("this process was forked in the midst of the operation, which is the parent's")
        if isinstance(step, Wait):
            return self._wait(step.ticket, flight)
        if isinstance(step, Start):
            return self._start(step, flight)
        return self._engine.forget(self._engine.start(step.request))

    def _start(self, step: Start, flight: _Flight) -> Ticket:
        effect = step.effect
        if isinstance(effect, Send):
            ticket = self._engine.start(effect.request, effect.body, effect.descriptors, into=effect.into)
            flight.sends[id(ticket)] = ticket
            return ticket
        work = self.work_threads().submit(effect.call, *effect.args)
        flight.works.add(work)
        return work

    def _wait(self, ticket: Ticket, flight: _Flight) -> Any:
        if isinstance(ticket, Work):
            flight.works.discard(ticket)
            return ticket.result()
        del flight.sends[id(ticket)]
        return self._engine.finish(ticket)

    @property
    def address(self) -> str:
        """The engine's address: `unix:PATH` or `tcp://HOST:PORT`."""
        return self._engine.address

    @property
    def timeout_s(self) -> float:
        """Seconds that the engine may be silent while a request waits."""
        return self._engine.timeout_s

    def job(self, limit_s: float) -> AbstractContextManager[None]:
        """See `BlockingEngineClient.job`."""
        return self._engine.job(limit_s)

    @property
    def epoch(self) -> int:
        """Count of connections so far: leases, sources and descriptors of an earlier epoch are void."""
        return self._engine.epoch

    @property
    def is_own(self) -> bool:
        """True in the process that connected, and in children whose fork Python saw."""
        return os.getpid() == self._process

    def is_connected(self) -> bool:
        """Return True if the connection of this epoch is still open; see `EngineClient.is_connected`."""
        return self.is_own and self._engine.is_connected()

    def is_held(self, epoch: int) -> bool:
        """Return True if the connection of that epoch is still open, so that the engine keeps what it gave on it."""
        # In this order: if another thread connects anew between the two checks, the second one sees the new epoch.
        return self.is_connected() and self.epoch == epoch

    def begin_anew(self) -> None:
        """See `lakefs.host.forks`.  Until this ends the lake is not this process's, also for objects freed in it."""
        self._lock = threading.RLock()
        self._threads = None
        self._helper, self._helper_is_due = None, True
        self._engine = self._engine.forked()
        self.shares.begin_anew(self._engine)
        shares = self.shares
        self.steps = replace(self.steps, descriptors=shares.descriptors, lent=LentMemories(), fabric=shares.fabric)
        self._process = os.getpid()

    def known_names(self) -> KnownNames | None:
        """Return the names that are known; None if every name is to be asked for.

        They are made at the second read by name, so that a command that reads one object needs neither them nor the
        requests that they take.
        """
        known = self._known
        if known is None:
            known = self._make_known()
        if (
            known is not None and known.content.is_due and self._lock.acquire(blocking=False)
        ):  # else other names are known still
            try:
                if not self.is_closed and self.is_connected():
                    self.run(known.content.renewal())
            finally:
                self._lock.release()
        return known

    def _make_known(self) -> KnownNames | None:
        if self._reads_by_name == _NEVER or not self.steps.offers.stamps:
            return None
        self._reads_by_name += 1
        if self._reads_by_name < 2:
            return None
        module = import_module("lakefs.known.known_names")
        with NO_FORK:
            if self._known is None and module.IS_BUILT:
                known = cast("KnownNames", module.KnownNames(self, is_patient=True))
                self.steps = replace(self.steps, learner=known)
                self._known = known
            return self._known

    @property
    def repeats(self) -> bool:
        """True if known names may be answered without a request."""
        return self._reads_by_name != _NEVER

    @property
    def known_counts(self) -> KnownCounts:
        """Counts of what is known, and of what was answered."""
        return NOTHING_KNOWN if self._known is None else self._known.counts

    def helper_thread(self) -> HelperThread | None:
        """Return the native thread that takes parts of large reads, made at first use; None where there is none."""
        if self._helper_is_due:
            with NO_FORK, suppress(OSError):  # OSError: no more threads are allowed, and reads are done by one
                self._make_helper()
        return self._helper

    def _make_helper(self) -> None:
        if not self._helper_is_due or self.is_closed or not self.is_own:
            return
        self._helper_is_due = False
        if len(os.sched_getaffinity(0)) > 1:
            self._helper = cast("HelperThread", import_module("lakefs.grants.batch_plan").HelperThread())

    def work_threads(self) -> WorkThreads:
        """Return the threads that read and check.  The lake is not closed."""
        if self._threads is None:
            self._threads = WorkThreads(CLIENT_THREADS)
        return self._threads


def unwind(steps: Steps[T], error: BaseException) -> None:
    """Let an operation clean up after an interrupt between two steps; each step that it asks for is refused.

    Does nothing if the operation has ended.  Closing the generator would not do: its cleanup has steps, too.
    """
    try:
        steps.throw(error)
        for _ in range(UNWIND_STEPS_MAX):
            steps.throw(EngineUnreachable("the operation was interrupted"))
    except (StopIteration, EngineUnreachable):
        return
    except BaseException as ended:  # noqa: BLE001 - the caller raises `error`, the cause
        if ended is not error:
            error.add_note(f"while the operation cleaned up: {ended!r}")
