"""Requests to the coordinator of a lake, which its processes send to the names; others refuse them.

The names let in only those who hold the lake's token, over TCP, and their own user, over a Unix socket.  So whoever
asks is a process of the lake, and may change each of its keys.

Rules kept here:
- The shape of a request is checked here, its bounds by the coordinator, before anything is done.
- Nothing is kept for a client between two requests; a watch is a row of requests (`CoordinatorWatch`).
- A connection has at most WATCHES_PER_CONNECTION_MAX requests that wait for a change, so that others find room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from engine.coordinator.coordinator import Coordinator, ReadAnew
from engine.coordinator.on_the_wire import (
    received_comparisons,
    received_lease,
    received_operations,
    received_revision,
    sent_changes,
    sent_entry,
    sent_outcome,
    sent_page,
)
from engine.requests.dispatch import Group
from engine.requests.handlers import handles
from engine.sessions.references import Client
from lakefs.errors import EngineBusy, InvalidArgument
from lakefs.limits import COORDINATOR_WATCH_S_MAX, WATCHES_PER_CONNECTION_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


def coordinator_group(coordinator: Coordinator) -> Group:
    """Return the handlers of all requests to a coordinator, for `NamesService`."""
    return Group([CoordinatorRequests(coordinator)])


class CoordinatorRequests:
    """Handlers of the requests to a coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._waiting: dict[Client, int] = {}

    @handles(m.CoordinatorRange)
    async def range(self, request: m.CoordinatorRange) -> Reply:
        if request.end:
            page = await self._coordinator.range(request.begin, request.end, limit=request.limit, after=request.after)
            return Reply(sent_page(page))
        if request.after:
            raise InvalidArgument("a single key is not behind another: leave out `after`, or give `end`")
        found = await self._coordinator.get(request.begin)
        entries = [] if found.entry is None else [sent_entry(found.entry)]
        return Reply(m.CoordinatorPage(entries, found.revision))

    @handles(m.CoordinatorTransact)
    async def transact(self, request: m.CoordinatorTransact) -> Reply:
        done = await self._coordinator.transact(
            received_comparisons(request.comparisons),
            received_operations(request.then_changes),
            received_operations(request.else_changes),
        )
        return Reply(sent_outcome(done))

    @handles(m.CoordinatorWatch)
    async def watch(self, client: Client, request: m.CoordinatorWatch) -> Reply:
        if not 0 <= request.wait_s <= COORDINATOR_WATCH_S_MAX:
            raise InvalidArgument(f"a request of a watch waits up to {COORDINATOR_WATCH_S_MAX:g} s")
        begins_at = received_revision(request.from_revision)
        with self._place(client):
            async with self._coordinator.watch(request.begin, request.end, begins_at) as watch:
                with trio.move_on_after(request.wait_s):
                    event = await anext(watch)
                    if isinstance(event, ReadAnew):
                        return Reply(m.CoordinatorChanges(begins_at, read_anew=True))
                    return Reply(sent_changes(event, watch.resumes_at))
                return Reply(m.CoordinatorChanges(watch.resumes_at))

    @handles(m.CoordinatorLease)
    async def lease(self, request: m.CoordinatorLease) -> Reply:
        return Reply(m.CoordinatorLeased(await self._coordinator.lease(request.ttl_s)))

    @handles(m.CoordinatorKeepAlive)
    async def keep_alive(self, request: m.CoordinatorKeepAlive) -> Reply:
        return Reply(m.CoordinatorKept(await self._coordinator.keep_alive(received_lease(request.lease))))

    @handles(m.CoordinatorRevoke)
    async def revoke(self, request: m.CoordinatorRevoke) -> Reply:
        await self._coordinator.revoke(received_lease(request.lease))
        return Reply(m.Done())

    @contextmanager
    def _place(self, client: Client) -> Iterator[None]:
        """Count a request that waits.  EngineBusy when too many of the connection do."""
        waiting = self._waiting.get(client, 0)
        if waiting >= WATCHES_PER_CONNECTION_MAX:
            raise EngineBusy(f"{waiting} requests of this connection wait for changes, the most that may")
        self._waiting[client] = waiting + 1
        try:
            yield
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
