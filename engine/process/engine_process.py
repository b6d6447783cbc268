"""One engine process: a store, served until SIGTERM or SIGINT (`engine.process.running`).

`run_engine` opens the store, and listens on the Unix socket (and on TCP if configured).  It collects garbage every
10 minutes, and scrubs.  At the end it stops the store cleanly.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from engine.fabric.engine_fabric import EngineFabric
from engine.host.memory_limits import give_back_free_heap
from engine.process.places import group_id, judge_permissions, places_made
from engine.process.rdma_device import rdma_device
from engine.process.running import (
    DESCRIPTORS_PER_SLAB,
    Face,
    Running,
    connections_limit,
    serve_until_signal,
    tier_size_of,
)
from engine.process.shared_index_life import run_indexes_of_member, run_keyed_index, run_shared_index
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.local_store import open_local_store
from engine.store.store import Store
from engine.superblock.secret_files import CLUSTER_TOKEN_FILE, native_token, read_token
from engine.superblock.superblock import NO_CLUSTER
from lakefs.config.settings import Config
from lakefs.errors import ConfigError, LakeError
from lakefs.fabric.devices import OpenFabric, open_device
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.limits import SCRUB_STEP_S_MAX, STRANGERS_MAX
from lakefs.transport.streams import TrioNetwork

GC_INTERVAL_S: Final = 600.0
KEYED_GC_GAP_S: Final = 60.0
"""Least time between cycles of gc that eviction asks for."""
SCRUB_DELAY_S: Final = 60.0
"""Delay of the scrub after the start, so that clients reconnect first."""
_log: Final = structlog.get_logger()


@dataclass(kw_only=True)
class RunningEngine(Running):
    """One engine and its store."""

    store: Store

    @property
    def is_untouched(self) -> bool:
        """True if the store holds only its root, written in the first group."""
        return self.store.metadata.durable_sequence <= 1

    def read_only_because(self) -> str:
        """See `Running`."""
        return self.store.read_only_because


async def run_engine(
    config: Config,
    *,
    printer: Callable[[str], None],
    faces: Sequence[Face] = (),
    open_fabric: OpenFabric = open_device,
    cluster_id: bytes = NO_CLUSTER,
    may_take: Callable[[], bool] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.  Raises the errors of `open_store` and of binding the addresses.

    `open_fabric` opens the RDMA device.  `cluster_id`: the lake that the store is a member of.  `may_take`: says if
    that member may take shards now; None: always.
    """
    with places_made(config):
        async with rdma_device(config, open_fabric) as fabric:
            await _run_in_places(config, printer, faces, fabric, cluster_id, may_take)
    printer("stopped")


async def _run_in_places(
    config: Config,
    printer: Callable[[str], None],
    faces: Sequence[Face],
    fabric: EngineFabric,
    cluster_id: bytes,
    may_take: Callable[[], bool] | None,
) -> None:
    group = group_id(config.socket_group)
    if cluster_id == NO_CLUSTER:  # else the process that serves the lake has judged them
        judge_permissions(config, group)
    tier_size = tier_size_of(config)
    slabs = tier_size // SLAB_BYTES
    others = DESCRIPTORS_PER_SLAB * slabs + (STRANGERS_MAX if config.native else 0)
    connections = connections_limit(others)
    listening = trio.Event()
    """Set before the engine listens: from then on a client may have a reply, and a new store is kept."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_local_store(
            config.data,
            upload_expiry_s=config.upload_expiry,
            dram_tier_bytes=tier_size,
            io_uring=config.io_uring,
            fabric=fabric,
            cluster_id=cluster_id,
            is_kept=listening.is_set,
        ) as store:
            store.scrubber.rate_bytes_per_s = config.scrub_rate
            store.after_collecting = give_back_free_heap
            if store.member is not None and may_take is not None:
                store.member.shards.may_take = may_take
            if config.io_uring and (reason := store.segments.batches.statistics()["reason"]):
                _log.warning("the disk is read through threads", reason=reason)
            engine = _running(config, store, _token(config, store), group, connections)
            async with trio.open_nursery() as nursery:
                if cluster_id == NO_CLUSTER:
                    await nursery.start(run_shared_index, store, config.hot_index, config.hot_index_entries)
                    await nursery.start(run_keyed_index, store)
                else:
                    nursery.start_soon(run_indexes_of_member, store, config.hot_index)
                listening.set()
                nursery.start_soon(_collect_periodically, store)
                nursery.start_soon(_scrub_periodically, store, config.scrub_interval)
                await serve_until_signal(engine, nursery, signals, printer, faces)
                nursery.cancel_scope.cancel()


def _token(config: Config, store: Store) -> str | None:
    """Return the token that is asked for over TCP: of a member its lake's, which lies in its folder.  ConfigError."""
    if not config.native:
        return None
    if store.superblock.cluster_id == NO_CLUSTER:
        return native_token(store.disk)
    if not store.disk.exists(CLUSTER_TOKEN_FILE):
        path = store.disk.local_path(CLUSTER_TOKEN_FILE)
        raise ConfigError(f"{path} is missing; copy it from another folder of this machine", subject=path)
    return read_token(store.disk, CLUSTER_TOKEN_FILE)


def _running(config: Config, store: Store, token: str | None, group: int | None, connections: int) -> RunningEngine:
    service = Service(store)
    return RunningEngine(
        config=config,
        service=service,
        server=Server(
            service,
            TrioNetwork(group=group),
            token=token,
            connections_max=connections,
            of_the_lake=store.superblock.cluster_id != NO_CLUSTER,
        ),
        offload=store.offload,
        disk=store.disk,
        title=f"store   {config.data}  ({store.superblock.store_id.hex()})",
        store=store,
    )


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
