"""`MemberLink`: this process's connection to one member, made when it is used and closed when it is idle.

    unknown --used--> connecting --SetEpoch answered--> connected --idle--> unknown
                          |                                 |
                          +--------- failed, lost ----------+--> away --after a pause--> connecting

Rules kept here:
- One connect at a time.  Callers wait for the first one; while the member is known to be away they are refused at once,
  and it is tried in the background, after pauses that grow to AWAY_PAUSE_S_MAX.
- While a caller waits for a member that went away only just now, it is tried every AWAY_PAUSE_S_AWAITED.
- A connect, with SetEpoch, takes at most MEMBER_CONNECT_S.
- On each connection SetEpoch is sent before any other request but LendMemory, with the newest table and the gc
  generation, which is read from the coordinator after connecting.  It is sent again when there is a newer table, or
  when the generation could not be read before.
- A connection ends when it is lost, when its member drains, or when it was not used for MEMBER_IDLE_S.  Requests in
  flight are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final, Protocol, runtime_checkable

import outcome
import structlog
import trio

from engine.coordinator.lake_state import NO_GENERATION
from engine.coordinator.lake_view import LakeView
from engine.coordinator.records import MemberRecord, MemberState
from engine.members.ports import MEMBER_RETURN_S
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import Buffer, MemberId, RingEpoch
from lakefs.limits import AWAY_PAUSE_S_MAX, AWAY_PAUSE_S_MIN, MEMBER_ANSWER_S, MEMBER_CONNECT_S, MEMBER_IDLE_S
from lakefs.transport.sockets import START_HINT
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import EpochKnown, Request, SetEpoch

AWAY_PAUSE_S_AWAITED: Final = 0.25
"""Pause between attempts to reach a member while a write waits for it."""
_log: Final = structlog.get_logger(__name__)


class MemberClient(Protocol):
    """A connection to a member; `RemoteEngine` is one."""

    @property
    def draining(self) -> bool:
        """True if the member refuses further requests on this connection."""
        ...

    async def call(self, request: Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()) -> Reply:
        """Send a request; see `EngineClient.call`."""
        ...

    async def wait_ended(self) -> None:
        """Wait until the connection is lost, or the member drains."""
        ...


@runtime_checkable
class BeginningClient(Protocol):
    """A connection on which requests are sent without a task that waits for each; see `RemoteEngine.begin`."""

    def begin(
        self, request: Request, into: Sequence[memoryview], done: Callable[[outcome.Outcome[Reply]], None]
    ) -> Callable[[], None] | None:
        """Send a request now; returns what gives its answer up, None if nothing was sent."""
        ...


Connect = Callable[[MemberRecord], AbstractAsyncContextManager[MemberClient]]
"""Connects to a member; the connection ends with the block.  Raises LakeErrors."""


class MemberLink:
    """The link to one member.  Used on the loop; its task runs in the nursery of its owner."""

    def __init__(
        self,
        member: MemberId,
        view: LakeView,
        connect: Connect,
        nursery: trio.Nursery,
        was_lost: Callable[[MemberLink], None] = lambda _: None,
    ) -> None:
        """`was_lost` is called each time when the connection was lost, in the same step."""
        self.member: Final = member
        self.client: MemberClient | None = None
        """The connection; None while there is none."""
        self.begins: BeginningClient | None = None
        """The connection, if requests can be begun on it."""
        self.away: EngineUnreachable | None = None
        """The reason why the member is away; None while it is not known to be."""
        self.in_flight = 0
        self.used_at = trio.current_time()
        self._view = view
        self._connect = connect
        self._nursery = nursery
        self._was_lost = was_lost
        self._is_kept = False
        self._woken = trio.Event()
        self._settled = trio.Event()
        """Set when the connect under way has ended."""
        self._lost: LakeError | None = None
        """The reason why the last connection was lost; None if it was not."""
        self._has_served = False
        """True if the last connect succeeded."""
        self._is_surplus = False
        self._away_since = -math.inf
        self._returned = trio.Event()
        """Set when the member is not away any more."""
        self._awaited = trio.Event()
        """Set when a caller begins to wait for the return."""
        self._waiting = 0
        self._sent = RingEpoch(0), False
        """The ring epoch that was sent on this connection, and if the gc generation was."""

    async def usable(self) -> MemberClient:
        """Return the connection; connects if there is none.  EngineUnreachable, at once while the member is away."""
        while self.client is None:
            if self.away is not None:
                raise EngineUnreachable(self.away.message, subject=self.away.subject)
            if not self._is_kept:
                self._is_kept = True
                self._settled = trio.Event()
                self._nursery.start_soon(self._keep)
            await self._settled.wait()
        return self.client

    async def wait_return(self) -> bool:
        """Wait until the member is up again, at most MEMBER_RETURN_S from when it went away; return if it is."""
        self._waiting += 1
        if self.away is not None and self._waiting == 1:
            self._awaited.set()
        try:
            with trio.move_on_at(self._away_since + MEMBER_RETURN_S):
                while self.away is not None:
                    await self._returned.wait()
        finally:
            self._waiting -= 1
        return self.away is None

    def begin(self) -> None:
        """Note that a request begins."""
        self.in_flight += 1

    def end(self) -> None:
        """Note that a request has ended."""
        self.in_flight -= 1
        self.used_at = trio.current_time()
        if self.client is None and not self.in_flight:
            self._woken.set()

    def lose(self, client: MemberClient, error: LakeError) -> None:
        """Note that a connection is of no use any more; does nothing if it is not the present one."""
        if client is self.client:
            self._lost = error
            self._note_away(error)
            self.client = self.begins = None
            self._settled = trio.Event()
            self._woken.set()
            self._was_lost(self)

    def wake(self) -> None:
        """Look anew at the lake's records, in the link's task."""
        self._woken.set()

    def close_if_idle(self) -> None:
        """End the connection now if no request is in flight."""
        self._is_surplus = True
        self._woken.set()

    def _note_away(self, error: LakeError) -> None:
        if self.away is None:
            self._away_since = trio.current_time()
            self._returned = trio.Event()
        reason = error.message.removesuffix(START_HINT)
        self.away = EngineUnreachable(f"member {self.member.hex()[:12]}: {reason}", subject=self.member.hex())

    async def _keep(self) -> None:
        """Connect and serve until the link is idle; while the member is away, try again and again."""
        pause_s = AWAY_PAUSE_S_MIN
        while (record := self._record()) is not None:
            error = await self._serve_once(record)
            if error is None:
                break
            if self._has_served:
                pause_s = AWAY_PAUSE_S_MIN
            if self._has_served or pause_s == AWAY_PAUSE_S_MIN:
                _log.warning("member_away", member=self.member.hex(), reason=error.message)
            self._note_away(error)
            self._settled.set()
            with trio.move_on_after(min(pause_s, AWAY_PAUSE_S_AWAITED) if self._waiting else pause_s):
                await self._awaited.wait()
            self._awaited = trio.Event()
            pause_s = min(2 * pause_s, AWAY_PAUSE_S_MAX)
        if record is None:
            self._note_away(EngineUnreachable("it was removed from the lake"))
        self._is_kept = False
        self._settled.set()

    def _record(self) -> MemberRecord | None:
        record = self._view.members.get(self.member)
        return None if record is None or record.state is MemberState.REMOVED else record

    async def _serve_once(self, record: MemberRecord) -> LakeError | None:
        """Connect and serve; returns None when the link was idle, else the reason why the connection ended."""
        self._has_served, self._lost = False, None
        with trio.CancelScope(deadline=trio.current_time() + MEMBER_CONNECT_S) as connecting:
            try:
                async with self._connect(record) as client:
                    await self._greet(client)
                    connecting.deadline = math.inf
                    return await self._serve(client)
            except LakeError as error:
                return error
        if connecting.cancelled_caught:
            return EngineUnreachable(f"it does not answer at {', '.join(record.addresses)}")
        raise AssertionError("the block returns, raises or was cancelled")

    async def _serve(self, client: MemberClient) -> LakeError | None:
        if self.away is not None:
            _log.info("member_reached", member=self.member.hex())
        self.client, self.away, self._has_served, self._is_surplus = client, None, True, False
        self.begins = client if isinstance(client, BeginningClient) else None
        self.used_at = trio.current_time()
        self._settled.set()
        self._returned.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._note_end, client)
                await self._wait_unused(client)
                nursery.cancel_scope.cancel()
        finally:
            self.client = self.begins = None
            self._settled = trio.Event()
        return self._lost

    async def _note_end(self, client: MemberClient) -> None:
        await client.wait_ended()
        self.lose(client, EngineUnreachable("the connection was lost, or the member shuts down"))

    async def _wait_unused(self, client: MemberClient) -> None:
        """Return when the connection is lost or idle; until then, send newer tables."""
        while self.client is client:
            idle_at = (trio.current_time() if self.in_flight else self.used_at) + MEMBER_IDLE_S
            with trio.move_on_at(idle_at):
                await self._woken.wait()
            self._woken = trio.Event()
            if self.client is not client:
                break
            is_idle = self._is_surplus or trio.current_time() >= self.used_at + MEMBER_IDLE_S
            if not self.in_flight and is_idle:
                return
            self._is_surplus = False
            if self._sent != (self._view.tables[0].ring_epoch, True):
                await self._greet_again(client)
        with trio.move_on_after(MEMBER_ANSWER_S):
            while self.in_flight:
                await self._woken.wait()
                self._woken = trio.Event()

    async def _greet_again(self, client: MemberClient) -> None:
        try:
            with trio.move_on_after(MEMBER_CONNECT_S) as greeting:
                await self._greet(client)
            if greeting.cancelled_caught:
                self.lose(client, EngineUnreachable("it does not answer"))
        except LakeError as error:
            self.lose(client, error)

    async def _greet(self, client: MemberClient) -> None:
        """Send SetEpoch, with the gc generation if the coordinator can be asked."""
        generation, is_read = NO_GENERATION, False
        with suppress(EngineUnreachable):
            generation, is_read = await self._view.present_generation(), True
        table = self._view.tables[0]
        reply = await client.call(SetEpoch(table.ring_epoch, self._view.packed_table, generation))
        reply.body.release()
        assert isinstance(reply.message, EpochKnown)
        self._sent = table.ring_epoch, is_read
        if reply.message.epoch > table.ring_epoch:
            if reply.message.table:
                await self._view.take_over(reply.message.table)
            with suppress(EngineUnreachable):
                await self._view.read_newer(table.ring_epoch)


async def ask_newer(client: MemberClient, view: LakeView) -> None:
    """Ask a member for its table, and take it over if it is newer; a member that does not answer soon is left."""
    with trio.move_on_after(MEMBER_CONNECT_S), suppress(LakeError):
        reply = await client.call(SetEpoch(0))
        reply.body.release()
        assert isinstance(reply.message, EpochKnown)
        if reply.message.table:  # else the member has started again since it was given it
            await view.take_over(reply.message.table)
