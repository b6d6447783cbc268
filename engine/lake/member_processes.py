"""The members of this machine, each a process of its own, kept running by the process that serves the lake.

    starting --says its addresses--> serving --ends--> waiting --after a pause--> starting

Rules kept here:
- A member that ends is started again, after pauses that double up to PAUSE_S_MAX until one has served for STABLE_S.
- In a folder that holds nothing any more no member is started: it would be another one.  It is looked for every
  FOLDER_LOOK_S: its disk may be mounted, or the operator may want a new member there.
- A member outlives its parent for as long as its requests in flight: it sees the end of its socket.
- A member whose folder is locked is waited for, LOCK_PATIENCE_S: the process of a run that was killed is ending there.
- At the end of the block all members stop at once, cleanly; those that take longer than STOP_TIMEOUT_S are killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from engine.host.tasks import plain_errors
from engine.process.running import DRAIN_TIMEOUT_S, Running
from lakefs.errors import StoreLocked

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 10.0
STABLE_S: Final = 30.0
FOLDER_LOOK_S: Final = 5.0
LOCK_PATIENCE_S: Final = DRAIN_TIMEOUT_S + 20.0
STOP_TIMEOUT_S: Final = DRAIN_TIMEOUT_S + 20.0
"""A store that stops syncs its journal and completes its index."""
REPORT_BYTES_MAX: Final = 4096
"""A line to the parent: two addresses, of a socket, whose path has 107 bytes, and of a port; or a reason."""
REASON_CHARACTERS_MAX: Final = REPORT_BYTES_MAX // 8
"""In JSON a character has at most 6 bytes."""
LAST_WORDS_S: Final = 1.0
"""Time for which the report of a process that has ended is read."""
_END: Final = b"\n"
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MemberPlan:
    """One member: its folder, the socket at which it listens, and the command of its process.

    To the command the number of a descriptor is appended: the socket to the parent (`report_to_parent`).  `is_wanted`
    says if the process may be started again: not in a folder that holds nothing any more, where it would make another
    member.  Blocks.
    """

    folder: Path
    socket: Path
    command: Sequence[str]
    is_wanted: Callable[[], bool] = lambda: True


@dataclass(eq=False)
class MemberProcess:
    """One member's place, and its present process."""

    plan: MemberPlan
    process: trio.Process | None = None
    exit_code: int | None = None
    """That of the last process that ended."""
    addresses: Sequence[str] = ()
    """Addresses at which the present process listens."""
    member_id: bytes = b""
    """Known once the member has served."""
    is_serving: bool = False
    restarts: int = 0
    reason: str = ""
    """The error with which the last process ended, as far as it could say it; empty once one serves."""
    settled: trio.Event = field(default_factory=trio.Event)
    """Set once a process has served, or ended for another reason than a lock that another one still holds."""

    ended: trio.Event = field(default_factory=trio.Event)
    """Set when it is not kept running any more."""

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


Served = Callable[[MemberProcess], Awaitable[None]]
"""Called each time when a member begins to serve."""


class MemberProcesses:
    """All members of this machine.  Made by `open_member_processes`."""

    def __init__(self, served: Served, nursery: trio.Nursery) -> None:
        self.members: list[MemberProcess] = []
        self._served = served
        self._nursery = nursery
        self._stopping = trio.Event()

    def add(self, plan: MemberPlan) -> None:
        """Start one more member, and keep it running."""
        member = MemberProcess(plan)
        self.members.append(member)
        self._nursery.start_soon(self._keep, member)

    async def wait_settled(self) -> None:
        """Wait until each member has served, or could not."""
        for member in self.members:
            await member.settled.wait()

    async def _keep(self, member: MemberProcess) -> None:
        try:
            await self._keep_until_stop(member)
        finally:
            member.ended.set()

    async def _keep_until_stop(self, member: MemberProcess) -> None:
        pause_s = PAUSE_S
        patience_end = trio.current_time() + LOCK_PATIENCE_S
        while not self._stopping.is_set():
            began = trio.current_time()
            await self._live(member)
            if member.exit_code != StoreLocked.exit_code or trio.current_time() > patience_end:
                member.settled.set()
            if self._stopping.is_set():
                return
            pause_s = PAUSE_S if trio.current_time() - began > STABLE_S else min(2 * pause_s, PAUSE_S_MAX)
            _log.error(
                "a member's process ended",
                folder=str(member.plan.folder),
                exit_code=member.exit_code,
                reason=member.reason,
                again_in_s=pause_s,
            )
            member.restarts += 1
            with trio.move_on_after(pause_s):
                await self._stopping.wait()
            await self._wait_until_wanted(member.plan)

    async def _wait_until_wanted(self, plan: MemberPlan) -> None:
        if not plan.is_wanted():
            _log.error("the folder holds nothing any more: is its disk mounted?", folder=str(plan.folder))
        while not plan.is_wanted() and not self._stopping.is_set():
            with trio.move_on_after(FOLDER_LOOK_S):
                await self._stopping.wait()

    async def stop(self) -> None:
        """Stop all members cleanly, and wait for them; kill those that take too long."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        with trio.move_on_after(STOP_TIMEOUT_S) as patience:
            for member in self.members:
                await member.ended.wait()
        if patience.cancelled_caught:
            _log.error("members did not stop in time, and are killed")
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for member in self.members:
            member.signal(number)

    async def _live(self, member: MemberProcess) -> None:
        """Run one process from start to end."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = member.process = await trio.lowlevel.open_process(
                [*member.plan.command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the parent, which stops its members
            )
        if self._stopping.is_set():
            member.signal(signal.SIGTERM)
        async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._hear, member, stream)
            member.exit_code = await process.wait()
            member.is_serving = False
            nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_S

    async def _hear(self, member: MemberProcess, stream: trio.SocketStream) -> None:
        heard = b""
        while True:
            try:
                part = await stream.receive_some(REPORT_BYTES_MAX)
            except trio.BrokenResourceError:
                return
            heard += part
            if not part or len(heard) > 2 * REPORT_BYTES_MAX:
                return
            *lines, heard = heard.split(_END)
            for line in lines:
                await self._take(member, msgspec.json.decode(line, type=list[str] | str))

    async def _take(self, member: MemberProcess, report: list[str] | str) -> None:
        """Take what a process says: the addresses at which it serves, or the reason for which it ends."""
        if isinstance(report, str):
            member.reason = report
            return
        member.addresses, member.reason, member.is_serving = report, "", True
        await self._served(member)
        member.settled.set()


@asynccontextmanager
async def open_member_processes(plans: Sequence[MemberPlan], served: Served) -> AsyncIterator[MemberProcesses]:
    """Start a process for each plan, and keep it running until the block ends."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            members = MemberProcesses(served, nursery)
            for plan in plans:
                members.add(plan)
            try:
                yield members
            finally:
                with trio.CancelScope(shield=True):
                    await members.stop()
                nursery.cancel_scope.cancel()


def report_failure(descriptor: int, reason: str) -> None:
    """Say to the parent why this process ends; a parent that is gone is no error.  `descriptor` is the caller's."""
    with suppress(OSError):
        os.write(descriptor, msgspec.json.encode(reason[:REASON_CHARACTERS_MAX]) + _END)


async def report_to_parent(
    descriptor: int, running: Running, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Be the face of a member's process to its parent: say where it serves, and stop it when the parent is gone."""
    async with trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor))) as stream:
        task_status.started(None)
        try:
            await stream.send_all(msgspec.json.encode(running.addresses) + _END)
            await stream.receive_some(1)
        except trio.BrokenResourceError:
            pass  # the parent was killed
        if not running.stopping.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()
