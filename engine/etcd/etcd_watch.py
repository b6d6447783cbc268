"""A watch of one range at etcd (`engine.coordinator.coordinator.Watch`): a stream, begun again wherever it broke.

    etcd --stream--> thread --one response at a time--> `_take` --queue--> __anext__

Rules kept here:
- The queue holds ETCD_WATCH_QUEUE events.  When it is full the thread waits, then gRPC, then etcd, which holds the
  changes itself, and says when it has compacted the next one: `ReadAnew`.
- The changes of a revision are one event.  Etcd splits a long response only between its events and says so
  (*fragment*), so a revision is whole when the next one begins, or the response is the last fragment.
- A stream asks for the revision before the one that is wanted, too, and leaves it out.  For what was removed at the
  very revision up to which etcd was compacted is not held, though etcd accepts a watch from there.
- A stream that ends is begun again behind the last whole revision, at the next endpoint; so none is missed or repeated.
  It has ETCD_TRY_S to begin.  While it is silent its endpoint is asked for a sign of life (`EtcdLink.keep_heard`).
- While no endpoint answers, the consumer gets EngineUnreachable, once for each time that it asks.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import grpc
import trio

from engine.coordinator.coordinator import Change, Changes, ReadAnew
from engine.etcd import etcd_messages as e
from engine.etcd.etcd_bounds import ETCD_PAUSE_S, ETCD_TRY_S, ETCD_WATCH_QUEUE
from engine.etcd.etcd_link import RANGE, WATCH, Endpoint, EtcdLink
from engine.etcd.etcd_status import Status, error_of
from engine.etcd.etcd_transaction import entry_of
from engine.host.tasks import plain_errors
from lakefs.errors import LakeError
from lakefs.ids import Revision

_SILENT: Final = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "a watch did not begin")


class _Reached(NamedTuple):
    """All changes of the range before this revision were handed over."""

    next_revision: Revision


_Event = Changes | ReadAnew | _Reached | LakeError


@asynccontextmanager
async def open_watch(
    link: EtcdLink, prefix: bytes, begin: bytes, end: bytes, from_revision: Revision
) -> AsyncIterator[EtcdWatch]:
    """Yield a watch of a range below a prefix, which ends with the block."""
    send, receive = trio.open_memory_channel[_Event](ETCD_WATCH_QUEUE)
    watch = EtcdWatch(receive, from_revision)
    follower = _Follower(link, (prefix, begin, end), from_revision, send)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.follow, watch)
            try:
                yield watch
            finally:
                watch.end()
                nursery.cancel_scope.cancel()


class EtcdWatch:
    """The consumer's end.  Made by `open_watch`."""

    def __init__(self, events: trio.MemoryReceiveChannel[_Event], from_revision: Revision) -> None:
        self.wanted: trio.Event = trio.Event()
        """Set while the consumer waits for an event, or has waited since it was replaced."""
        self._events = events
        self._resumes_at = from_revision
        self._ended = False

    @property
    def resumes_at(self) -> Revision:
        """See `Watch`: behind the last event, or further when etcd has said so."""
        return self._resumes_at

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> Changes | ReadAnew:
        """Return the next event; always a checkpoint.  A cancelled call takes none.  EngineUnreachable."""
        while not self._ended:
            self.wanted.set()
            try:
                event = await self._events.receive()
            except trio.EndOfChannel:
                break
            match event:
                case Changes():
                    self._resumes_at = Revision(event.revision + 1)
                    return event
                case ReadAnew():
                    self._ended = True
                    return event
                case _Reached():
                    self._resumes_at = max(self._resumes_at, event.next_revision)
                case _:
                    raise event
        await trio.lowlevel.checkpoint()
        raise StopAsyncIteration

    def end(self) -> None:
        """End the watch with its block."""
        self._ended = True


class _Follower:
    """The task of a watch: reads streams, and puts events into the queue."""

    def __init__(
        self,
        link: EtcdLink,
        place: tuple[bytes, bytes, bytes],
        from_revision: Revision,
        events: trio.MemorySendChannel[_Event],
    ) -> None:
        self._link = link
        self._prefix, self._begin, self._end = place
        self._next = from_revision
        """The first revision that was not put into the queue."""
        self._events = events
        self._is_over = False
        self._begun = trio.CancelScope()
        self._open: list[Any] = []
        """Events of the revision that is not known to be whole."""

    async def follow(self, watch: EtcdWatch) -> None:
        """Read streams until `ReadAnew` was put into the queue, or the watch ends."""
        while not self._is_over:
            try:
                status = await self._stream()
            except LakeError as error:
                watch.wanted = trio.Event()
                await self._events.send(error)
                await watch.wanted.wait()
                await trio.sleep(ETCD_PAUSE_S)
                continue
            if status.is_token_refused:
                self._link.forget_token()
        self._events.close()

    async def _stream(self) -> Status:
        """Read one stream to its end, and return the reason.  Raises when no endpoint answers, or refuses the read."""
        key = self._prefix + self._begin
        answer = await self._link.ask(RANGE, e.RangeRequest(key=key, count_only=True))  # a token, and who answers
        endpoint = self._link.endpoint
        if isinstance(answer, Status):
            raise error_of(answer, endpoint.address)
        self._open = []
        create = e.WatchCreate(
            key=key,
            range_end=self._prefix + self._end,
            start_revision=max(1, self._next - 1),
            progress_notify=True,
            fragment=True,
        )
        stream = self._link.open_stream(endpoint, WATCH, e.WatchRequest(create=create))
        status = _SILENT
        try:
            with trio.move_on_after(ETCD_TRY_S) as self._begun:
                with plain_errors():
                    async with trio.open_nursery() as nursery:
                        sign = e.RangeRequest(key=key, count_only=True, serializable=True)
                        nursery.start_soon(self._link.keep_heard, endpoint, sign)
                        status = await self._link.read_stream(stream, partial(self._heard, endpoint))
                        nursery.cancel_scope.cancel()
        finally:
            self._link.end_stream(endpoint, stream)
        if not self._is_over:
            self._link.check_open()
            self._link.leave(endpoint, status)
            await trio.sleep(ETCD_PAUSE_S)
        return status

    async def _heard(self, endpoint: Endpoint, response: Any) -> bool:
        endpoint.heard_at = trio.current_time()
        return await self._take(response)

    async def _take(self, response: Any) -> bool:
        """Put what a response has into the queue, waiting for room; return True if the stream has ended."""
        self._begun.deadline = math.inf
        if response.compact_revision:
            self._is_over = True
            await self._events.send(ReadAnew())
        if response.canceled:
            return True
        self._open.extend(response.events)
        last = None if not response.fragment else self._open[-1].kv.mod_revision
        whole = [event for event in self._open if event.kv.mod_revision != last]
        self._open = [event for event in self._open if event.kv.mod_revision == last]
        for changes in self._changes(whole):
            await self._events.send(changes)
            self._next = Revision(changes.revision + 1)
        is_progress = not response.events and not response.created
        if is_progress and response.header.revision >= self._next:
            self._next = Revision(response.header.revision + 1)
            await self._events.send(_Reached(self._next))
        return False

    def _changes(self, events: Iterable[Any]) -> Iterator[Changes]:
        """Yield the changes of whole revisions, without those that are not wanted."""
        for revision, group in groupby(events, lambda event: event.kv.mod_revision):
            if revision >= self._next:
                changes = (
                    Change(event.kv.key[len(self._prefix) :], None)
                    if event.type == e.IS_DELETED
                    else Change(event.kv.key[len(self._prefix) :], entry_of(event.kv, self._prefix))
                    for event in group
                )
                yield Changes(Revision(revision), tuple(changes))
