"""`lakefs.connect()`: a blocking lake at an address, or at the one that `lakefs.client.address` finds.

A lake can be pickled, for example for spawned workers of a data loader.  Unpickling connects to the same address, with
the token of that process's environment; the pickle has no secret.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

from lakefs.client.address import resolve, silence_limit
from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    check: Check = Check.BLAKE3,
    repeats: bool = True,
    rdma: bool = True,
    timeout: float | None = None,
) -> Lake:
    """Connect to an engine.  Close the lake, or use it as a context manager.

    `address`: `unix:PATH` or `tcp://HOST:PORT`; default LAKE_SERVER, else the configured `socket`, else this user's
    own socket if something listens there, else the system's.
    `token`: for TCP; default LAKE_TOKEN.  `check`: the check of whole chunks that are read.  `repeats`: names that
    were read before are answered without a request while nothing has changed (on the engine's machine).
    `rdma`: over TCP, bytes are moved by RDMA where both machines have a device; else they are streamed.
    `timeout`: seconds that the engine may be silent while a request waits; default LAKE_TIMEOUT, else the configured
    `timeout`, 30.  Then the call raises EngineUnreachable, and its change may have happened all the same; a later call
    connects anew.  An engine at work is not silent, however long a request takes.
    EngineUnreachable, PermissionDenied, UnsupportedVersion, ConfigError, InvalidArgument.
    """
    where, secret = resolve(address, token)
    engine = connect_blocking(where, token=secret, timeout_s=silence_limit(timeout))
    fabric = _fabric(engine) if rdma and where.startswith("tcp") else None
    return Lake(engine, check=check, repeats=repeats, fabric=fabric)


def _fabric(engine: BlockingEngine) -> ClientFabric:
    # Imported only here: a client on the engine's machine starts sooner without it.
    module = import_module("lakefs.fabric.client_fabric")
    return cast("ClientFabric", module.ClientFabric(engine))


def _reduced(lake: Lake) -> tuple[Callable[[str], Lake], tuple[str]]:
    driver = driver_of(lake)
    steps = driver.steps
    rdma = steps.fabric is not None
    timeout = driver.timeout_s
    return partial(connect, check=steps.check, repeats=driver.repeats, rdma=rdma, timeout=timeout), (lake.address,)


copyreg.pickle(Lake, _reduced)
