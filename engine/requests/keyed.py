"""Requests about keyed blobs.  This engine keeps none: each is refused with UnsupportedVersion."""

from __future__ import annotations

from typing import Final

from engine.requests.handlers import handles
from lakefs.errors import UnsupportedVersion
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

_REFUSAL: Final = "this engine keeps no keyed blobs"


class KeyedRequests:
    """Handlers of the requests about spaces and keys."""

    @handles(m.SpaceOpen)
    async def space_open(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.SpaceList)
    async def space_list(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.SpaceRemove)
    async def space_remove(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.KeyedMatch)
    async def keyed_match(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.KeyedLoad)
    async def keyed_load(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.KeyedPut)
    async def keyed_put(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.KeyedCommit)
    async def keyed_commit(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)

    @handles(m.KeyedRemove)
    async def keyed_remove(self) -> Reply:
        raise UnsupportedVersion(_REFUSAL)
