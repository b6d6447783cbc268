"""A team of processes behind one S3 port: the leader starts, restarts and ends them.

The leader serves only the admin port.  It reserves the address with a bound socket that does not listen, so that the
address stays ours whatever happens to the members.  Each member listens there itself, and the kernel spreads new
connections over the listening members (SO_REUSEPORT).

Rules kept here:
- A member that ends, or has not reported for SILENCE_S, is started again, after pauses that double up to PAUSE_S_MAX
  until one has lived for STABLE_S.
- At the start a member that ends before it serves ends the team; its reason is on stderr already.
- SIGTERM and SIGINT reach every member once; all of them finish requests in flight.  A second signal kills.  SIGHUP is
  passed on.
- No member outlives its leader: it sees the end of its socket.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
import trio

from cli.serve.gateway_process import (
    DRAIN_TIMEOUT_S,
    HINT,
    GatewayPlan,
    Report,
    heed_signals,
    receive_reports,
    start_admin,
)
from cli.terminal.systemd_notify import keep_watchdog, notifier_from
from gateway.admin.metrics import Reading
from gateway.face import certificates_of, port_taken
from gateway.s3.telemetry.traffic import Connections, Snapshot
from lakefs.errors import AddressInUse
from lakefs.transport.address import TcpAddress
from lakefs.transport.streams import PortUse, bind_tcp

SILENCE_S: Final = 30.0
"""A member that has not reported for this long hangs; a start takes less, too."""
STABLE_S: Final = 30.0
PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 10.0
EXIT_KILLED: Final = 70
_log: Final = structlog.get_logger(__name__)


@dataclass
class _Member:
    """One place in the team, and its present process."""

    number: int
    process: trio.Process | None = None
    report: Report | None = None
    """The last report of the living process; None until it serves."""
    heard_at: float = 0.0
    has_served: trio.Event = field(default_factory=trio.Event)

    def heard(self, report: Report) -> None:
        self.report = report
        self.heard_at = trio.current_time()
        self.has_served.set()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class _Team:
    """All members.  `exit_code` is set if the start failed."""

    def __init__(self, count: int, command: Sequence[str], token: str) -> None:
        self.members = [_Member(number) for number in range(count)]
        self.stopping = trio.Event()
        self.restarts = 0
        self._past = Snapshot()
        self.exit_code = 0
        self._command = command
        self._environment = os.environ | ({"LAKE_TOKEN": token} if token else {})
        self._has_started = False

    def not_ready(self) -> str | None:
        """Return the reason for not serving S3 fully, or None."""
        if self.stopping.is_set():
            return "stopping"
        reports = [member.report for member in self.members if member.report is not None]
        if not reports:
            return "no process serves"
        return next((report.not_ready for report in reports if report.not_ready is not None), None)

    def counts(self) -> tuple[Snapshot, Connections]:
        """Return the traffic of all processes, also ended ones, and the open connections."""
        counts, connections = self._past, Connections()
        for member in self.members:
            if member.report is not None:
                counts = counts.plus(member.report.counts)
                connections = connections.plus(member.report.connections)
        return counts, connections

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until every member has ended; started when all serve, or one could not."""
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(self._keep, member)
            for member in self.members:
                await member.has_served.wait()
            self._has_started = True
            task_status.started()

    def stop(self) -> None:
        """Make every member finish its requests, and end."""
        self.stopping.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal to every process."""
        for member in self.members:
            member.signal(number)

    async def _keep(self, member: _Member) -> None:
        pause_s = PAUSE_S
        while not self.stopping.is_set():
            began = trio.current_time()
            code = await self._live(member)
            if self.stopping.is_set():
                break
            if not self._has_started:
                self.exit_code = code if code > 0 else EXIT_KILLED
                self.stop()
                break
            pause_s = PAUSE_S if trio.current_time() - began > STABLE_S else min(2 * pause_s, PAUSE_S_MAX)
            _log.error("gateway_process_ended", process=member.number, exit_code=code, again_in_s=pause_s)
            self.restarts += 1
            with trio.move_on_after(pause_s):
                await self.stopping.wait()
        member.has_served.set()

    async def _live(self, member: _Member) -> int:
        """Run one process from start to end; returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = member.process = await trio.lowlevel.open_process(
                [*self._command, "--member", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the leader, which passes it on
            )
        member.heard_at = trio.current_time()
        async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(receive_reports, stream, member.heard)
            nursery.start_soon(_kill_when_silent, member, process)
            try:
                code = await process.wait()
            finally:
                if member.report is not None:
                    self._past = self._past.plus(member.report.counts)
                member.report = None
            nursery.cancel_scope.cancel()
        return code


async def _kill_when_silent(member: _Member, process: trio.Process) -> None:
    while True:
        left_s = member.heard_at + SILENCE_S - trio.current_time()
        if left_s <= 0:
            break
        await trio.sleep(left_s)
    _log.error("gateway_process_hangs", process=member.number, silent_s=SILENCE_S)
    process.kill()


async def run_team(plan: GatewayPlan, count: int, arguments: Sequence[str], printer: Callable[[str], None]) -> int:
    """Serve with `count` processes until a signal arrives; returns the exit code.  Start errors as in `run_gateway`."""
    notifier = notifier_from()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        scheme = "http" if certificates_of(plan.config) is None else "https"  # said once, if it cannot be used
        bound, reservation = await _reserve(plan)
        with reservation:
            command = [sys.executable, "-P", "-m", "cli.main", "gateway", "--s3", bound, *arguments]
            team = _Team(count, command, plan.token)
            patience = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    heed_signals, signals, team.stopping, partial(team.signal, signal.SIGHUP), patience.cancel
                )
                nursery.start_soon(keep_watchdog, notifier)
                await nursery.start(team.run)
                if not team.exit_code:
                    printer(f"engine  {plan.engine}")
                    printer(f"s3      {scheme}://{bound}   ({count} processes)")
                    await start_admin(plan, team.not_ready, team.counts, nursery, printer, *_readings(team))
                    printer("ready")
                    notifier.ready(f"serving {bound} from {plan.engine} with {count} processes")
                    await team.stopping.wait()
                    printer("stopping: finishing what is in flight")
                    notifier.stopping("finishing what is in flight")
                await _end(team, patience)
                nursery.cancel_scope.cancel()
    if not team.exit_code:
        printer("stopped")
    return team.exit_code


async def _end(team: _Team, patience: trio.CancelScope) -> None:
    """Wait for all members to finish; kill them when patience ends, or after too long."""
    team.stop()
    patience.deadline = trio.current_time() + DRAIN_TIMEOUT_S + 10
    with patience:
        for member in team.members:
            if member.process is not None:
                await member.process.wait()
    if patience.cancelled_caught:
        team.signal(signal.SIGKILL)


async def _reserve(plan: GatewayPlan) -> tuple[str, socket.socket]:
    """Return the address with its real port, and the socket that reserves it."""
    use = PortUse.JOIN if plan.share_port else PortUse.FIRST
    try:
        address, reservation = await bind_tcp(TcpAddress(plan.s3.host, plan.s3.port), use)
    except AddressInUse as error:
        raise port_taken(plan.s3, HINT) from error
    return str(address).removeprefix("tcp://"), reservation


def _readings(team: _Team) -> list[Reading]:
    return [
        Reading(
            "lake_gateway_processes",
            "Processes that serve",
            lambda: sum(member.report is not None for member in team.members),
        ),
        Reading("lake_gateway_restarts_total", "Processes that ended and were started again", lambda: team.restarts),
    ]
