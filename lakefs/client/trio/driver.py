"""`TrioDriver` runs operations in trio, for `lakefs.client.trio.lake.TrioLake`.

Each operation has a nursery of its own.  A cancelled operation drops the requests that it sent, waits for its local
work, and gives back sessions and leases to the engine, for at most `CLEANUP_S`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import Any, TypeVar, cast

import trio

from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable
from lakefs.fabric.client_fabric import ClientFabric
from lakefs.get.opened import Access
from lakefs.known import known_names
from lakefs.known.counts import NOTHING_KNOWN, KnownCounts
from lakefs.known.known_names import KnownNames
from lakefs.lake.lake_steps import LakeSteps
from lakefs.ports import Offload
from lakefs.shares.engine_shares import EngineShares
from lakefs.steps.steps import Send, Start, Step, Steps, Tell, Work, takes
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import Request, WatchEvent

T = TypeVar("T")
CLEANUP_S = 5.0
"""Most seconds that a cancelled operation may take to give back sessions and leases to the engine."""
_CLEANUP_STEPS_MAX = 1000


class _Ticket:
    """One effect in flight.  `scope` is shielded if the answer must not get lost; see `takes`."""

    def __init__(self, *, takes: bool) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope(shield=takes)
        self.takes = takes
        self.result: Any = None
        self.error: Exception | None = None


@dataclass(frozen=True)
class _Ended:
    """The result of an operation that has returned."""

    value: Any


class TrioDriver:
    """One engine client, what its engine shares, and `run`."""

    def __init__(
        self,
        engine: EngineClient,
        offload: Offload,
        *,
        network: bool = False,
        check: Check = Check.BLAKE3,
        repeats: bool = True,
        fabric: ClientFabric | None = None,
    ) -> None:
        """`repeats`: answer for known names without a request.  `fabric`: RDMA to the engine, closed with this."""
        self._engine = engine
        self.offload = offload
        self.shares = EngineShares(self, engine.epoch, fabric)
        """All that the engine shares with this client."""
        self.steps = LakeSteps(
            self.shares.descriptors, engine.offers, network=network, check=check, is_held=self.is_held, fabric=fabric
        )
        self._known: KnownNames | None = None
        self._repeats = repeats and engine.carries_descriptors and known_names.IS_BUILT
        # Callers that fetch by themselves keep grants for long, and can use only those of segments.
        self._access = replace(self.steps.access(None), media=0, fabric=None)

    async def aclose(self) -> None:
        """Close what the engine shares; the engine client is its owner's to close."""
        if self.shares.fabric is None:
            self.shares.close()
        else:
            with trio.CancelScope(shield=True):
                await self.offload.run(self.shares.close)
        await trio.lowlevel.checkpoint()

    def access(self) -> Access:
        """Return the settings of this client's reads, for callers that fetch themselves; valid to the next `await`."""
        if self._engine.epoch != self.shares.epoch:
            self.shares.look()
        return self._access

    @property
    def epoch(self) -> int:
        """Count of connections so far: leases, sources and descriptors of an earlier epoch are void."""
        return self._engine.epoch

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter; see `EngineClient.tell`."""
        return self._engine.tell(request)

    def watch(self, bucket: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """See `EngineClient.watch`."""
        return self._engine.watch(bucket)

    def is_connected(self) -> bool:
        """Return True if the connection of this epoch is still open; see `EngineClient.is_connected`."""
        return self._engine.is_connected()

    def is_held(self, epoch: int) -> bool:
        """Return True if the connection of that epoch is still open, so that the engine keeps what it gave on it."""
        return self.is_connected() and self.epoch == epoch

    async def known_names(self) -> KnownNames | None:
        """Return the names that are known, made at first use; None if every name is to be asked for."""
        if self._known is None:
            if not (self._repeats and self.steps.offers.stamps):
                return None
            self._known = KnownNames(self, is_patient=False)
            self.steps = replace(self.steps, learner=self._known)
        if self._known.content.is_due and self.is_connected():
            await self.run(self._known.content.renewal())
        return self._known

    def stand(self, stamps: bytes, epoch: int) -> bool:
        """Return True if an answer that was read on the connection `epoch` still stands; see `KnownNames.stand`."""
        return self._known is not None and self._known.stand(stamps, epoch)

    async def found(self, found: T | Steps[T]) -> T:
        """Return what `KnownNames` has found, or run the steps that get it."""
        if isinstance(found, GeneratorType):
            return await self.run(cast("Steps[T]", found))
        await trio.lowlevel.checkpoint()
        return cast("T", found)

    @property
    def known_counts(self) -> KnownCounts:
        """Counts of what is known, and of what was answered."""
        return NOTHING_KNOWN if self._known is None else self._known.counts

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation of `LakeSteps` to its end; return its result."""
        self.access()
        outcome: list[T] = []
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                outcome.append(await self._drive(steps, nursery))
            except Exception as error:  # noqa: BLE001 - raised below: not wrapped in the nursery's group
                failure = error
            nursery.cancel_scope.cancel()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # no cycle of frame and traceback
        return outcome[0]

    async def _drive(self, steps: Steps[T], nursery: trio.Nursery) -> T:
        answer: Any = None
        error: Exception | None = None
        while True:
            step = _advance(steps, answer, error)
            if isinstance(step, _Ended):
                return cast(T, step.value)
            try:
                answer, error = await self._take(step, nursery)
            except trio.Cancelled as cancelled:
                await self._clean_up(steps, cancelled)
                raise

    async def _take(self, step: Step, nursery: trio.Nursery) -> tuple[Any, Exception | None]:
        """Do one step; return its answer and its error."""
        if isinstance(step, Tell):
            told = _Ticket(takes=False)
            await self._effect(told, Send(step.request))
            return None, told.error
        if isinstance(step, Start):
            started = _Ticket(takes=takes(step.effect))
            nursery.start_soon(self._effect, started, step.effect)
            return started, None
        ticket = step.ticket
        assert isinstance(ticket, _Ticket)
        try:
            await ticket.done.wait()
        except trio.Cancelled:
            if not await _answered(ticket):
                raise
        return ticket.result, ticket.error

    async def _clean_up(self, steps: Steps[Any], cancelled: trio.Cancelled) -> None:
        """Let a cancelled operation end by itself.  Closing the generator would not do: its cleanup has steps, too."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S) as scope:
            async with trio.open_nursery() as nursery:
                try:
                    step = _advance(steps, None, cancelled)
                    while not isinstance(step, _Ended):
                        answer, failure = await self._take(step, nursery)
                        step = _advance(steps, answer, failure)
                except Exception as error:  # noqa: BLE001 - the cancellation is raised
                    cancelled.add_note(f"while the operation cleaned up: {error!r}")
                except trio.Cancelled as ended:
                    if ended is not cancelled:
                        raise
                nursery.cancel_scope.cancel()
        if scope.cancelled_caught:
            _throw_out(steps)

    async def _effect(self, ticket: _Ticket, effect: Send | Work) -> None:
        try:
            with ticket.scope:
                if isinstance(effect, Send):
                    ticket.result = await self._engine.call(
                        effect.request, effect.body, effect.descriptors, into=effect.into
                    )
                else:
                    ticket.result = await self.offload.run(effect.call, *effect.args)
        except Exception as error:  # noqa: BLE001 - thrown into the operation, which raises it
            ticket.error = error
        if not ticket.scope.cancelled_caught:
            ticket.done.set()  # else the operation waits for it no more


async def _answered(ticket: _Ticket) -> bool:
    """Wait for an answer that gives the cancelled operation something to return; return True if it arrived."""
    if ticket.takes:
        with trio.move_on_after(CLEANUP_S, shield=True):
            await ticket.done.wait()
        ticket.scope.cancel()
    return ticket.done.is_set()


def _advance(steps: Steps[Any], answer: Any, error: BaseException | None) -> Step | _Ended:
    """Return the next step of an operation, or its end."""
    try:
        return steps.throw(error) if error is not None else steps.send(answer)
    except StopIteration as end:
        return _Ended(end.value)


def _throw_out(steps: Steps[Any]) -> None:
    """End an operation whose cleanup took too long: each step that it asks for is refused."""
    for _ in range(_CLEANUP_STEPS_MAX):
        try:
            if isinstance(_advance(steps, None, EngineUnreachable("the operation was cancelled")), _Ended):
                return
        except EngineUnreachable:
            return
