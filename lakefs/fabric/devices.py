"""Opens the RDMA device of this machine.  The binding is imported only then: most processes never need it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias, cast

from lakefs.transport.fabric import Fabric

OpenFabric: TypeAlias = Callable[[str], "Fabric | str"]
"""Opens the device of that name, "" for the first one; else returns the reason why there is none.  Blocks."""


def open_device(name: str) -> Fabric | str:
    """Open an RDMA device; see `OpenFabric`."""
    return cast("Fabric | str", import_module("lakefs.transport.rdma").open_fabric(name))
