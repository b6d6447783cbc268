"""The lake appliance's library: vocabulary, wire protocol, and clients.

    import lakefs
    with lakefs.connect() as lake:
        lake.put("models/x", data)

`import lakefs` is cheap: it loads a client when its name is first used, and trio only for `connect_trio`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.client.connect import connect
    from lakefs.client.connect_trio import connect_trio
    from lakefs.client.trio.lake import TrioLake
    from lakefs.content.verify import Check
    from lakefs.errors import LakeError
    from lakefs.put.shared_memory import SharedMemory, Slot

__all__ = ["Check", "Lake", "LakeError", "SharedMemory", "Slot", "TrioLake", "connect", "connect_trio"]

_PLACES = {
    "Check": "lakefs.content.verify",
    "Lake": "lakefs.client.blocking.lake",
    "LakeError": "lakefs.errors",
    "SharedMemory": "lakefs.put.shared_memory",
    "Slot": "lakefs.put.shared_memory",
    "TrioLake": "lakefs.client.trio.lake",
    "connect": "lakefs.client.connect",
    "connect_trio": "lakefs.client.connect_trio",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'lakefs' has no attribute {name!r}")
    return getattr(import_module(place), name)
