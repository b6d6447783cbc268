"""`lakefs.connect()`: a blocking lake at an address, or at the one that `lakefs.client.address` finds.

A lake can be pickled, for example for spawned workers of a data loader.  Unpickling connects to the same address, with
the token of that process's environment; the pickle has no secret.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import partial

from lakefs.client.address import resolve
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check


def connect(
    address: str | None = None, *, token: str | None = None, check: Check = Check.BLAKE3, repeats: bool = True
) -> Lake:
    """Connect to an engine.  Close the lake, or use it as a context manager.

    `address`: `unix:PATH` or `tcp://HOST:PORT`; default LAKE_SERVER, else the configured `socket`, else this user's
    own socket if something listens there, else the system's.
    `token`: for TCP; default LAKE_TOKEN.  `check`: the check of whole chunks that are read.  `repeats`: names that
    were read before are answered without a request while nothing has changed (on the engine's machine).
    EngineUnreachable, PermissionDenied, UnsupportedVersion, ConfigError.
    """
    where, secret = resolve(address, token)
    return Lake(connect_blocking(where, token=secret), check=check, repeats=repeats)


def _reduced(lake: Lake) -> tuple[Callable[[str], Lake], tuple[str]]:
    driver = driver_of(lake)
    return partial(connect, check=driver.steps.check, repeats=driver.repeats), (lake.address,)


copyreg.pickle(Lake, _reduced)
