"""`RemoteCoordinator`: the coordinator of a lake, asked by a process elsewhere over the native protocol.

    async with open_remote_coordinator("tcp://HOST:PORT", token=token, lake=lake_id) as coordinator:
        await coordinator.connect()         at a start: wrong token, no names, another lake's
        LakeState(coordinator), open_lake_view(coordinator), hold_lease(coordinator, ...)

It implements the port `Coordinator` (`engine.coordinator.coordinator`); the names serve it
(`engine.coordinator.coordinator_requests`).

Rules kept here:
- Bounds of arguments are checked before anything is sent; the names check them again.
- Whatever keeps this process from the coordinator is EngineUnreachable: names that are away or silent, a token that is
  not accepted any more, another lake's names at the address.  Only `connect` says which.
- A read, a request of a watch, `keep_alive` and `revoke` are sent once more on the next connection when theirs was cut.
  A transaction and a new lease are not: they may have been done; unless the caller says `is_repeatable`.  What the
  names refused because they shut down was not done, and is sent again.
- Names that are silent are given up within NAMES_SILENCE_S, and nothing is sent again then: no call waits longer than
  for that and two connects.
- A watch goes on over a new connection, from behind the last event that was returned; so none is missed or repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Final, Protocol, TypeVar

import trio

from engine.coordinator.coordinator import Changes, Compare, Found, Operation, Page, ReadAnew, Transacted
from engine.coordinator.coordinator_bounds import check_key, check_page, check_range, check_transaction, check_ttl
from engine.coordinator.on_the_wire import received_changes, received_outcome, received_page, sent_transaction
from engine.coordinator.records import LAKE_KEY, LakeRecord, decode
from engine.coordinator.remote_link import NamesClient, RemoteLink
from engine.host.tasks import plain_errors
from lakefs.client.trio.engine import connect_engine
from lakefs.errors import (
    EngineBusy,
    EngineUnreachable,
    InvalidArgument,
    LakeError,
    OperationalError,
    PreconditionFailed,
    RequestTooLarge,
    StoreFull,
    UserError,
)
from lakefs.ids import LeaseId, Revision
from lakefs.limits import COORDINATOR_WATCH_S_MAX, NAMES_SILENCE_S, WATCHES_PER_CONNECTION_MAX
from lakefs.ports import Network
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.repeat import REPEATABLE, loss_error

M = TypeVar("M", bound=m.Message)
_WATCH_S: Final = COORDINATOR_WATCH_S_MAX / 2
_OF_THE_PORT: Final = EngineUnreachable, EngineBusy, StoreFull, InvalidArgument, RequestTooLarge


class Ask(Protocol):
    """Asks the names, as `RemoteCoordinator.ask`."""

    async def __call__(self, request: m.Request, answer: type[M]) -> M: ...


@asynccontextmanager
async def open_remote_coordinator(
    address: str,
    *,
    token: str = "",
    lake: bytes | None = None,
    network: Network | None = None,
    silence_s: float = NAMES_SILENCE_S,
) -> AsyncIterator[RemoteCoordinator]:
    """Yield the coordinator that the names at an address serve; it connects when it is first used.

    `lake` is the lake's id: another lake's names are refused; None: it is not compared.  `silence_s`: the names are
    lost when they leave a request, and a Ping, unanswered for so long.
    Calls and watches that outlive the block end with EngineUnreachable.
    """
    connect = partial(_connected, address, token, lake, network, silence_s)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            link = RemoteLink(address, connect, nursery)
            try:
                yield RemoteCoordinator(link)
            finally:
                link.close()
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def _connected(
    address: str, token: str, lake: bytes | None, network: Network | None, silence_s: float
) -> AsyncIterator[NamesClient]:
    """Connect, and make sure that names of that lake answer."""
    async with connect_engine(address, token=token, network=network) as engine:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.end_when_silent, silence_s)
                await _check_lake(engine, address, lake)
                yield engine
                nursery.cancel_scope.cancel()


async def _check_lake(engine: NamesClient, address: str, lake: bytes | None) -> None:
    """Raise PreconditionFailed for the names of another lake, UnsupportedVersion where there are no names."""
    request = m.CoordinatorRange(LAKE_KEY)
    page = answer_of(request, await engine.call(request), m.CoordinatorPage)
    if lake is None:
        return
    if not page.entries:
        raise EngineUnreachable(f"the names at {address} have no lake yet", subject=address)
    found = decode(LakeRecord, page.entries[0].value).lake
    if found != lake:
        raise PreconditionFailed(
            f"the names at {address} are those of lake {found.hex()}, not of {lake.hex()}", subject=address
        )


def answer_of(request: m.Request, reply: Reply, answer: type[M]) -> M:
    """Return the message of a reply, which has no body."""
    reply.body.release()
    assert isinstance(reply.message, answer), f"{type(request).__name__} is answered by {answer.__name__}"
    return reply.message


class RemoteCoordinator:
    """`Coordinator` over one connection.  Made by `open_remote_coordinator`; used on the loop."""

    def __init__(self, link: RemoteLink) -> None:
        self._link = link
        self._watches = 0

    async def connect(self) -> None:
        """Connect, unless connected: for a start, which shall say why it cannot.

        EngineUnreachable while nothing answers: try again.  PermissionDenied for a token that is not the lake's,
        UnsupportedVersion where something else than names answers, PreconditionFailed for the names of another lake;
        EngineBusy.
        """
        await trio.lowlevel.checkpoint()
        await self._link.usable()

    # --- keys --------------------------------------------------------------------------------------------

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        check_key(key)
        page = received_page(await self.ask(m.CoordinatorRange(key), m.CoordinatorPage))
        return Found(page.entries[0] if page.entries else None, page.revision)

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port."""
        check_page(begin, end, limit, after)
        return received_page(await self.ask(m.CoordinatorRange(begin, end, limit, after), m.CoordinatorPage))

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Compare and change keys at one revision; see the port."""
        check_transaction(compares, then_ops, else_ops)
        request = sent_transaction(compares, then_ops, else_ops)
        return received_outcome(await self.ask(request, m.CoordinatorTransacted, is_repeatable=is_repeatable))

    async def compact(self, revision: Revision) -> None:
        """Do nothing, as the names do; see the port."""
        await trio.lowlevel.checkpoint()
        await self._usable()

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AbstractAsyncContextManager[RemoteWatch]:
        """Watch a range; see the port.  EngineBusy: this process has too many.  Nothing is asked at its beginning."""
        check_range(begin, end)
        return self._watch(begin, end, from_revision)

    @asynccontextmanager
    async def _watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AsyncIterator[RemoteWatch]:
        await trio.lowlevel.checkpoint()
        if self._watches >= WATCHES_PER_CONNECTION_MAX:
            raise EngineBusy(f"this process has {self._watches} watches of the coordinator, the most that it may have")
        watch = RemoteWatch(self.ask, begin, end, from_revision)
        self._watches += 1
        try:
            yield watch
        finally:
            self._watches -= 1
            watch.end()

    # --- leases ------------------------------------------------------------------------------------------

    async def lease(self, ttl_s: int) -> LeaseId:
        """Grant a lease; see the port."""
        check_ttl(ttl_s)
        return LeaseId((await self.ask(m.CoordinatorLease(ttl_s), m.CoordinatorLeased)).lease)

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Let a lease run for its whole time again; see the port."""
        return (await self.ask(m.CoordinatorKeepAlive(lease), m.CoordinatorKept)).lasts

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see the port."""
        await self.ask(m.CoordinatorRevoke(lease), m.Done)

    # --- asking the names --------------------------------------------------------------------------------

    async def ask(self, request: m.Request, answer: type[M], *, is_repeatable: bool = False) -> M:
        """Return the names' answer; always a checkpoint before that.  See the head of the module for errors."""
        await trio.lowlevel.checkpoint()
        is_repeatable = is_repeatable or type(request) in REPEATABLE
        for is_last in (False, True):
            client = await self._usable()
            try:
                with self._as_the_port_says():
                    reply = await self._link.send(client, request)
            except EngineBusy:
                if not client.draining:
                    raise
                continue  # it was not done
            except EngineUnreachable as error:
                if client.lost is None:
                    raise
                if is_last or error.goes_on or not is_repeatable:
                    raise loss_error(request, error) from error
                continue
            if reply is not None:
                return answer_of(request, reply, answer)
        raise EngineUnreachable(f"the names at {self._link.address} shut down", subject=self._link.address)

    async def _usable(self) -> NamesClient:
        try:
            return await self._link.usable()
        except LakeError as error:
            raise self._unreachable(error) from error

    @contextmanager
    def _as_the_port_says(self) -> Iterator[None]:
        """Turn the errors of names that refuse this process into EngineUnreachable."""
        try:
            yield
        except _OF_THE_PORT:
            raise
        except (OperationalError, UserError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: LakeError) -> EngineUnreachable:
        return EngineUnreachable(f"the lake's coordinator cannot be reached: {error.message}", subject=error.subject)


class RemoteWatch:
    """A watch of one range (`engine.coordinator.coordinator.Watch`): its place, and a row of requests."""

    def __init__(self, ask: Ask, begin: bytes, end: bytes, from_revision: Revision) -> None:
        self._ask = ask
        self._range = begin, end
        self._ended = False
        self._resumes_at = from_revision

    @property
    def resumes_at(self) -> Revision:
        """See `Watch`."""
        return self._resumes_at

    def __aiter__(self) -> RemoteWatch:
        return self

    async def __anext__(self) -> Changes | ReadAnew:
        """Return the next event; always a checkpoint.  A cancelled call takes none.  EngineUnreachable, EngineBusy."""
        while not self._ended:
            answer = await self._ask(m.CoordinatorWatch(*self._range, self._resumes_at, _WATCH_S), m.CoordinatorChanges)
            self._resumes_at = Revision(answer.next_revision)
            if answer.read_anew:
                self._ended = True
                return ReadAnew()
            if answer.changes:
                return received_changes(answer)
        await trio.lowlevel.checkpoint()
        raise StopAsyncIteration

    def end(self) -> None:
        """End the watch with its block."""
        self._ended = True
