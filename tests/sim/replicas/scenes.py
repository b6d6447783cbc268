"""Scenes of names with replicas: short histories with a plot, in which one message is late, or one clock is wrong.

Each is of a rule that histories need too much luck to notice (`tests.sim.replicas.planted`).  Their checks are those of
every history: registers, and `Quiet`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import trio

from engine.etcd.etcd_link import KEEP_ALIVE, RANGE, TXN, Method
from engine.format.group_parts import unpack_part
from engine.group_log.log_bounds import LEADER_LEASE_S
from engine.head.names_link import ConnectNames, NamesLink
from tests.sim.cluster.etcd_nodes import HOSTS
from tests.sim.cluster.network import Way
from tests.sim.judges.history import SimFailure
from tests.sim.replicas.customers import Customer, Promises
from tests.sim.replicas.faults import KEYS
from tests.sim.replicas.places import DriftingClock, ReplicaPlace, Surroundings
from tests.sim.replicas.world import CLIENTS, ReplicasWorld

KEY: Final = "a"
_PREFIX: Final = b"/lake/lake/keys/"
_WAIT_S: Final = 60.0
_LATE_S: Final = 1.4
"""Later than this, a request is tried at another node."""


@dataclass(frozen=True)
class Client:
    """A client that does one thing after the other."""

    customer: Customer
    connect: ConnectNames

    async def put(self) -> bool:
        """Put the name, once; False if it is not known whether that was done."""
        return await self.customer.try_once(self.connect, lambda link: self.customer._put(link, KEY))

    async def read(self) -> bool:
        """Read the name, once; False if that cannot be done now."""
        return await self.customer.try_once(self.connect, lambda link: self.customer._read(link, KEY))


class ReplicaStage:
    """Two replicas and two clients, of which each is beside a head of its own."""

    def __init__(self, world: Surroundings, promises: Promises) -> None:
        self.world = world
        self.rng = world.new_random()
        self._promises = promises

    async def leader(self) -> tuple[ReplicaPlace, ReplicaPlace]:
        """Return the replica that leads, and the other one; both have all groups."""
        one, other = self.world.places
        await self.wait(lambda: (one.leads or other.leads) and None not in (one.contents(), other.contents()), "leads")
        await trio.sleep(1.0)
        return (one, other) if one.leads else (other, one)

    @asynccontextmanager
    async def client(self, host: str) -> AsyncIterator[Client]:
        """Yield a client that has put the name, and reads it."""
        customer = Customer(host, host, self.world, self._promises)
        async with customer.reached() as connect:
            client = Client(customer, connect)
            await self.until_done(client.put, "a put is done")
            await self.until_done(client.read, "a read is done")
            yield client

    async def until_done(self, step: Callable[[], Awaitable[bool]], what: str) -> None:
        """Do a step until it succeeds."""
        with trio.move_on_after(_WAIT_S) as bound:
            while not await step():  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.1)
        if bound.cancelled_caught:
            raise SimFailure(f"{what}: not in {_WAIT_S:g} s")

    async def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; SimFailure when it does not come true for long."""
        with trio.move_on_after(_WAIT_S) as bound:
            while not condition():  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.01)
        if bound.cancelled_caught:
            raise SimFailure(f"{what}: not in {_WAIT_S:g} s")

    @contextmanager
    def silent(self, *hosts: str) -> Iterator[None]:
        """Let hosts hear nothing of etcd during the block, nor etcd of them."""
        pairs = [pair for host in hosts for node in HOSTS for pair in ((host, node), (node, host))]
        for pair in pairs:
            self.world.network.set_way(*pair, Way.SILENT)
        try:
            yield
        finally:
            for pair in pairs:
                self.world.network.set_way(*pair, Way.GOOD)

    @contextmanager
    def meeting(self, meet: Callable[[str, Method, Any, bool], Awaitable[None]]) -> Iterator[None]:
        """Let something happen to each message to and from etcd during the block."""
        self.world.nodes.meet = meet
        try:
            yield
        finally:
            self.world.nodes.meet = None


async def an_append_is_late(stage: ReplicaStage) -> None:
    """The last part of a group arrives at etcd when another replica leads, which has removed the parts before it."""
    leader, other = await stage.leader()
    is_held, released = trio.Event(), trio.Event()

    async def hold(near: str, method: Method, request: Any, is_answer: bool) -> None:
        if near == leader.machine and method is TXN and not is_answer and _is_last_of_several(request):
            is_held.set()
            await released.wait()

    async with stage.client(CLIENTS[0]) as client:
        with stage.meeting(hold):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_put_until, client, is_held)
                await is_held.wait()
                with stage.silent(leader.machine):
                    await stage.wait(lambda: other.leads, "the other one leads")
                    await trio.sleep(stage.rng.choice((0.1, 1.0)))
                    released.set()
                    await trio.sleep(1.0)
        await stage.until_done(client.put, "a put is done")
        await stage.until_done(client.read, "a read is done")


def _is_last_of_several(request: Any) -> bool:
    """Return True for a transaction that puts the last one of a group's parts."""
    for operation in request.success:
        if _is_last_of_several(operation.txn):
            return True
        key = operation.put.key.removeprefix(_PREFIX)
        place = KEYS.place(key)
        if place is not None and place[1] > 0 and unpack_part(key, operation.put.value).end is not None:
            return True
    return False


async def _put_until(client: Client, done: trio.Event) -> None:
    while not done.is_set():
        await client.put()


async def an_answer_is_late(stage: ReplicaStage) -> None:
    """The answer to the leader's last keep-alive is late, and a client that does not hear of the next one reads."""
    leader, other = await stage.leader()
    sent = trio.Event()

    async def delay(near: str, method: Method, request: Any, is_answer: bool) -> None:
        if near != leader.machine or not is_answer:
            return
        if method is KEEP_ALIVE:
            sent.set()
        if sent.is_set() and method in (KEEP_ALIVE, RANGE):
            await trio.sleep(_LATE_S)

    async with stage.client(CLIENTS[0]) as stale, stage.client(CLIENTS[1]) as fresh:
        with stage.meeting(delay):
            await sent.wait()
            await trio.sleep(2 * _LATE_S + 0.1)
        with stage.silent(leader.machine, CLIENTS[0]):
            await _read_behind(stage, stale, fresh, other)


async def a_clock_stands(stage: ReplicaStage) -> None:
    """The leader's machine stands still, its clock too, as under a hypervisor; its next keep-alive has to find out."""
    leader, other = await stage.leader()
    async with stage.client(CLIENTS[0]) as stale, stage.client(CLIENTS[1]) as fresh:
        with stage.silent(CLIENTS[0]), mock.patch.object(DriftingClock, "stands_with_process", new=True):
            leader.stop()
            await stage.wait(lambda: other.leads, "the other one leads")
            await stage.until_done(fresh.put, "a put is done")
            leader.resume()
            await trio.sleep(LEADER_LEASE_S / 2)
            await _read_behind(stage, stale, fresh, other)


async def _read_behind(stage: ReplicaStage, stale: Client, fresh: Client, other: ReplicaPlace) -> None:
    """Change the name at the replica that leads by now, and read it where another one may be asked."""
    async with trio.open_nursery() as nursery:
        async with _read_again_and_again(stale, nursery):
            await stage.wait(lambda: other.leads, "the other one leads")
            await stage.until_done(fresh.put, "a put is done")
            await trio.sleep(LEADER_LEASE_S)


@asynccontextmanager
async def _read_again_and_again(client: Client, nursery: trio.Nursery) -> AsyncIterator[None]:
    async def read() -> None:
        while True:
            await client.customer.try_once(client.connect, partial(_read_long, client))

    nursery.start_soon(read)
    yield
    nursery.cancel_scope.cancel()


async def _read_long(client: Client, link: NamesLink) -> bool:
    """Read over one connection until that is lost."""
    while await client.customer._read(link, KEY):  # noqa: ASYNC110 - on a clock that jumps
        await trio.sleep(0.02)
    await trio.sleep(0.05)
    return False


SCENES: Final[dict[str, Callable[[ReplicaStage], Awaitable[None]]]] = {
    "an append is late": an_append_is_late,
    "an answer to a keep-alive is late": an_answer_is_late,
    "a clock stands": a_clock_stands,
}


class ReplicaScene(ReplicasWorld):
    """The run of one scene with one seed."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(seed)
        self._name, self._play = name, SCENES[name]
        self._count, self._piece_bytes = 2, 400

    @property
    def name(self) -> str:
        """See `ReplicasWorld`."""
        return f'--scene "{self._name}" {self.seed}'

    async def _busy(self, world: Surroundings, promises: Promises) -> None:
        await self._play(ReplicaStage(world, promises))
