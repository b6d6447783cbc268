"""Opens the RDMA device of an engine, or of a head, as configured, and closes it.

By itself an engine looks for one only beside a TCP listener: clients on its machine need none.  Without a device it
serves over TCP, and says so once in its log, and in `lake status`.

Where several heads serve a machine's clients, each opens the device, and they divide the memory to move bytes through.
The process that starts them uses none; it looks if the one that is named can be used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from engine.fabric.engine_fabric import EngineFabric
from lakefs.config.settings import Config
from lakefs.errors import ConfigError
from lakefs.fabric.devices import OpenFabric

AUTO: Final = "auto"
OFF: Final = "off"
_log: Final = structlog.get_logger(__name__)


@asynccontextmanager
async def rdma_device(config: Config, open_fabric: OpenFabric) -> AsyncIterator[EngineFabric]:
    """Yield the process's RDMA until the block ends.  ConfigError when a device was named and cannot be used."""
    fabric = await trio.to_thread.run_sync(_opened, config, open_fabric)
    try:
        yield fabric
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(fabric.shutdown)


@asynccontextmanager
async def rdma_of_heads(config: Config, open_fabric: OpenFabric) -> AsyncIterator[EngineFabric]:
    """Like `rdma_device`, for the process that starts the heads which use the device."""
    if config.rdma not in (AUTO, OFF):
        async with rdma_device(config, open_fabric):
            pass
    yield EngineFabric(None, "the heads of this machine use it")


def _opened(config: Config, open_fabric: OpenFabric) -> EngineFabric:
    if config.rdma == OFF:
        return EngineFabric(None, "switched off by rdma = off")
    if config.rdma == AUTO and config.native is None:
        return EngineFabric(None, "no listener on TCP: native = off")
    found = open_fabric("" if config.rdma == AUTO else config.rdma)
    if not isinstance(found, str):
        return EngineFabric(found, sharers=config.heads)
    if config.rdma != AUTO:
        raise ConfigError(f"rdma = {config.rdma}: {found}", subject="rdma")
    _log.info("clients on other machines are served over TCP", reason=found)
    return EngineFabric(None, found)
