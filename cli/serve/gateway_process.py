"""One process of a gateway: S3 for clients on one side, a client of an engine on the other.

SIGTERM and SIGINT end it: it accepts nothing more and finishes answers under way, for a minute at most; a second signal
ends the wait.  SIGHUP reloads the settings that may change while it runs.  A member of a team (`gateway_workers`)
reports once a second, and ends when its leader is gone.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from cli.serve.gateway_report import Report, send_reports
from cli.terminal.systemd_notify import notifier_from
from cli.terminal.systemd_watchdog import keep_watchdog
from gateway.admin.metrics import Reading, new_registry
from gateway.admin.server import serve_admin_at
from gateway.face import S3Face, listen_s3
from gateway.s3.request.call import Lakes
from gateway.s3.telemetry.metrics import TrafficCollector
from lakefs.client.trio.awaited import AwaitedEngine
from lakefs.client.trio.driver import TrioDriver
from lakefs.config.settings import Address, Config
from lakefs.content.verify import Check
from lakefs.host.offload import ThreadOffload
from lakefs.transport.streams import PortUse
from lakefs.version import VERSION

DRAIN_TIMEOUT_S: Final = 60.0
"""Most time for answers under way when the process stops; the systemd unit waits longer."""
WORK_THREADS: Final = 4
HINT: Final = "--share-port to serve it together"


@dataclass(frozen=True)
class GatewayPlan:
    """The settings of the command line.  `member`: the descriptor to the team's leader, None for one on its own."""

    config: Config
    s3: Address
    engine: str
    token: str
    share_port: bool
    member: int | None


class _Stopping:
    """The state of the stop, and the reason for not being ready."""

    def __init__(self, engine: AwaitedEngine) -> None:
        self.began = trio.Event()
        self._engine = engine

    def not_ready(self) -> str | None:
        return "stopping" if self.began.is_set() else self._engine.not_ready


async def run_gateway(plan: GatewayPlan, printer: Callable[[str], None]) -> None:
    """Serve until a signal arrives.  Raises AddressInUse, PermissionDenied, ConfigError and the like at the start."""
    notifier = notifier_from()
    signals_of_interest = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with trio.open_signal_receiver(*signals_of_interest) as signals:
        async with ThreadOffload(WORK_THREADS, "lake-gateway") as offload, trio.open_nursery() as nursery:
            listener = await listen_s3(plan.s3, PortUse.JOIN if plan.share_port else PortUse.FIRST, HINT)
            engine = AwaitedEngine(plan.engine, plan.token)
            await nursery.start(engine.run)
            driver = TrioDriver(engine, offload, network=not engine.carries_descriptors, check=Check.CRC32C)
            face = S3Face(Lakes(engine, driver, offload), plan.config)
            url = str(await nursery.start(face.serve, listener))
            stopping = _Stopping(engine)
            printer(f"engine  {plan.engine}{f'  ({engine.not_ready})' if engine.not_ready else ''}")
            printer(f"s3      {url}")
            await _start_admin(plan, stopping, face, nursery, printer)
            nursery.start_soon(keep_watchdog, notifier, lambda: True)
            if plan.member is not None:
                nursery.start_soon(
                    send_reports, plan.member, lambda: Report(stopping.not_ready(), *face.counts()), stopping.began
                )
            printer("ready")
            notifier.ready(f"serving {url} from {plan.engine}")
            drain = trio.CancelScope()
            nursery.start_soon(heed_signals, signals, stopping.began, face.reload, drain.cancel)
            await stopping.began.wait()
            notifier.stopping("finishing what is in flight")
            printer("stopping: finishing what is in flight")
            with drain:
                await face.drain(DRAIN_TIMEOUT_S)
            await driver.aclose()
            nursery.cancel_scope.cancel()
    printer("stopped")


async def _start_admin(
    plan: GatewayPlan, stopping: _Stopping, face: S3Face, nursery: trio.Nursery, printer: Callable[[str], None]
) -> None:
    address = plan.config.admin
    if address is None:
        return
    registry = new_registry(VERSION, readings(stopping.not_ready), [TrafficCollector(face.counts)])
    serving = partial(serve_admin_at, address, ready=stopping.not_ready, registry=registry)
    printer(f"admin   {await nursery.start(serving)}")


def readings(not_ready: Callable[[], str | None]) -> list[Reading]:
    """Return the metrics of a gateway."""
    return [Reading("lake_ready", "1 when S3 is served from the engine", lambda: float(not_ready() is None))]


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
