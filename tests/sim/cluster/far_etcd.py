"""The coordinator on a simulated etcd as a process on another host has it: the product's client, over the network.

Only what gRPC does is simulated: sending a request to a node, with a deadline, and reading a stream.  So tries,
markers, sessions, and watches that begin again are the product's (`engine.etcd`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import trio

from engine.etcd import etcd_messages as e
from engine.etcd.calls_under_way import TryUnderWay
from engine.etcd.etcd_bounds import ETCD_CANCEL_S
from engine.etcd.etcd_coordinator import EtcdCoordinator, coordinator_over
from engine.etcd.etcd_link import DEFRAGMENT, OVERTAKEN, RANGE, Endpoint, EtcdAccess, EtcdLink, Method
from engine.etcd.etcd_status import Status
from engine.etcd.etcd_streams import ENDED
from lakefs.errors import EngineUnreachable
from tests.sim.cluster.etcd_nodes import REFUSED, RESET, SILENCE_S, EtcdNodes, EtcdStream
from tests.sim.cluster.network import Way
from tests.sim.cluster.process import SimProcess
from tests.sim.world.sim_time import pause

_LATE: Final = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


@asynccontextmanager
async def far_etcd(
    nodes: EtcdNodes, near: str, lake: str = "lake", *, process: SimProcess | None = None
) -> AsyncIterator[EtcdCoordinator]:
    """Yield the coordinator of a lake as a process on a host has it; like `open_etcd_coordinator`.

    When the process is killed nothing more is sent: its session ends by itself.
    """
    async with coordinator_over(SimEtcdLink(nodes, near, process), lake) as coordinator:
        yield coordinator


class _Endpoint(Endpoint):
    """A node as the link knows it; nothing connects to it."""

    def __init__(self, host: str, access: EtcdAccess) -> None:
        self.address = host  # type: ignore[misc]
        self.streams = {}  # type: ignore[misc]
        self.heard_at = self.asked_at = -math.inf


class _Call:
    """A request under way: its answer, once it has one."""

    def __init__(self, sent: TryUnderWay) -> None:
        self.sent = sent
        self.done = sent.done
        self.answer: e.Message | Status = _LATE

    def settle(self, answer: e.Message | Status) -> None:
        """Answer it, unless it was given up."""
        if not self.done.is_set():
            self.answer = answer
            self.done.set()


class SimEtcdLink(EtcdLink):
    """The link of one process to a simulated etcd."""

    def __init__(self, nodes: EtcdNodes, near: str, process: SimProcess | None) -> None:
        first = nodes.rng.randrange(len(nodes.hosts))
        super().__init__(EtcdAccess(nodes.hosts, first=first), connect=_Endpoint)
        self._nodes = nodes
        self._near = near
        self._process = process

    def check_open(self) -> None:
        """See `EtcdLink`."""
        super().check_open()
        if self._process is not None and self._process.is_gone:
            raise EngineUnreachable("the process has ended")

    def close(self) -> None:
        """See `EtcdLink`."""
        self._closed = True
        self._calls.end_all()
        for endpoint in self._endpoints:
            for stream in list(endpoint.streams):
                stream.cancel()

    def drawn_number(self) -> int:
        """See `EtcdLink`; drawn from the world's source."""
        return self._nodes.rng.getrandbits(62) + 1

    # --- calls -------------------------------------------------------------------------------------------

    async def _call(
        self, endpoint: Endpoint, method: Method, request: e.Message, timeout_s: float
    ) -> e.Message | Status:
        await trio.lowlevel.checkpoint()
        self.check_open()
        call = _Call(self._calls.begin(takes_long=method is DEFRAGMENT))
        self._nodes.network.nursery.start_soon(self._deliver, endpoint.address, method, request, call)
        try:
            with trio.move_on_after(max(0.0, timeout_s)) as deadline:
                await (call.done.wait() if method is RANGE else _waited(call.done, deadline))
        finally:
            self._calls.end(call.sent)
        self.check_open()
        answer = OVERTAKEN if call.sent.is_given_up else call.answer
        call.done.set()
        if not isinstance(answer, Status):
            endpoint.heard_at = trio.current_time()
        return answer

    async def _deliver(self, host: str, method: Method, request: e.Message, call: _Call) -> None:
        """Carry a request to a node, have it done, and carry its answer back, whoever waits for it."""
        faults, chance = self._nodes.faults, self._nodes.rng
        refused = await self._carried(self._near, host)
        if refused is None and self._meets(faults.loses_requests):
            refused = RESET
        if refused is not None:
            call.settle(refused)
            return
        if self._meets(faults.holds_requests):
            await pause(chance.uniform(0.0, faults.held_s))
        if self._nodes.meet is not None:
            await self._nodes.meet(self._near, method, request, False)
        answer = await self._nodes.serve(host, method, request)
        if self._nodes.meet is not None:
            await self._nodes.meet(self._near, method, request, True)
        if self._meets(faults.loses_answers):
            answer = RESET
        elif self._meets(faults.holds_answers):
            await pause(chance.uniform(0.0, faults.held_s))
        lost = await self._carried(host, self._near)
        call.settle(answer if lost is None else RESET)

    async def _carried(self, source: str, target: str) -> Status | None:
        """Return None when a message has arrived; the reason if it does not.

        One over a silent way arrives when that speaks again, or never.
        """
        network, until = self._nodes.network, trio.current_time() + SILENCE_S
        await pause(network.delay_s(source, target))
        while network.way(source, target) is Way.SILENT:
            if trio.current_time() >= until:
                return RESET
            with trio.move_on_at(until):
                await network.changed().wait()
        if network.way(source, target) is Way.CUT or self._nodes.is_away(target):
            return REFUSED
        return None

    def _meets(self, fault: float) -> bool:
        return fault > 0 and self._nodes.rng.random() < fault

    # --- streams -----------------------------------------------------------------------------------------

    def open_stream(self, endpoint: Endpoint, method: Method, request: e.Message) -> EtcdStream:
        """See `EtcdLink`; of watches only."""
        stream = EtcdStream(self._nodes, self._near, endpoint.address, request.create)
        endpoint.streams[stream] = None
        if self._nodes.is_away(endpoint.address):
            stream.break_off(REFUSED)
        return stream

    async def read_stream(self, stream: EtcdStream, take: Callable[[Any], Awaitable[bool]]) -> Status:
        """See `EtcdLink`."""
        while (broken := stream.broken) is None:
            response = None if stream.is_silent() else stream.watch.take()
            if response is None:
                await self._look_again(stream)
            elif await self._is_carried(stream) and await take(response):
                return ENDED
        return broken

    async def _is_carried(self, stream: EtcdStream) -> bool:
        """Return True when a response has arrived, which may take long; False if the stream ended before."""
        faults = self._nodes.faults
        await pause(self._nodes.network.delay_s(stream.host, self._near))
        if self._meets(faults.ends_watches):
            stream.break_off(RESET)
        elif self._meets(faults.holds_watches):
            with trio.move_on_after(self._nodes.rng.uniform(0.0, faults.held_s)):
                await stream.woken.wait()
        return stream.broken is None

    async def _look_again(self, stream: EtcdStream) -> None:
        """Wait until there may be a response."""
        if stream.is_silent():
            with trio.move_on_after(0.05):
                await stream.woken.wait()
        else:
            await stream.watch.woken.wait()


async def _waited(done: trio.Event, deadline: trio.CancelScope) -> None:
    """Wait for an answer until the deadline; when that is cancelled before, a little longer."""
    try:
        await done.wait()
    except trio.Cancelled:
        if trio.current_time() < deadline.deadline:
            with trio.move_on_after(ETCD_CANCEL_S, shield=True):
                await done.wait()
        raise
