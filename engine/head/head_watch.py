"""Watches of a head's clients: of one names shard, or of all that a watch has to do with, put together.

    one shard      the names' own watch
    all buckets    that of each shard, also of those that are added later
    one bucket     that of the shard which has it, and of any other in which it is made anew

Rules kept here:
- A watch begins in all shards that it has to do with, or not at all.  A shard that joins it later brings a `resync`:
  what was changed there before is not known.
- Events of one bucket are in the order of its shard.  A shard's watch waits until its event was taken.
- A watch ends when that of any shard ends, or its connection is lost, which ends the client's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

import trio

from engine.head.client_names import ClientNames
from engine.head.names_link import NamesLink
from engine.host.tasks import plain_errors
from lakefs.errors import LakeError
from lakefs.ids import NamesShard
from lakefs.limits import AWAY_PAUSE_S_MIN, NAMES_PAUSE_S_MAX
from lakefs.wire import messages as m

_Events = AsyncIterator[m.WatchEvent]


class HeadWatch:
    """A watch of names for a client of a head (`lakefs.wire.engine_port.BeginsLater`)."""

    def __init__(self, names: NamesLink, request: m.Watch) -> None:
        self._names = names
        self._request = request
        self._stack = AsyncExitStack()
        self._events: _Events | None = None

    async def begin(self) -> None:
        """Begin the watch at the names.  BucketNotFound, EngineBusy, EngineUnreachable."""
        self._events = await _begin(self._names, self._request, self._stack)

    def __aiter__(self) -> HeadWatch:
        return self

    async def __anext__(self) -> m.WatchEvent:
        """Return the next event."""
        assert self._events is not None, "the watch has begun"
        return await anext(self._events)

    async def aclose(self) -> None:
        """End the watch."""
        await self._stack.aclose()


class ShardsWatch:
    """The same over several shards."""

    def __init__(self, names: ClientNames, request: m.Watch, nursery: trio.Nursery) -> None:
        """`nursery` has the tasks that wait for the shards' events."""
        self._names = names
        self._request = request
        self._nursery = nursery
        self._watched: set[NamesShard] = set()
        self._send, self._receive = trio.open_memory_channel[m.WatchEvent | LakeError | None](0)
        self._scope = trio.CancelScope()
        self._ended: trio.Event | None = None
        """Set once no task is left; None before the beginning."""

    async def begin(self) -> None:
        """Begin the watch in each shard that it has to do with.  BucketNotFound, EngineBusy, EngineUnreachable."""
        self._ended = trio.Event()
        with plain_errors():
            await self._nursery.start(self._run)

    def __aiter__(self) -> ShardsWatch:
        return self

    async def __anext__(self) -> m.WatchEvent:
        """Return the next event of any shard."""
        event = await self._receive.receive()
        if isinstance(event, LakeError):
            raise event
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """End the watch; returns when all of its tasks have ended."""
        self._scope.cancel()
        if self._ended is not None:
            await self._ended.wait()

    # --- tasks -------------------------------------------------------------------------------------

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        assert self._ended is not None, "it begins"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._begin_first(nursery)
                    task_status.started()
                    await self._join_later(nursery)
        finally:
            self._ended.set()

    async def _begin_first(self, nursery: trio.Nursery) -> None:
        bucket = self._request.bucket
        if bucket:
            place = await self._names.place(bucket)
            await self._names.ask_where(bucket, place, lambda link: self._watch(nursery, link))
            return
        for shard in sorted(self._wanted()):
            await self._watch(nursery, self._names.link(shard))

    async def _join_later(self, nursery: trio.Nursery) -> None:
        """Watch shards that the watch has to do with later."""
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            missing = sorted(self._wanted() - self._watched)
            if not missing:
                await self._names.shards.wait_changed()
                continue
            try:
                await self._watch(nursery, self._names.link(missing[0]), joins=True)
                pause_s = AWAY_PAUSE_S_MIN
            except LakeError:  # nothing leads it now, or it is about to make the bucket
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, NAMES_PAUSE_S_MAX)

    def _wanted(self) -> set[NamesShard]:
        """Return the shards that the watch has to do with, as far as they are known."""
        shards, bucket = self._names.shards, self._request.bucket
        if not bucket:
            return set(map(NamesShard, range(shards.count)))
        shard = shards.known(bucket)
        return set() if shard is None else {shard}

    async def _watch(self, nursery: trio.Nursery, link: NamesLink, *, joins: bool = False) -> None:
        """Begin the watch of one shard."""
        with plain_errors():
            await nursery.start(partial(self._follow, link, joins=joins))
        self._watched.add(link.shard)

    async def _follow(self, link: NamesLink, *, joins: bool, task_status: trio.TaskStatus[None]) -> None:
        async with AsyncExitStack() as stack:
            events = await _begin(link, self._request, stack)
            task_status.started()
            try:
                if joins:
                    await self._send.send(m.WatchEvent("resync", 0, self._request.bucket))
                async for event in events:
                    await self._send.send(event)
                await self._send.send(None)
            except LakeError as error:
                await self._send.send(error)


async def _begin(names: NamesLink, request: m.Watch, stack: AsyncExitStack) -> _Events:
    """Return the events of a watch that has begun, and ends with the stack."""
    connection = await names.connection()
    watch = connection.client.watch(request.bucket, others_only=request.others_only)
    return await stack.enter_async_context(watch)
