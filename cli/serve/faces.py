"""The other faces of an engine process: the admin port and the service manager; S3's is in `cli.serve.s3_face`.

Only `cli` may import engine, gateway and systemd notices together.
"""

from __future__ import annotations

from functools import partial

import trio

from cli.serve.engine_metrics import readings
from cli.terminal.systemd_notify import notifier_from
from engine.process.engine_process import RunningEngine
from gateway.admin.metrics import new_registry
from gateway.admin.server import serve_admin_at
from lakefs.version import VERSION

STATUS_INTERVAL_S = 10.0


async def serve_admin_port(
    engine: RunningEngine, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve health, readiness and metrics, if the configuration has an admin address."""
    address = engine.config.admin
    if address is None:
        task_status.started(None)
        return
    registry = new_registry(VERSION, readings(engine), engine.collectors)
    async with trio.open_nursery() as nursery:
        serving = partial(serve_admin_at, address, ready=engine.not_ready, registry=registry)
        task_status.started(f"admin   {await nursery.start(serving)}")


async def notify_manager(
    engine: RunningEngine, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Report to systemd that the engine serves, that it stops, and at intervals that the loop is alive."""
    notifier = notifier_from()
    notifier.ready(f"serving {engine.config.data}")
    task_status.started(None)
    interval_s = (notifier.watchdog_s or 2 * STATUS_INTERVAL_S) / 2
    while not engine.stopping.is_set():
        notifier.watchdog()
        with trio.move_on_after(interval_s):
            await engine.stopping.wait()
    notifier.stopping("finishing what is in flight")
    while True:
        notifier.watchdog()
        await trio.sleep(interval_s)
