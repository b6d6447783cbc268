"""Front ends of an engine process beside the native protocol: S3, the admin port and the service manager; and the first
access key.

Only `cli` may import engine, gateway and systemd notices together.

Rules kept here:
- A store that was never written to gets one access key when S3 is served from it, so that its first user can begin.
  The secret is printed only on a terminal.  Elsewhere stdout is a journal, a log or a pipe to one, where a secret
  outlives its use and more people read it: there it is in a file of the store's owner, whose path is printed.
- A key whose secret could not be delivered is revoked.
- A revoked key is never replaced unasked.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import Final

import structlog
import trio

from cli.serve.engine_metrics import readings
from cli.terminal.systemd_notify import notifier_from
from engine.process.embedded import EmbeddedEngine
from engine.process.engine_process import RunningEngine
from engine.process.running import Running
from engine.superblock.secret_files import keep_first_key
from gateway.admin.metrics import Reading, new_registry
from gateway.admin.server import serve_admin_at
from gateway.face import S3Face, listen_s3
from gateway.s3.request.call import Lakes
from gateway.s3.telemetry.traffic import TrafficCollector
from lakefs.client.trio.driver import TrioDriver
from lakefs.content.verify import Check
from lakefs.errors import LakeError
from lakefs.ports import Disk
from lakefs.transport.streams import PortUse
from lakefs.version import VERSION, commit
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import AccessKeyCreate, AccessKeyList, AccessKeyRemove, AccessKeys

STATUS_INTERVAL_S: Final = 10.0
_NO_KEY: Final = "s3 key  none yet; make one with: lake key create"
_log: Final = structlog.get_logger(__name__)


async def serve_s3_port(
    engine: Running, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve S3 from the engine of this process, if the configuration has an S3 address."""
    address = engine.config.s3
    if address is None:
        task_status.started(None)
        return
    client = EmbeddedEngine(engine.service)
    offload = engine.offload
    face = S3Face(Lakes(client, TrioDriver(client, offload, check=Check.CRC32C), offload), engine.config)
    listener = await listen_s3(address, PortUse.ALONE, "--s3 off")
    key_lines = await first_key(client, engine.disk, may_make=engine.is_untouched)
    async with trio.open_nursery() as nursery:
        url = str(await nursery.start(face.serve, listener))
        engine.drains.append(face.drain)
        engine.collectors.append(TrafficCollector(face.counts))
        nursery.start_soon(_reload_on_hangup, face)
        task_status.started("\n".join([f"s3      {url}", *key_lines]))


async def serve_admin_port(
    engine: Running, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve health, readiness and metrics, if the configuration has an admin address."""
    address = engine.config.admin
    if address is None:
        task_status.started(None)
        return
    registry = new_registry((VERSION, commit()), _readings(engine), engine.collectors)
    async with trio.open_nursery() as nursery:
        serving = partial(serve_admin_at, address, ready=engine.not_ready, registry=registry)
        task_status.started(f"admin   {await nursery.start(serving)}")


def _readings(running: Running) -> list[Reading]:
    if isinstance(running, RunningEngine):
        return readings(running)
    from cli.serve.lake_metrics import lake_readings

    return lake_readings(running)


async def notify_manager(
    engine: Running, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
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


async def _reload_on_hangup(face: S3Face) -> None:
    """Reload certificate and log on SIGHUP; connections stay open."""
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            face.reload()


async def first_key(engine: EngineClient, disk: Disk, *, may_make: bool) -> list[str]:
    """Return the lines to print about access keys: a new first key, or that there is none, or nothing."""
    try:
        found = (await engine.call(AccessKeyList())).message
        assert isinstance(found, AccessKeys)
        if found.keys:
            return []
        if not may_make:
            return [_NO_KEY]
        made = (await engine.call(AccessKeyCreate())).message
        assert isinstance(made, AccessKeys)
        [key] = made.keys
        if stdout_is_terminal():
            return [
                f"access key  {key.access_key}",
                f"secret key  {key.secret_key}",
                "            (shown this once; lake key create makes others)",
            ]
        try:
            path = keep_first_key(disk, key.access_key, key.secret_key)
        except LakeError:
            await engine.call(AccessKeyRemove(key.access_key))
            raise
    except LakeError as error:  # a full or read-only store serves what it has
        _log.warning("no access key could be made", reason=error.message)
        return [_NO_KEY]
    return [
        f"access key  {key.access_key}",
        f"secret key  in {path}",
        "            (readable by its owner alone; remove that file when you have the secret)",
    ]


def stdout_is_terminal() -> bool:
    """Return True if printed text is seen by a person and not kept."""
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # closed
        return False
