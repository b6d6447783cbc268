"""One engine process: a store, its listeners, and an orderly end.

`run_engine` opens the store, listens on the Unix socket (and on TCP if configured), starts the front ends that its
caller passes (`Face`: S3, admin port, notices to the service manager), and serves until SIGTERM or SIGINT.  It collects
garbage every 10 minutes, and scrubs.  At the signal it stops accepting, waits at most 20 s for requests in flight, and
stops the store cleanly.  A second signal ends the wait.

The engine imports none of the front ends that are passed to it.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import trio

from engine.fabric.engine_fabric import EngineFabric
from engine.host.local_disk import LocalDisk
from engine.host.memory_limits import give_back_free_heap
from engine.process.places import group_id, judge_permissions, places_made
from engine.process.rdma_device import rdma_device
from engine.process.shared_index_life import run_keyed_index, run_shared_index
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.local_store import open_local_store
from engine.store.store import Store
from engine.superblock.secret_files import native_token
from engine.tiers.arena import tier_bytes
from lakefs.config.settings import Config
from lakefs.errors import LakeError
from lakefs.fabric.devices import OpenFabric, open_device
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.host.memory_limits import memory_bytes
from lakefs.limits import CONNECTIONS_MAX, SCRUB_STEP_S_MAX, STRANGERS_MAX
from lakefs.transport.streams import TrioNetwork

DRAIN_TIMEOUT_S: Final = 20.0
GC_INTERVAL_S: Final = 600.0
KEYED_GC_GAP_S: Final = 60.0
"""Least time between cycles of gc that eviction asks for."""
SCRUB_DELAY_S: Final = 60.0
"""Delay of the scrub after the start, so that clients reconnect first."""
OWN_DESCRIPTORS: Final = 128
"""Descriptors for journal, index, open segments, listeners and spares; read files and connections share the rest."""
DESCRIPTORS_PER_SLAB: Final = 2
"""Descriptors of a slab: one to send to clients, and one that its mapping keeps."""
_CONNECTIONS_MIN: Final = 8
_log: Final = structlog.get_logger()


@dataclass
class RunningEngine:
    """The parts of the engine that other faces of the same process may use."""

    config: Config
    store: Store
    service: Service
    server: Server
    addresses: list[str] = field(default_factory=list)
    drains: list[Callable[[float], Awaitable[None]]] = field(default_factory=list)
    """Called when the stop begins: each finishes a face's work, within the given seconds."""
    collectors: list[Any] = field(default_factory=list)
    """Metrics of other faces for the admin port, which starts after them."""
    stopping: trio.Event = field(default_factory=trio.Event)
    """Set when the stop begins: requests in flight are finished, and no new ones are begun."""

    @property
    def is_untouched(self) -> bool:
        """True if the store holds only its root, written in the first group."""
        return self.store.metadata.durable_sequence <= 1

    def not_ready(self) -> str | None:
        """Return why the engine does not serve; None when it does."""
        if self.stopping.is_set():
            return "stopping"
        return self.store.read_only_because or None


Face = Callable[..., Awaitable[None]]
"""`async def face(engine: RunningEngine, *, task_status)`: calls `started` with a line to print, or None."""


async def run_engine(
    config: Config, *, printer: Callable[[str], None], faces: Sequence[Face] = (), open_fabric: OpenFabric = open_device
) -> None:
    """Serve until SIGTERM or SIGINT.  Raises the errors of `open_store` and of binding the addresses.

    `open_fabric` opens the RDMA device.
    """
    with places_made(config):
        async with rdma_device(config, open_fabric) as fabric:
            await _run_in_places(config, printer, faces, fabric)
    printer("stopped")


async def _run_in_places(
    config: Config, printer: Callable[[str], None], faces: Sequence[Face], fabric: EngineFabric
) -> None:
    group = group_id(config.socket_group)
    judge_permissions(config, group)
    tier_size = _dram_tier_bytes(config.dram_tier_bytes)
    slabs = tier_size // SLAB_BYTES
    others = DESCRIPTORS_PER_SLAB * slabs + (STRANGERS_MAX if config.native else 0)
    connections = _connections_max(_raise_descriptor_limit() - others)
    listening = trio.Event()
    """Set before the engine listens: from then on a client may have a reply, and a new store is kept."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_local_store(
            config.data,
            upload_expiry_s=config.upload_expiry,
            dram_tier_bytes=tier_size,
            io_uring=config.io_uring,
            fabric=fabric,
            is_kept=listening.is_set,
        ) as store:
            store.scrubber.rate_bytes_per_s = config.scrub_rate
            store.after_collecting = give_back_free_heap
            if config.io_uring and (reason := store.segments.batches.statistics()["reason"]):
                _log.warning("the disk is read through threads", reason=reason)
            token = native_token(LocalDisk(config.data)) if config.native else None
            service = Service(store)
            network = TrioNetwork(group=group)
            server = Server(service, network, token=token, connections_max=connections)
            engine = RunningEngine(config, store, service, server)
            async with trio.open_nursery() as nursery:
                await nursery.start(run_shared_index, store, config.hot_index, config.hot_index_entries)
                await nursery.start(run_keyed_index, store)
                listening.set()
                await _start_faces(engine, nursery, printer, faces)
                nursery.start_soon(_collect_periodically, store)
                nursery.start_soon(_scrub_periodically, store, config.scrub_interval)
                await _wait_for_signal(signals)
                engine.stopping.set()
                printer("stopping: finishing what is in flight")
                with trio.CancelScope() as drain:
                    nursery.start_soon(_cancel_on_signal, signals, drain)
                    async with trio.open_nursery() as drains:
                        for finish in (server.drain, *engine.drains):
                            drains.start_soon(finish, DRAIN_TIMEOUT_S)
                nursery.cancel_scope.cancel()


async def _start_faces(
    engine: RunningEngine, nursery: trio.Nursery, printer: Callable[[str], None], faces: Sequence[Face]
) -> None:
    config = engine.config
    listen = [f"unix:{config.socket}"] + ([f"tcp://{config.native}"] if config.native else [])
    for address in listen:
        engine.addresses.append(await nursery.start(engine.server.listen_and_serve, address))
    printer(f"store   {config.data}  ({engine.store.superblock.store_id.hex()})")
    for address in engine.addresses:
        printer(f"listen  {address}")
    for face in faces:
        line = await nursery.start(face, engine)
        if line:
            printer(str(line))
    printer("ready")


async def _wait_for_signal(signals: Any) -> None:
    async for _ in signals:
        return


async def _cancel_on_signal(signals: Any, drain: trio.CancelScope) -> None:
    await _wait_for_signal(signals)
    drain.cancel()


async def _collect_periodically(store: Store) -> None:
    """Collect garbage every GC_INTERVAL_S, or when eviction asks; logs a failing cycle and tries again at the next."""
    while True:
        gap_s = min(KEYED_GC_GAP_S, GC_INTERVAL_S)
        await trio.sleep(gap_s)
        with trio.move_on_after(GC_INTERVAL_S - gap_s):
            await store.keyed.garbage.wait()
        try:
            report = await store.collect()
        except LakeError as error:
            _log.error("garbage collection failed", error=error.message)
        else:
            _log.info(
                "garbage collected",
                chunks=report.freed_chunks,
                freed_bytes=report.freed_bytes,
                expired_uploads=report.expired_uploads,
                moved_bytes=report.compaction.moved_bytes,
                removed_segments=report.removed_segments + report.compaction.removed_segments,
            )


async def _scrub_periodically(store: Store, interval_s: float) -> None:
    """Continue the scrub's pass, or begin the next when it is due; `interval_s` 0: never."""
    await trio.sleep(SCRUB_DELAY_S)
    while interval_s:
        due_s = store.scrubber.due_in_s(interval_s, store.superblock.created_ns)
        if due_s:
            await trio.sleep(min(due_s, GC_INTERVAL_S))
            continue
        try:
            await store.scrubber.advance(SCRUB_STEP_S_MAX)
        except LakeError as error:
            _log.error("scrub failed", error=error.message)
            await trio.sleep(GC_INTERVAL_S)


def _dram_tier_bytes(asked: int | None) -> int:
    size, warning = tier_bytes(asked, memory_bytes())
    if warning:
        _log.warning(warning)
    return size


def _raise_descriptor_limit() -> int:
    """Raise the descriptor limit to the hard limit; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def _connections_max(descriptors: int) -> int:
    """Return the most native connections: a third of the descriptors that the store's own files leave."""
    return max(_CONNECTIONS_MIN, min(CONNECTIONS_MAX, (descriptors - OWN_DESCRIPTORS) // 3))
