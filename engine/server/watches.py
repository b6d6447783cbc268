"""The watches of one connection: each a task that sends events until it is cancelled or the iterator ends.

Rules kept here:
- A watch begins before its reply is sent, and its stream gets a final frame, whatever ends it.
- If the client does not read, its watches wait with their next event; the service drops events that pile up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol, runtime_checkable

import trio

from lakefs.errors import EngineBusy, LakeError
from lakefs.limits import WATCHES_PER_CONNECTION_MAX
from lakefs.transport.framing import FrameSender
from lakefs.wire.connection import ServerConnection
from lakefs.wire.engine_port import BeginsLater, EngineService, ServedClient
from lakefs.wire.messages import Done, Request, Watch, WatchEvent

_DONE: Final = Done()
_UNSENT_MAX: Final = WATCHES_PER_CONNECTION_MAX
"""Most unsent frames before watches wait too."""


@runtime_checkable
class _AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


class ServedWatches:
    """The watches of one connection.  `notice` is called when one ends; `bug` returns the error sent for a bug."""

    def __init__(
        self,
        service: EngineService,
        wire: ServerConnection,
        sender: FrameSender,
        *,
        notice: Callable[[], None],
        bug: Callable[[Request, Exception], LakeError],
    ) -> None:
        self._service = service
        self._wire = wire
        self._sender = sender
        self._notice = notice
        self._bug = bug
        self._scopes: dict[int, trio.CancelScope] = {}

    @property
    def count(self) -> int:
        """Number of watches that have not ended."""
        return len(self._scopes)

    def start(self, nursery: trio.Nursery, client: ServedClient, stream_id: int, request: Watch) -> None:
        """Begin a watch and reply.  Raises LakeError of the service; EngineBusy when too many run."""
        if len(self._scopes) >= WATCHES_PER_CONNECTION_MAX:
            raise EngineBusy(f"a connection may have {WATCHES_PER_CONNECTION_MAX} watches; cancel one first")
        events = self._service.watch(client, request)
        self._scopes[stream_id] = trio.CancelScope()
        if not isinstance(events, BeginsLater):
            self._sender.cork(self._wire.reply(stream_id, _DONE, final=False))
        nursery.start_soon(self._watch, stream_id, request, events)

    def cancel(self, stream_id: int) -> None:
        """End a watch, if that stream is one."""
        scope = self._scopes.get(stream_id)
        if scope is not None:
            scope.cancel()

    def end_all(self) -> None:
        """End every watch."""
        for scope in self._scopes.values():
            scope.cancel()

    async def _watch(self, stream_id: int, request: Watch, events: AsyncIterator[WatchEvent]) -> None:
        try:
            with self._scopes[stream_id]:
                if isinstance(events, BeginsLater):
                    await events.begin()
                    self._sender.send(self._wire.reply(stream_id, _DONE, final=False))
                async for event in events:
                    self._sender.send(self._wire.event(stream_id, event))
                    while self._sender.queued >= _UNSENT_MAX:
                        await self._sender.wait_room()
            last = self._wire.end(stream_id)
        except LakeError as error:
            last = self._wire.failure(stream_id, error)
        except Exception as error:  # noqa: BLE001 - a bug of the service ends this watch only
            last = self._wire.failure(stream_id, self._bug(request, error))
        finally:
            del self._scopes[stream_id]
            await close_events(events)
        self._sender.send(last)
        self._notice()


async def close_events(events: AsyncIterator[WatchEvent]) -> None:
    """Close an iterator, whether its close is synchronous or not."""
    if isinstance(events, _AsyncClosable):
        with trio.CancelScope(shield=True):
            await events.aclose()
    elif isinstance(events, _Closable):
        events.close()
