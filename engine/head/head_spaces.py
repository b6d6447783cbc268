"""Requests about spaces at a head: names decide, and the homes of keys are given what they decided before the answer.

Rules kept here:
- SpaceRemove is answered when each home that is up has removed the space.  One that is away removes it before it is
  asked for a key again (`engine.head.key_homes`).
- Usage is the sum of what homes that are up have.
"""

from __future__ import annotations

from msgspec.structs import replace

from engine.head.head_clients import HeadClient
from engine.head.key_homes import KeyHomes
from engine.requests.handlers import handles
from lakefs.errors import SpaceNotFound
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class HeadSpaces:
    """Handlers of the requests about spaces."""

    def __init__(self, homes: KeyHomes) -> None:
        self._homes = homes

    @handles(m.SpaceOpen)
    async def space_open(self, client: HeadClient, request: m.SpaceOpen) -> Reply:
        opened = await client.names.ask(request, m.SpaceStat)
        spaces = await self._homes.give_all(client)
        found = next((space for space in spaces if space.number == opened.number), None)
        if found is None:
            raise SpaceNotFound(f"space {request.name!r} was removed while it was opened", subject=request.name)
        return Reply(replace(found, is_first=opened.is_first))

    @handles(m.SpaceList)
    async def space_list(self, client: HeadClient) -> Reply:
        return Reply(m.Spaces(await self._homes.give_all(client)))

    @handles(m.SpaceRemove)
    async def space_remove(self, client: HeadClient, request: m.SpaceRemove) -> Reply:
        try:
            await client.names.ask(request, m.Done)
        except SpaceNotFound:  # removed before; but not every home may have been given that
            await self._homes.give_all(client, to_each=True)
            raise
        await self._homes.give_all(client, to_each=True)
        return Reply(m.Done())
