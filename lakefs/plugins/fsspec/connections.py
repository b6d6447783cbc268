"""Connections of this process's file systems: a few for each address, shared and connected anew when needed.

fsspec makes one file system for each thread that asks for one, and keeps it for ever.  A connection for each would run
into the engine's limits, so file systems share `CONNECTIONS_PER_ADDRESS` of them.  A connection runs one operation at
a time; others wait for it.

No lock is used: a fork would leave one held in the child.  Lakes follow forks by themselves.
"""

from __future__ import annotations

import atexit
from itertools import count
from typing import Final, NamedTuple

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check

CONNECTIONS_PER_ADDRESS: Final = 4
"""File systems of so many threads work side by side; each connection costs the client at most 32 MiB (known names)."""


class Connection(NamedTuple):
    """The key of a shared connection: the address of the engine, how it is used, and a number."""

    address: str
    check: Check
    timeout: float | None
    number: int


_lakes: Final[dict[Connection, Lake]] = {}
_numbers: Final = count()


def next_connection(address: str, check: Check, timeout: float | None) -> Connection:
    """Return the key of the connection that a new file system is to use."""
    return Connection(address, check, timeout, next(_numbers) % CONNECTIONS_PER_ADDRESS)


def lake_of(connection: Connection, token: str | None) -> Lake:
    """Return the connected lake; connect if that was not done yet.  EngineUnreachable, PermissionDenied."""
    lake = _lakes.get(connection)
    if lake is not None:
        return lake
    made = connect(connection.address, token=token, check=connection.check, timeout=connection.timeout)
    lake = _lakes.setdefault(connection, made)
    if lake is not made:  # another thread was faster
        made.close()
    return lake


def disconnect() -> None:
    """Close all connections of this process; file systems connect anew at their next use, open files are lost."""
    while _lakes:
        _, lake = _lakes.popitem()
        if driver_of(lake).is_own:
            lake.close()


atexit.register(disconnect)
