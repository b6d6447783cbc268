"""A head's connection to the names of its lake, for one of its clients.

Names keep leases, watches and limits by connection, so each client of a head has a connection of its own: what they
keep ends when the client leaves.  When the connection is lost, as when names restart, the client's connection is ended
too: the client then does what it does when an engine restarts.

Rules kept here:
- A connection is made when it is first needed, and once: a client has one state at the names, or none.  One that could
  not be made may be tried again.
- No client waits for names that are silent or away longer than NAMES_CONNECT_S and NAMES_SILENCE_S.
- A request that was under way when the connection was lost is not answered over a socket: its client repeats what may
  be repeated, and reports others as in doubt.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final, NamedTuple, TypeVar

import trio

from engine.format.group_parts import FIRST_SHARD
from engine.host.tasks import cancel_after, plain_errors
from lakefs.client.trio.engine import connect_engine
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import NamesShard
from lakefs.limits import NAMES_CONNECT_S, NAMES_SILENCE_S
from lakefs.ports import Network
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient

M = TypeVar("M", bound=m.Message)
_FAREWELL_S: Final = 1.0
"""Longest time for which leases are ended whose client has gone."""


class NamesConnection(NamedTuple):
    """A connection to names: its client, their answer to Hello, and what returns when the connection is lost."""

    client: EngineClient
    hello: m.HelloReply
    wait_ended: Callable[[], Awaitable[None]]


ConnectNames = Callable[[], AbstractAsyncContextManager[NamesConnection]]
"""Connects to names; the connection ends with the block.  EngineUnreachable, PermissionDenied, EngineBusy."""


def names_at(
    address: str, *, token: str = "", network: Network | None = None, silence_s: float = NAMES_SILENCE_S
) -> ConnectNames:
    """Return what connects to the names that listen at an address.

    A connect takes at most NAMES_CONNECT_S.  Names that leave a request, and a Ping, unanswered for `silence_s` are
    lost, as when their machine died; a connection without requests is ended by TCP's keep-alive then.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesConnection]:
        with trio.CancelScope(deadline=trio.current_time() + NAMES_CONNECT_S) as connecting, plain_errors():
            async with connect_engine(address, token=token, network=network) as engine, trio.open_nursery() as nursery:
                connecting.deadline = math.inf
                nursery.start_soon(engine.end_when_silent, silence_s)
                yield NamesConnection(engine, engine.hello, engine.wait_ended)
                nursery.cancel_scope.cancel()
        if connecting.cancelled_caught:
            raise EngineUnreachable(f"nothing answers at {address}", subject=address)

    return connect


class NamesLink:
    """One client's connection to the names."""

    def __init__(
        self,
        nursery: trio.Nursery,
        connect: ConnectNames,
        lost: Callable[[], None],
        shard: NamesShard = FIRST_SHARD,
        *,
        tries_again: bool = False,
    ) -> None:
        """`nursery` has the task that holds the connection.  `lost` is called once it is lost.

        `shard`: the names shard to which `connect` connects.  `tries_again`: a connection that could not be made is
        tried again when it is next needed: the client goes on with other shards.
        """
        self.shard: Final = shard
        self._nursery = nursery
        self._connect = connect
        self._lost = lost
        self._tries_again = tries_again
        self._connection: NamesConnection | None = None
        self._failure: LakeError | None = None
        """The reason why there is no connection, and none is made."""
        self._settled: trio.Event | None = None
        """Set when the connection was made, or failed to be made; None before it is first needed."""
        self.joined_turns = b""
        """The turns whose stamps its answers have (`engine.head.head_stamps`)."""
        self.learn: Callable[[m.Message], m.Message] = _as_it_is
        """Called with each answer, once turns are joined; returns the answer for the client."""
        self._leaving = trio.Event()
        self._ended = trio.Event()

    @property
    def has_begun(self) -> bool:
        """True if there is a connection, or was one: names may keep something for the client."""
        return self._connection is not None

    async def connection(self) -> NamesConnection:
        """Return the connection, made if there is none yet.  EngineUnreachable, also after it was lost."""
        if self._failure is not None and self._connection is None and self._tries_again:
            self._failure, self._settled, self._ended = None, None, trio.Event()
        while self._connection is None:
            if self._settled is None:
                self._settled = trio.Event()
                self._nursery.start_soon(self._hold)
            await self._settled.wait()
            if self._failure is not None:
                break
        if self._failure is not None:
            raise _unreachable(self._failure)
        assert self._connection is not None, "it was made, or has failed"
        return self._connection

    async def call(self, request: m.Request) -> m.Message:
        """Ask the names; return their answer's message.  Errors are those of the request, and EngineUnreachable."""
        connection = await self.connection()
        try:
            reply = await connection.client.call(request)
        except EngineUnreachable as error:
            self._lose(error)
            await trio.lowlevel.checkpoint()  # a connection that has just been ended gets no answer
            raise _unreachable(error) from error
        reply.body.release()
        return self.learn(reply.message) if self.joined_turns else reply.message

    async def ask(self, request: m.Request, answer: type[M]) -> M:
        """Like `call`, for an answer of that type."""
        message = await self.call(request)
        assert isinstance(message, answer), f"{type(request).__name__} is answered by {answer.__name__}"
        return message

    async def aclose(self) -> None:
        """End the connection, and what names keep for it.  Returns when that is done."""
        self._leaving.set()
        if self._settled is not None:
            await self._ended.wait()

    async def _hold(self) -> None:
        """Make the connection and hold it until the client leaves, or it is lost."""
        assert self._settled is not None, "somebody waits for it"
        try:
            async with self._connect() as connection, trio.open_nursery() as nursery:
                self._connection = connection
                self._settled.set()
                nursery.start_soon(cancel_after, connection.wait_ended, nursery.cancel_scope)
                await self._leaving.wait()
                nursery.cancel_scope.cancel()
            self._lose(EngineUnreachable("the connection has ended"))
        except LakeError as error:
            self._lose(error)
        finally:
            self._ended.set()
            self._settled.set()

    def _lose(self, error: LakeError) -> None:
        """Note that there is no connection, and end the client's if one is lost and the client has not left."""
        if self._failure is None:
            self._failure = error
            if self._connection is not None and not self._leaving.is_set():
                self._lost()


async def end_leases(call: Callable[[m.Request], Awaitable[m.Message]], leases: Iterable[int]) -> None:
    """End leases that a client never receives; also when its request is cancelled, for a moment."""
    with trio.CancelScope(shield=True), trio.move_on_after(_FAREWELL_S), suppress(LakeError):
        await call(m.CloseLeases(sorted(leases)))  # else they end with the connection


def _as_it_is(message: m.Message) -> m.Message:
    return message


def _unreachable(error: LakeError) -> EngineUnreachable:
    return EngineUnreachable(f"the names of this lake cannot be reached: {error.message}", subject=error.subject)
