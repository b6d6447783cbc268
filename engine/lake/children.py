"""Processes that the process which serves a lake keeps running: its members, and its heads.

    starting --says its addresses--> serving --ends--> waiting --after a pause--> starting

Rules kept here:
- A process that ends is started again, after pauses that double up to PAUSE_S_MAX until one has served for STABLE_S.
- One that is not wanted any more is not started: that is looked at every LOOK_S.
- A process outlives its parent for as long as its requests in flight: it sees the end of its socket.
- One whose folder is locked is waited for, LOCK_PATIENCE_S: the process of a run that was killed is ending there.
- At the end of the block all stop at once, cleanly; those that take longer than STOP_TIMEOUT_S are killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import structlog
import trio

from engine.host.tasks import plain_errors
from engine.process.running import DRAIN_TIMEOUT_S, Running
from lakefs.errors import StoreLocked

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 10.0
STABLE_S: Final = 30.0
LOOK_S: Final = 5.0
LOCK_PATIENCE_S: Final = DRAIN_TIMEOUT_S + 20.0
STOP_TIMEOUT_S: Final = DRAIN_TIMEOUT_S + 20.0
"""A store that stops syncs its journal and completes its index."""
REPORT_BYTES_MAX: Final = 4096
"""A line to the parent: two addresses, of a socket, whose path has 107 bytes, and of a port; or a reason."""
NEWS_BYTES_MAX: Final = 256 << 10
"""A line with the figures of a head: 128 notes of gateways (`HEAD_GATEWAYS_MAX`) of 1.5 KB at most, and its counts."""
NEWS_EVERY_S: Final = 1.0
REASON_CHARACTERS_MAX: Final = REPORT_BYTES_MAX // 8
"""In JSON a character has at most 6 bytes."""
LAST_WORDS_S: Final = 1.0
"""Time for which the report of a process that has ended is read."""
_END: Final = b"\n"
_log: Final = structlog.get_logger(__name__)


class ChildPlan(Protocol):
    """One process to keep running.

    To the command the number of a descriptor is appended: the socket to the parent (`open_parent`).
    """

    @property
    def title(self) -> str:
        """Names the process in the log: `a member`."""
        ...

    @property
    def command(self) -> Sequence[str]:
        """The command, without that number."""
        ...

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors that the process inherits."""
        ...

    def about(self) -> dict[str, str]:
        """Return what tells it from its like, for the log."""
        ...

    def unwanted_because(self) -> str:
        """Return why the process may not be started again; empty if it may.  Blocks."""
        ...


P = TypeVar("P", bound=ChildPlan)
News = dict[str, Any]
"""Figures of a process for its parent, JSON-able."""


@dataclass(eq=False)
class Child(Generic[P]):
    """One place, and its present process."""

    plan: P
    process: trio.Process | None = None
    exit_code: int | None = None
    """That of the last process that ended."""
    addresses: Sequence[str] = ()
    """Addresses at which the present process listens."""
    member_id: bytes = b""
    """The id of a member that has served; else empty."""
    is_serving: bool = False
    restarts: int = 0
    reason: str = ""
    """The error with which the last process ended, as far as it could say it; empty once one serves."""
    news: News = field(default_factory=dict)
    """The figures that the present process has said last; empty until then."""
    settled: trio.Event = field(default_factory=trio.Event)
    """Set once a process has served, or ended for another reason than a lock that another one still holds."""
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when it is not kept running any more."""
    _stream: trio.SocketStream | None = None
    _telling: trio.Lock = field(default_factory=trio.Lock)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    @property
    def is_being_told(self) -> bool:
        """True while a line is under way to the process: one that was stopped takes none."""
        return self._telling.locked()

    async def tell(self, news: Any) -> None:
        """Send a line of JSON to the process, if it serves; one that ends meanwhile misses it."""
        async with self._telling:  # a stream takes one sender at a time
            if self._stream is not None and self.is_serving:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._stream.send_all(msgspec.json.encode(news) + _END)


Served = Callable[[Child[P]], Awaitable[None]]
"""Called each time when a process begins to serve."""


class Children(Generic[P]):
    """All processes of one kind.  Made by `open_children`."""

    def __init__(self, served: Served[P], nursery: trio.Nursery) -> None:
        self.all: list[Child[P]] = []
        self._served = served
        self._nursery = nursery
        self._stopping = trio.Event()

    def add(self, plan: P) -> None:
        """Start one more, and keep it running."""
        child = Child[P](plan)
        self.all.append(child)
        self._nursery.start_soon(self._keep, child)

    async def wait_settled(self) -> None:
        """Wait until each has served, or could not."""
        for child in self.all:
            await child.settled.wait()

    async def _keep(self, child: Child[P]) -> None:
        try:
            await self._keep_until_stop(child)
        finally:
            child.ended.set()

    async def _keep_until_stop(self, child: Child[P]) -> None:
        pause_s = PAUSE_S
        patience_end = trio.current_time() + LOCK_PATIENCE_S
        while not self._stopping.is_set():
            began = trio.current_time()
            await self._live(child)
            if child.exit_code != StoreLocked.exit_code or trio.current_time() > patience_end:
                child.settled.set()
            if self._stopping.is_set():
                return
            pause_s = PAUSE_S if trio.current_time() - began > STABLE_S else min(2 * pause_s, PAUSE_S_MAX)
            about = child.plan.about()
            _log.error(
                f"{child.plan.title}'s process ended",
                **about,
                exit_code=child.exit_code,
                reason=child.reason,
                again_in_s=pause_s,
            )
            child.restarts += 1
            with trio.move_on_after(pause_s):
                await self._stopping.wait()
            await self._wait_until_wanted(child.plan)

    async def _wait_until_wanted(self, plan: P) -> None:
        if reason := plan.unwanted_because():
            _log.error(reason, **plan.about())
        while plan.unwanted_because() and not self._stopping.is_set():
            with trio.move_on_after(LOOK_S):
                await self._stopping.wait()

    async def stop(self) -> None:
        """Stop all cleanly, and wait for them; kill those that take too long."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        with trio.move_on_after(STOP_TIMEOUT_S) as patience:
            for child in self.all:
                await child.ended.wait()
                if child.process is not None:  # the task that kept it may have been cancelled
                    await child.process.wait()
        if patience.cancelled_caught:
            _log.error("processes did not stop in time, and are killed")
        self._signal(signal.SIGKILL)
        for child in self.all:
            if child.process is not None:
                await child.process.wait()

    def _signal(self, number: int) -> None:
        for child in self.all:
            child.signal(number)

    async def _live(self, child: Child[P]) -> None:
        """Run one process from start to end."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = child.process = await trio.lowlevel.open_process(
                [*child.plan.command, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *child.plan.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the parent, which stops them
            )
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream, trio.open_nursery() as nursery:
            child._stream = stream
            nursery.start_soon(self._hear, child, stream)
            child.exit_code = await process.wait()
            child.is_serving, child.news = False, {}
            nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_S

    async def _hear(self, child: Child[P], stream: trio.SocketStream) -> None:
        heard = b""
        while True:
            try:
                part = await stream.receive_some(REPORT_BYTES_MAX)
            except trio.BrokenResourceError:
                return
            heard += part
            if not part or len(heard) > NEWS_BYTES_MAX + REPORT_BYTES_MAX:
                return
            *lines, heard = heard.split(_END)
            for line in lines:
                try:
                    report = msgspec.json.decode(line, type=list[str] | str | News)
                except msgspec.MsgspecError:  # of a later release, which has replaced this one on the disk
                    continue
                await self._take(child, report)

    async def _take(self, child: Child[P], report: list[str] | str | News) -> None:
        """Take what a process says: where it serves, its figures from then on, or the reason for which it ends."""
        if isinstance(report, str):
            child.reason = report
            return
        if isinstance(report, dict):
            child.news = report
            return
        child.addresses, child.reason, child.is_serving = report, "", True
        await self._served(child)
        child.settled.set()


@asynccontextmanager
async def open_children(plans: Sequence[P], served: Served[P]) -> AsyncIterator[Children[P]]:
    """Start a process for each plan, and keep it running until the block ends."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            children = Children(served, nursery)
            for plan in plans:
                children.add(plan)
            try:
                yield children
            finally:
                with trio.CancelScope(shield=True):
                    await children.stop()
                nursery.cancel_scope.cancel()


def report_failure(descriptor: int, reason: str) -> None:
    """Say to the parent why this process ends; a parent that is gone is no error.  `descriptor` is the caller's."""
    with suppress(OSError):
        os.write(descriptor, msgspec.json.encode(reason[:REASON_CHARACTERS_MAX]) + _END)


class Parent:
    """The parent, as such a process sees it.  Made by `open_parent`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._sending = trio.Lock()
        """A stream takes one sender at a time."""
        self._running: Running | None = None

    async def report(
        self, running: Running, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Be a face of the process: say where it serves."""
        self._running = running
        with suppress(trio.BrokenResourceError):
            await self._send(running.addresses)
        task_status.started(None)

    async def keep_telling(self, read: Callable[[], News]) -> None:
        """Say what `read` returns whenever it has changed, looked at every NEWS_EVERY_S, until cancelled."""
        said: News = {}
        with suppress(trio.BrokenResourceError):
            while True:
                news = read()
                if news != said:
                    await self._send(news)
                    said = news
                await trio.sleep(NEWS_EVERY_S)

    async def _send(self, line: list[str] | News) -> None:
        async with self._sending:
            await self._stream.send_all(msgspec.json.encode(line) + _END)

    async def hear(self, heard: Callable[[bytes], None]) -> None:
        """Call with each line that the parent sends; when it is gone, stop this process as SIGTERM does.

        Not one that is stopping: a second signal would end its wait for what is in flight.
        """
        begun = b""
        with suppress(trio.BrokenResourceError):
            while part := await self._stream.receive_some(REPORT_BYTES_MAX):
                *lines, begun = (begun + part).split(_END)
                for line in lines:
                    heard(line)
        if self._running is None or not self._running.stopping.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


@asynccontextmanager
async def open_parent(descriptor: int, heard: Callable[[bytes], None] = lambda line: None) -> AsyncIterator[Parent]:
    """Hold the socket to the parent for the block; within it this process handles SIGTERM."""
    async with trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor))) as stream:
        parent = Parent(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parent.hear, heard)
            yield parent
            nursery.cancel_scope.cancel()


async def report_to_parent(
    descriptor: int,
    running: Running,
    *,
    news: Callable[[Running], News] = lambda _: {},
    task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be the face of a process to its parent: say where it serves, and `news`; stop it when the parent is gone."""
    async with open_parent(descriptor) as parent:
        await parent.report(running, task_status=task_status)
        await parent.keep_telling(lambda: news(running))
        await trio.sleep_forever()
