"""Opens the RDMA device of this machine.  The binding is imported only then: most processes never need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from lakefs.transport.fabric import Fabric

OpenFabric: TypeAlias = Callable[[str], "Fabric | str"]
"""Opens the device of that name, "" for the first one; else returns the reason why there is none.  Blocks."""


def open_device(name: str) -> Fabric | str:
    """Open an RDMA device; see `OpenFabric`."""
    from lakefs.transport.rdma import open_fabric  # noqa: PLC0415

    return open_fabric(name)
