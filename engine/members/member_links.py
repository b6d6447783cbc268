"""`MemberLinks`: the port `Members` over connections that are made when they are used.

Rules kept here:
- A request about shards that is not answered within MEMBER_ANSWER_S is given up, and its member is away.  Longer ones
  (a sweep of gc) are given up only when the member is silent, which the connection finds out (`connect_member`).
- When a member is lost, or the names that lead on its machine, the others there are asked for a sign of life: so a put
  that meets a machine that is cut off does not wait for the silence of one after the other.
- A member whose lease was not renewed answers stores with CoordinatorLost: it is not away, and is read on.
- When a member answers StaleEpoch, it is asked for its table, and that is taken over before the error is raised: the
  coordinator is not asked, unless the member has started again and was not given the table since.
- At most MEMBER_LINKS_MAX connections are open, and some more for a moment: the one that was unused for longest goes.
- Errors name the member.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_view import LakeView, open_lake_view
from engine.coordinator.records import MemberRecord, MemberState
from engine.host.tasks import plain_errors
from engine.members.begun_request import BegunRequest, begin_request, lost_error
from engine.members.lent_area import LentArea
from engine.members.lent_payload import LentPayload, lend
from engine.members.member_link import Connect, MemberClient, MemberLink, ask_newer
from engine.members.read_memory import ReadMemory
from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.cluster.table import Table
from lakefs.errors import CoordinatorLost, EngineBusy, EngineUnreachable, LakeError, StaleEpoch
from lakefs.ids import Buffer, GcGeneration, MemberId, RingEpoch
from lakefs.limits import MEMBER_ANSWER_S, MEMBER_LINKS_MAX, MEMBER_SILENCE_S
from lakefs.ports import Network
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

NEIGHBOUR_SIGN_S: Final = 2.0
"""Time that a member has for a sign of life when another one of its machine was lost."""
_LIMITED: Final = (m.StoreShards, m.OfferShards, m.ReadChunks)
_OF_AN_EPOCH: Final = (
    *(m.StoreShards, m.OfferShards, m.DropShards, m.SetSpaces),
    *(m.KeyedPut, m.KeyedCommit, m.KeyedRemove),
)


@asynccontextmanager
async def open_member_links(coordinator: Coordinator, connect: Connect) -> AsyncIterator[MemberLinks]:
    """Read the lake's records, and reach its members until the block ends.

    EngineUnreachable when the coordinator cannot be asked; StoreUnusable while the lake has no table.
    """
    with plain_errors():
        async with open_lake_view(coordinator) as view, trio.open_nursery() as nursery:
            links = MemberLinks(view, connect, nursery)
            ended = view.on_change(links.look_anew)
            try:
                yield links
            finally:
                ended()
                links.close()
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def connect_member(
    record: MemberRecord,
    *,
    token: str = "",
    machine: str = "",
    network: Network | None = None,
    area: LentArea | None = None,
    reads: ReadMemory | None = None,
) -> AsyncIterator[MemberClient]:
    """Connect to a member at the first of its addresses that answers; lost when it is silent for MEMBER_SILENCE_S.

    `machine` is this one's id: a socket of another machine is not looked for here.  `area`: memory for payload, lent to
    the member if it is on this machine.  A member's id is its store's, so another engine at its address is found out.
    EngineUnreachable, PermissionDenied, UnsupportedVersion, EngineBusy.
    """
    async with AsyncExitStack() as stack:
        engine = await _first_that_answers(stack, record, token, machine, network)
        engine.leaves_into = True
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.end_when_silent, MEMBER_SILENCE_S)
                number = 0 if area is None else await lend(engine, area)
                into = 0 if reads is None or not number else await lend(engine, reads.area, writable=True)
                yield engine if area is None or not number else LentPayload(engine, area, number, reads, into)
                nursery.cancel_scope.cancel()


async def _first_that_answers(
    stack: AsyncExitStack, record: MemberRecord, token: str, machine: str, network: Network | None
) -> RemoteEngine:
    error = EngineUnreachable("it has registered no address that leads to it from this machine")
    for address in record.addresses:
        if address.startswith("unix:") and not _is_here(record, machine):
            continue
        try:
            async with AsyncExitStack() as connecting:
                engine = await connecting.enter_async_context(connect_engine(address, token=token, network=network))
                if engine.hello.store_id == record.member:
                    stack.push_async_exit(connecting.pop_all())
                    return engine
            error = EngineUnreachable(f"the engine at {address} is another one", subject=address)
        except EngineUnreachable as unreachable:
            error = unreachable
    raise error


def _is_here(record: MemberRecord, machine: str) -> bool:
    """Return True unless a member is known to be on another machine."""
    _, its_machine, *_ = (*record.domains, "", "")
    return not machine or its_machine in ("", machine)


class MemberLinks:
    """`Members` over links.  Made by `open_member_links`; used on the loop."""

    def __init__(self, view: LakeView, connect: Connect, nursery: trio.Nursery) -> None:
        self.view: Final = view
        self._connect = connect
        self._nursery = nursery
        self._links: dict[MemberId, MemberLink] = {}
        self._asked: set[MemberLink] = set()
        """Links whose members are asked for a sign of life."""
        self._is_closed = False
        self._learning = trio.Lock()

    def close(self) -> None:
        """Refuse further calls with EngineUnreachable."""
        self._is_closed = True

    @property
    def tables(self) -> Sequence[Table]:
        """See `Members`."""
        return self.view.tables

    @property
    def generation(self) -> GcGeneration:
        """See `Members`."""
        return self.view.generation

    def is_up(self, member: MemberId) -> bool:
        """See `Members`; False for members that the lake does not have."""
        link = self._links.get(member)
        return link.away is None if link is not None else self._is_known(member)

    async def wait_return(self, member: MemberId) -> bool:
        """See `ReturningMembers`; True for a member that nobody has asked yet."""
        link = self._links.get(member)
        return await link.wait_return() if link is not None else self._is_known(member)

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        """See `Members`.  Errors of the member itself are raised as they are."""
        link = self._link(member)
        client = await link.usable()
        link.begin()
        try:
            with trio.move_on_after(MEMBER_ANSWER_S if isinstance(request, _LIMITED) else math.inf):
                return await client.call(request, body, into=into)
            link.lose(client, EngineUnreachable(f"a request was not answered within {MEMBER_ANSWER_S:g} s"))
        except StaleEpoch:
            known = request.epoch if isinstance(request, _OF_AN_EPOCH) else self.tables[0].ring_epoch
            await self._learn(client, RingEpoch(known))
            raise
        except CoordinatorLost:  # it takes nothing now, and is read on
            raise
        except EngineUnreachable as error:
            link.lose(client, error)
        except EngineBusy as error:
            if not client.draining:
                raise
            link.lose(client, error)
        finally:
            link.end()
        raise lost_error(link)

    async def _learn(self, client: MemberClient, known: RingEpoch) -> None:
        """Have a newer table than that of `known`: the member's, else the coordinator's.  EngineUnreachable."""
        async with self._learning:  # of many requests that are refused one asks
            if self.tables[0].ring_epoch <= known:
                await ask_newer(client, self.view)
        await self.view.read_newer(known)

    def begin(
        self,
        member: MemberId,
        request: m.Request,
        into: Sequence[memoryview],
        done: Callable[[Reply | LakeError], None],
    ) -> BegunRequest | None:
        """See `BeginningMembers`.  Not for requests of a ring epoch."""
        assert not isinstance(request, _OF_AN_EPOCH), "newer tables are read by `call`"
        link = None if self._is_closed else self._links.get(member)
        return None if link is None else begin_request(link, request, into, done)

    def look_anew(self) -> None:
        """Let each link look at the lake's records, which have changed."""
        for member, link in [*self._links.items()]:
            if self._is_known(member):
                link.wake()
            else:
                del self._links[member]
                if link.client is not None:
                    link.lose(link.client, EngineUnreachable("it was removed from the lake"))

    def _is_known(self, member: MemberId) -> bool:
        record = self.view.members.get(member)
        return record is not None and record.state is not MemberState.REMOVED

    def _link(self, member: MemberId) -> MemberLink:
        if self._is_closed:
            raise EngineUnreachable("the links to the members were closed", subject=member.hex())
        link = self._links.get(member)
        if link is None:
            if not self._is_known(member):
                raise EngineUnreachable(f"member {member.hex()[:12]} is not of this lake", subject=member.hex())
            link = self._links[member] = MemberLink(
                member, self.view, self._connect, self._nursery, self._ask_neighbours
            )
        if link.client is None:
            self._close_surplus()
        return link

    def ask_machine(self, machine: str) -> None:
        """Ask the members of a machine for a sign of life, as something else there was lost; those without are away."""
        for member, link in self._links.items():
            if machine and link.client is not None and link not in self._asked and self._machine(member) == machine:
                self._asked.add(link)
                self._nursery.start_soon(self._ask_for_a_sign, link, link.client)

    def _ask_neighbours(self, lost: MemberLink) -> None:
        self.ask_machine(self._machine(lost.member))

    async def _ask_for_a_sign(self, link: MemberLink, client: MemberClient) -> None:
        link.begin()
        try:
            with trio.move_on_after(NEIGHBOUR_SIGN_S) as patience, suppress(LakeError):
                reply = await client.call(m.Ping())
                reply.body.release()
            if patience.cancelled_caught:
                link.lose(client, EngineUnreachable("it is silent, and another member of its machine was lost"))
        finally:
            link.end()
            self._asked.discard(link)

    def _machine(self, member: MemberId) -> str:
        """Return the machine of a member; empty if that is not known."""
        record = self.view.members.get(member)
        _, machine, *_ = (*(record.domains if record is not None else ()), "", "")
        return machine

    def _close_surplus(self) -> None:
        """Make room for one more connection, if there is one that nobody uses."""
        open_links = [link for link in self._links.values() if link.client is not None]
        if len(open_links) >= MEMBER_LINKS_MAX:
            idle = [link for link in open_links if not link.in_flight]
            if idle:
                min(idle, key=lambda link: link.used_at).close_if_idle()
