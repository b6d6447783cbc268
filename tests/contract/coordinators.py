"""The implementations of `Coordinator` that its suites run over, and short ways to ask them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
import trio
from trio.testing import MockClock

from engine.coordinator.coordinator import END, NO_LEASE, Changes, Coordinator, Entry, Put, ReadAnew, Watch
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.names_coordinator import NamesCoordinator, open_names_coordinator
from engine.coordinator.remote_coordinator import open_remote_coordinator
from engine.coordinator.watch_history import History
from engine.format.features import Feature
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.host.local_disk import LocalDisk
from engine.metadata.metadata_store import Metadata
from engine.requests.table import NamesService
from engine.server.listener import Server
from lakefs.ids import LeaseId, Revision
from lakefs.ports import Disk, Listener, Network, Offload
from lakefs.transport.streams import TrioNetwork
from tests.memory_coordinator import HISTORY, memory_coordinator
from tests.names_rig import names_store as names_store_of_a_lake
from tests.rebased_coordinator import RebasedCoordinator
from tests.sim.cluster.network import Network as HostNetwork
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.sim.world.network import SimulatedNetwork
from tests.unit.support.metadata_rig import opened

SCHEDULES: Final = range(6)
"""Seeds of the order of tasks, for what many of them do at once."""
TOKEN: Final = "token of the lake"
URL_FILE: Final = "url"
"""In the folder of the etcd that the tests of a session share."""
Opened = partial[AbstractAsyncContextManager[Coordinator]]
_lakes: Final = itertools.count()
short_history: Final = partial(History, count_max=HISTORY)


@dataclass(frozen=True)
class CoordinatorKind:
    """An implementation: its name, and a call that opens a new coordinator in an empty folder.

    `is_etcd`: a transaction that changes nothing may have a revision, a lease may have more keys, and an event arrives
    a little after the answer.  `is_outside`: its server is another process, which all tests share, in real time.
    `forgets`: `compact` forgets at once.
    """

    name: str
    opened: Callable[[Path], AbstractAsyncContextManager[Coordinator]]
    is_etcd: bool = False
    is_outside: bool = False
    forgets: bool = False

    @property
    def quiet_s(self) -> float:
        """Time after which nothing more arrives: any time on a clock that jumps."""
        return 0.3 if self.is_outside else 100


@asynccontextmanager
async def names_store(
    disk: Disk, *, clean: bool = True, sizes: MetadataSizes = DEFAULT_SIZES, offload: Offload | None = None
) -> AsyncIterator[tuple[NamesCoordinator, Metadata]]:
    """Open the store with a cluster's names on a disk, and its coordinator; trio's clock is the coordinator's."""
    async with (
        opened(disk, clean=clean, sizes=sizes, offload=offload, has_names=True) as metadata,
        open_names_coordinator(metadata, SimClock(), Feature.CLUSTER_NAMES, short_history) as coordinator,
    ):
        yield coordinator, metadata


@asynccontextmanager
async def _on_simulated_disk(_: Path) -> AsyncIterator[Coordinator]:
    async with names_store(SimDisk(1)) as (coordinator, _metadata):
        yield coordinator


@asynccontextmanager
async def _on_local_disk(folder: Path) -> AsyncIterator[Coordinator]:
    async with names_store(LocalDisk(folder)) as (coordinator, _metadata):
        yield coordinator


@asynccontextmanager
async def _in_memory(_: Path) -> AsyncIterator[Coordinator]:
    async with memory_coordinator() as coordinator:
        yield coordinator


@asynccontextmanager
async def served_names(listener: Listener, disk: SimDisk) -> AsyncIterator[None]:
    """Serve names with a coordinator, by the token TOKEN.  They shut down at the end of the block."""
    async with (
        names_store_of_a_lake(disk) as store,
        open_names_coordinator(
            store.metadata, store.clock, store.superblock.incompat_features, short_history
        ) as coordinator,
        trio.open_nursery() as nursery,
    ):
        server = Server(NamesService(store, coordinator=coordinator_group(coordinator)), TrioNetwork(), token=TOKEN)
        await nursery.start(partial(server.serve, listener, trusted=False))
        yield
        await server.drain(1)


@asynccontextmanager
async def _remote(network: Network, address: str) -> AsyncIterator[Coordinator]:
    listener = await network.listen(address)
    async with (
        open_remote_coordinator(listener.address, token=TOKEN, network=network) as coordinator,
        served_names(listener, SimDisk()),
    ):
        yield coordinator


@asynccontextmanager
async def _over_simulated_network(_: Path) -> AsyncIterator[Coordinator]:
    async with _remote(SimulatedNetwork(random.Random(1), latency_s=0.001), "tcp://names:0") as coordinator:
        yield coordinator


@asynccontextmanager
async def _on_etcd(folder: Path) -> AsyncIterator[Coordinator]:
    """Yield a new lake's coordinator, with revisions from 1 on, and a history as short as the others'."""
    from engine.etcd import etcd_link
    from engine.etcd.etcd_coordinator import open_etcd_coordinator
    from engine.etcd.etcd_link import EtcdAccess

    url = (folder / URL_FILE).read_text()
    with in_real_time(), mock.patch.multiple(etcd_link, ETCD_TRY_S=30.0, ETCD_CALL_S=60.0):  # a busy disk may take long
        async with open_etcd_coordinator(EtcdAccess((url,)), f"suite-{next(_lakes)}") as coordinator:
            begun = (await coordinator.get(b"a")).revision
            rebased = RebasedCoordinator(coordinator, begun, HISTORY)
            yield rebased
            await rebased.revoke_all()


@asynccontextmanager
async def _on_simulated_etcd(_: Path) -> AsyncIterator[Coordinator]:
    from tests.sim.cluster.etcd_nodes import etcd_nodes
    from tests.sim.cluster.far_etcd import far_etcd

    async with trio.open_nursery() as nursery:
        network = HostNetwork(random.Random(1), nursery)
        async with etcd_nodes(network, random.Random(2)) as nodes, far_etcd(nodes, "host") as coordinator:
            yield RebasedCoordinator(coordinator, Revision(nodes.state.revision), HISTORY)
        nursery.cancel_scope.cancel()


@contextmanager
def in_real_time() -> Iterator[None]:
    """Let the clock of a test go on by itself, instead of jumping: a server outside knows nothing of it."""
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, MockClock):
        yield
        return
    jumps, clock.autojump_threshold = clock.autojump_threshold, math.inf
    clock.rate = 1.0
    try:
        yield
    finally:
        clock.rate = 0.0
        clock.autojump_threshold = jumps


@asynccontextmanager
async def _over_tcp(_: Path) -> AsyncIterator[Coordinator]:
    async with _remote(TrioNetwork(), "tcp://127.0.0.1:0") as coordinator:
        yield coordinator


KINDS: Final = (
    CoordinatorKind("memory", _in_memory, forgets=True),
    CoordinatorKind("names", _on_simulated_disk),
    CoordinatorKind("names-local", _on_local_disk),
    CoordinatorKind("remote", _over_simulated_network),
    CoordinatorKind("remote-tcp", _over_tcp),
    CoordinatorKind("etcd-simulated", _on_simulated_etcd, is_etcd=True, forgets=True),
    CoordinatorKind("etcd", _on_etcd, is_etcd=True, is_outside=True, forgets=True),
)


def opened_by(request: pytest.FixtureRequest, kind: CoordinatorKind, folder: Path) -> Opened:
    """Return a call that opens a new coordinator; of an etcd that all tests of the session share."""
    return partial(kind.opened, request.getfixturevalue("suite_etcd") if kind.is_outside else folder)


async def put(coordinator: Coordinator, key: bytes, value: bytes = b"v", lease: LeaseId = NO_LEASE) -> Revision:
    """Put a key; return the revision."""
    done = await coordinator.transact([], [Put(key, value, lease)])
    assert done.succeeded
    return done.revision


async def entry_of(coordinator: Coordinator, key: bytes) -> Entry:
    """Return the entry of a key that is present."""
    found = (await coordinator.get(key)).entry
    assert found is not None
    return found


async def keys_of(coordinator: Coordinator) -> list[bytes]:
    """Return all keys, by pages."""
    keys: list[bytes] = []
    while True:
        page = await coordinator.range(b"\0", END, limit=100, after=keys[-1] if keys else b"")
        keys += [entry.key for entry in page.entries]
        if not page.more:
            return keys


async def next_changes(watch: Watch) -> Changes:
    """Return the next event, which must be a change."""
    event = await anext(watch)
    assert isinstance(event, Changes), event
    return event


async def events_to_the_end(watch: Watch) -> list[Changes | ReadAnew]:
    """Return all events of a watch that ends."""
    with trio.fail_after(60):
        return [event async for event in watch]


def as_values(event: Changes | ReadAnew) -> dict[bytes, bytes | None]:
    """Return the values of an event's keys, None for removed ones."""
    assert isinstance(event, Changes), event
    return {change.key: None if change.entry is None else change.entry.value for change in event.changes}
