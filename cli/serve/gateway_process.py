"""One process of a gateway: S3 for clients on one side, a client of an engine on the other.

SIGTERM and SIGINT end it: it accepts nothing more and finishes answers under way, for a minute at most; a second signal
ends the wait.  SIGHUP makes it read the certificate again and continue in a new file of the access log.

A member of a team (`gateway_workers`) reports to its leader: one line of JSON a second, over a pair of sockets.

Rules kept here:
- A member whose leader is gone stops: nothing else would restart it, or stop it.
- A leader takes a line of at most REPORT_BYTES_MAX; it stops listening to a member that sends more, or no JSON.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import trio

from cli.terminal.systemd_notify import keep_watchdog, notifier_from
from gateway.admin.metrics import Reading, new_registry
from gateway.admin.server import serve_admin_at
from gateway.face import S3Face, listen_s3
from gateway.s3.request.call import Lakes
from gateway.s3.telemetry.traffic import Connections, Snapshot, TrafficCollector
from lakefs.client.trio.awaited import AwaitedEngine
from lakefs.client.trio.driver import TrioDriver
from lakefs.config.settings import Address, Config
from lakefs.content.verify import Check
from lakefs.host.offload import ThreadOffload
from lakefs.transport.streams import PortUse
from lakefs.version import VERSION, commit

DRAIN_TIMEOUT_S: Final = 60.0
"""Most time for answers under way when the process stops; the systemd unit waits longer."""
WORK_THREADS: Final = 4
HINT: Final = "--share-port to serve it together"
REPORT_EVERY_S: Final = 1.0
REPORT_BYTES_MAX: Final = 256 << 10
"""Some 600 figures take 10 KiB at most."""


@dataclass(frozen=True)
class GatewayPlan:
    """The settings of the command line.  `member`: the descriptor to the team's leader, None for one on its own."""

    config: Config
    s3: Address
    engine: str
    token: str
    share_port: bool
    member: int | None


class Report(msgspec.Struct, frozen=True):
    """The state of one process, and its traffic."""

    not_ready: str | None
    counts: Snapshot
    connections: Connections


_DECODER: Final = msgspec.json.Decoder(Report)


async def run_gateway(plan: GatewayPlan, printer: Callable[[str], None]) -> None:
    """Serve until a signal arrives.  Raises AddressInUse, PermissionDenied, ConfigError and the like at the start."""

    def not_ready() -> str | None:
        return "stopping" if stopping.is_set() else engine.not_ready

    notifier, stopping = notifier_from(), trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with ThreadOffload(WORK_THREADS, "lake-gateway") as offload, trio.open_nursery() as nursery:
            listener = await listen_s3(plan.s3, PortUse.JOIN if plan.share_port else PortUse.FIRST, HINT)
            engine = AwaitedEngine(plan.engine, plan.token, silence_s=plan.config.timeout)
            await nursery.start(engine.run)
            driver = TrioDriver(engine, offload, network=not engine.carries_descriptors, check=Check.CRC32C)
            face = S3Face(Lakes(engine, driver, offload), plan.config)
            url = str(await nursery.start(face.serve, listener))
            printer(f"engine  {plan.engine}{f'  ({engine.not_ready})' if engine.not_ready else ''}")
            printer(f"s3      {url}")
            await start_admin(plan, not_ready, face.counts, nursery, printer)
            nursery.start_soon(keep_watchdog, notifier)
            if plan.member is not None:
                nursery.start_soon(send_reports, plan.member, lambda: Report(not_ready(), *face.counts()), stopping)
            printer("ready")
            notifier.ready(f"serving {url} from {plan.engine}")
            drain = trio.CancelScope()
            nursery.start_soon(heed_signals, signals, stopping, face.reload, drain.cancel)
            await stopping.wait()
            notifier.stopping("finishing what is in flight")
            printer("stopping: finishing what is in flight")
            with drain:
                await face.drain(DRAIN_TIMEOUT_S)
            await driver.aclose()
            nursery.cancel_scope.cancel()
    printer("stopped")


async def start_admin(
    plan: GatewayPlan,
    not_ready: Callable[[], str | None],
    counts: Callable[[], tuple[Snapshot, Connections]],
    nursery: trio.Nursery,
    printer: Callable[[str], None],
    *more: Reading,
) -> None:
    """Serve health, readiness and metrics, if the settings have an admin address."""
    address = plan.config.admin
    if address is None:
        return
    ready = Reading("lake_ready", "1 when S3 is served from the engine", lambda: not_ready() is None)
    registry = new_registry((VERSION, commit()), [ready, *more], [TrafficCollector(counts)])
    serving = partial(serve_admin_at, address, ready=not_ready, registry=registry)
    printer(f"admin   {await nursery.start(serving)}")


async def heed_signals(
    signals: AsyncIterator[int], stopping: trio.Event, reload: Callable[[], None], hurry: Callable[[], None]
) -> None:
    """Reload on SIGHUP; begin the stop on the first other signal, end its wait on the next."""
    async for number in signals:
        if number == signal.SIGHUP:
            reload()
        elif stopping.is_set():
            hurry()
        else:
            stopping.set()


async def send_reports(descriptor: int, report: Callable[[], Report], leader_gone: trio.Event) -> None:
    """Send reports until the leader is gone, then set `leader_gone`."""
    with socket.socket(fileno=descriptor) as raw:
        raw.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(raw.dup()))
    try:
        async with stream:
            while True:
                await stream.send_all(msgspec.json.encode(report()) + b"\n")
                with trio.move_on_after(REPORT_EVERY_S):
                    if not await stream.receive_some(1):
                        break
    except trio.BrokenResourceError:
        pass  # the leader is gone
    leader_gone.set()


async def receive_reports(stream: trio.abc.ReceiveStream, heard: Callable[[Report], None]) -> None:
    """Pass each report to `heard`, until the member has ended or sends anything else."""
    received = bytearray()
    try:
        async for piece in stream:
            received += piece
            *lines, rest = received.split(b"\n")
            for line in lines:
                heard(_DECODER.decode(line))
            received = rest
            if len(received) > REPORT_BYTES_MAX:
                return
    except (trio.BrokenResourceError, msgspec.DecodeError):
        return
