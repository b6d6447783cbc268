"""Requests to the leader of a names shard, from the process that drives gc over the lake (`names_by_requests`).

    JoinGeneration, RefuseEpochs      recorded in the shard's log
    BeginRoots, NextRoots             a walk through its roots, page by page
    NameRoot                          the name of a root's owner, for a message

Rules kept here:
- There is one walk at a time: one that is begun ends the one before, whoever began it.  It is of the connection that
  began it, and ends with it; and of this leader's term, since the service is.
- Pages are asked for by their numbers: an answer that was lost, or is asked for twice, ends the walk.
- A request that fails, or is cancelled, ends the walk: what it has read is not sent again.
- *Done* is answered when nothing is left, as one step of `RootsWalk` has found, and all that is durable.
- Memory: a page of ROOTS_PAGE roots and one step more, and REBOUND_MAX noted ones.
"""

from __future__ import annotations

from typing import Final

from engine.lake_gc.lake_gc_bounds import REBOUND_MAX, ROOTS_PAGE
from engine.lake_gc.names_in_process import NamesInProcess
from engine.lake_gc.root_owners import packed_owner, unpacked_owner
from engine.requests.dispatch import Group
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.upkeep.roots import Root
from lakefs.errors import InvalidArgument, SessionLost
from lakefs.ids import GcGeneration, RingEpoch
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


def names_group(names: NamesInProcess) -> Group:
    """Return the handlers of requests of gc to the names of one shard, for `NamesService`."""
    requests = NamesRequests(names)
    return Group([requests], ends=[requests.disconnected])


class NamesRequests:
    """Handlers of the requests of gc to the names of one shard."""

    def __init__(self, names: NamesInProcess) -> None:
        self._names = names
        self._walk: _ServedWalk | None = None

    @handles(m.JoinGeneration)
    async def join(self, request: m.JoinGeneration) -> Reply:
        return Reply(m.GenerationJoined(await self._names.join(GcGeneration(_number(request.generation)))))

    @handles(m.RefuseEpochs)
    async def refuse(self, request: m.RefuseEpochs) -> Reply:
        await self._names.refuse_below(RingEpoch(_number(request.oldest)))
        return Reply(m.Done())

    @handles(m.BeginRoots)
    async def begin(self, client: Client) -> Reply:
        self._end()
        self._walk = _ServedWalk(client, self._names)
        return Reply(m.Done())

    @handles(m.NextRoots)
    async def next_roots(self, client: Client, request: m.NextRoots) -> Reply:
        walk = self._walk
        if walk is None or walk.client is not client:
            raise SessionLost("this connection has no walk through the names; begin another")
        return Reply(await walk.page(request.page))

    @handles(m.NameRoot)
    async def name(self, request: m.NameRoot) -> Reply:
        return Reply(m.RootNamed(await self._names.name_of(unpacked_owner(request.owner))))

    async def disconnected(self, client: Client) -> None:
        """End the walk of a connection."""
        if self._walk is not None and self._walk.client is client:
            self._end()

    def _end(self) -> None:
        if self._walk is not None:
            self._walk.close()
            self._walk = None


class _ServedWalk:
    """A walk of one connection."""

    def __init__(self, client: Client, names: NamesInProcess) -> None:
        self.client: Final = client
        self._names = names
        self._pacing = names.pacing()
        self._walk = names.begin_walk(self._pacing, REBOUND_MAX)
        self._pages = 0
        self._is_asked = False

    def close(self) -> None:
        self._walk.close()

    async def page(self, number: int) -> m.RootsPage:
        """Return the next page.  SessionLost when there is no going on."""
        if number != self._pages or self._is_asked:
            self.close()
            raise SessionLost(f"page {number} of a walk through the names was asked for, and not page {self._pages}")
        self._is_asked = True
        try:
            page = await self._read()
        except BaseException:
            self.close()
            raise
        self._pages += 1
        self._is_asked = False
        return page

    async def _read(self) -> m.RootsPage:
        roots: list[Root] = []
        is_done = False
        while len(roots) < ROOTS_PAGE:
            found = self._walk.next()
            if found is None:
                is_done = True
                await self._names.sync()
                break
            roots += found
            await self._pacing.rest()
        return m.RootsPage([blob for blob, _ in roots], [packed_owner(owner) for _, owner in roots], is_done)


def _number(value: int) -> int:
    if value < 0:
        raise InvalidArgument(f"{value} is no generation or epoch")
    return value
