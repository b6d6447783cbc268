"""`lakefs.connect_trio()`: a trio lake at an address, or at the one that `lakefs.client.address` finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lakefs.client.address import resolve, silence_limit
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.content.verify import Check
from lakefs.fabric.client_fabric import ClientFabric
from lakefs.host.offload import ThreadOffload
from lakefs.limits import CLIENT_THREADS


@asynccontextmanager
async def connect_trio(
    address: str | None = None,
    *,
    token: str | None = None,
    check: Check = Check.BLAKE3,
    repeats: bool = True,
    rdma: bool = True,
    timeout: float | None = None,
) -> AsyncIterator[TrioLake]:
    """Connect to an engine until the block ends; if it is lost during the block, wait for it, at most 5 s.

    Parameters and errors are those of `lakefs.connect`.
    """
    where, secret = resolve(address, token)
    async with (
        ThreadOffload(CLIENT_THREADS, "lake-work") as offload,
        connect_reconnecting(where, token=secret, silence_s=silence_limit(timeout)) as engine,
    ):
        network = where.startswith("tcp")
        fabric = ClientFabric(engine) if rdma and network else None
        lake = TrioLake(engine, offload, network=network, check=check, repeats=repeats, fabric=fabric)
        try:
            yield lake
        finally:
            await lake.aclose()
