"""The other faces of an engine process: the admin port and the service manager; S3's is in `cli.s3_face`.

`cli` is the only room that may know engine, gateway and systemd at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import trio

from engine.process import RunningEngine
from engine.store import Store
from gateway.admin import serve_admin_at
from gateway.metrics import Reading, new_registry
from lakefs.version import VERSION
from systemd.notify import notifier_from

STATUS_INTERVAL_S = 10.0


async def serve_admin_port(
    engine: RunningEngine, *, task_status: trio.TaskStatus[str | None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve health, readiness and metrics, when the configuration asks for it."""
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
    """Tell systemd that the engine serves, that it stops, and all the time that the loop is alive."""
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


def readings(engine: RunningEngine) -> list[Reading]:
    """What `/metrics` says of the store; each is read from memory, nothing blocks."""
    store = engine.store

    def metadata(name: str) -> float:
        value: Any = store.metadata.stats()[name]
        return float(value)

    return [
        Reading("lake_ready", "1 when the engine serves", lambda: float(engine.not_ready() is None)),
        Reading("lake_connections", "Open connections", lambda: float(engine.server.connection_count)),
        Reading(
            "lake_holds",
            "Sessions and leases",
            lambda: {k: float(v) for k, v in store.holds.statistics().items()},
            "kind",
        ),
        Reading("lake_segments", "Segment files", lambda: float(len(store.segments.all_ids()))),
        Reading(
            "lake_healed_reads_total",
            "Reads that matched their checksums only past the page cache",
            lambda: float(store.segments.healed_reads),
            counter=True,
        ),
        *scrub_readings(store),
        Reading("lake_overlay_entries", "Entries not yet in the index", lambda: metadata("overlay_entries")),
        Reading(
            "lake_journal_bytes",
            "Journal since the last checkpoint",
            lambda: metadata("journal_bytes_since_checkpoint"),
        ),
        Reading("lake_durable_sequence", "Last durable journal group", lambda: metadata("durable_sequence")),
        Reading("lake_buffers_in_use", "Payload buffers in use", lambda: float(store.buffers.in_use)),
        Reading(
            "lake_reserve_bytes", "Room held for journal and index", lambda: float(store.reserve.held_bytes)
        ),
    ]


def scrub_readings(store: Store) -> list[Reading]:
    """What `/metrics` says of scrub and quarantine."""
    scrubber = store.scrubber
    return [
        Reading("lake_scrub_running", "1 while scrub reads", lambda: float(scrubber.running)),
        Reading("lake_scrub_position", "Share of the pass that is done, 0 to 1", lambda: scrubber.position),
        Reading(
            "lake_scrub_bytes_total",
            "Payload bytes that scrub has checked",
            lambda: float(scrubber.totals.payload_bytes),
            counter=True,
        ),
        Reading(
            "lake_scrub_chunks_total",
            "Chunks that scrub has checked",
            lambda: float(scrubber.totals.chunks),
            counter=True,
        ),
        Reading(
            "lake_scrub_damage_total",
            "Chunks that scrub found damaged",
            lambda: float(scrubber.totals.damaged),
            counter=True,
        ),
        Reading(
            "lake_scrub_last_pass_timestamp_seconds",
            "When the last full pass ended, in seconds since 1970; 0: never",
            lambda: scrubber.state.last_ended_ns / 1e9,
        ),
        Reading(
            "lake_quarantined_chunks", "Chunks known to be damaged", lambda: float(len(store.quarantine))
        ),
    ]
