"""The coordinator as a process on another host reaches it: the product's requests, over a connection to the names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from engine.coordinator.remote_coordinator import RemoteCoordinator, _check_lake
from engine.coordinator.remote_link import NamesClient, RemoteLink
from engine.host.tasks import plain_errors
from engine.requests.table import NamesService
from tests.sim.cluster.clients import client_of
from tests.sim.cluster.network import Network
from tests.sim.cluster.process import SimProcess

ADDRESS = "names"


class CoordinatorPlace(Protocol):
    """The place of the names, which serve the coordinator."""

    process: SimProcess | None
    service: NamesService | None


@asynccontextmanager
async def far_coordinator(
    network: Network, near: str, place: CoordinatorPlace, lake: bytes
) -> AsyncIterator[RemoteCoordinator]:
    """Yield the coordinator as a host sees it; like `open_remote_coordinator`, over the simulated network."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesClient]:
        async with client_of(network, near, place.process, place.service) as client:
            await _check_lake(client, ADDRESS, lake)
            yield client

    with plain_errors():
        async with trio.open_nursery() as nursery:
            link = RemoteLink(ADDRESS, connect, nursery)
            try:
                yield RemoteCoordinator(link)
            finally:
                link.close()
                nursery.cancel_scope.cancel()
