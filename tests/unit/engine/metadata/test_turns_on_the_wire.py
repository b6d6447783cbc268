"""Heads that follow turns over connections of the native protocol, where no task waits for an answer at either end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import pytest
import trio

from engine.head.head_stamps import HeadStamps
from engine.head.names_link import NamesConnection, NamesLink, names_at
from engine.metadata.head_turns import RIGHTS_OVER_S
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.server.listener import Server
from lakefs.errors import InvalidArgument
from lakefs.wire import messages as m
from tests.names_rig import names_store
from tests.store_rig import run
from tests.turns_rig import Head, Names, boottime_ns
from tests.unit.engine.cluster.remote_rig import FrozenNetwork

ADDRESS: Final = "tcp://names:7000"
THERE_AND_BACK_S: Final = 0.01
"""More than a turn, and what is said behind it, is under way."""


class FarHead(Head):
    """A head at another machine than the names."""

    def __init__(self, nursery: trio.Nursery, seed: int) -> None:
        self.network = FrozenNetwork(seed)
        self.stamps = HeadStamps(boottime_ns)
        self.link = NamesLink(nursery, self.connect, lambda: None)
        self.link.learn = self.stamps.learn

    def connect(self) -> AbstractAsyncContextManager[NamesConnection]:
        return names_at(ADDRESS, token="token", network=self.network)()


class Far:
    """Names at a machine, and heads at others."""

    def __init__(self, names: Names, server: Server, heads: list[FarHead], nursery: trio.Nursery) -> None:
        self.names = names
        self.server = server
        self.heads = heads
        self.following: list[trio.CancelScope] = []
        self._nursery = nursery

    async def begin(self) -> None:
        for head in self.heads:
            scope = trio.CancelScope()
            self.following.append(scope)
            self._nursery.start_soon(self._follow, head, scope)
        await self.names.until(lambda: all(head.has_right() for head in self.heads))

    async def _follow(self, head: FarHead, scope: trio.CancelScope) -> None:
        with scope:
            await head.stamps.run(head.connect)


def far(body: Callable[[Far], Awaitable[None]], heads: int = 3) -> None:
    async def main() -> None:
        async with names_store() as store, trio.open_nursery() as nursery:
            names = Names(store, nursery)
            made = [FarHead(nursery, seed) for seed in range(heads)]
            server = Server(NamesService(store, gate=BindGate()), made[0].network, token="token")
            for head in made:
                await nursery.start(partial(server.serve, await head.network.listen(ADDRESS), trusted=True))
            scene = Far(names, server, made, nursery)
            await scene.begin()
            await names.change()
            await body(scene)
            for head in made:
                await head.link.aclose()
            nursery.cancel_scope.cancel()
            for head in made:
                head.stamps.close()
            with trio.CancelScope(shield=True):
                await names.client.aclose()

    run(main)


def test_heads_turn_at_once_and_nothing_that_was_known_is_repeated_after_a_change() -> None:
    async def body(scene: Far) -> None:
        for _ in range(5):
            known = [(await head.stat())[0] for head in scene.heads]
            assert all(head.repeats(each) for head, each in zip(scene.heads, known, strict=True))
            assert await scene.names.change() < THERE_AND_BACK_S
            assert not any(head.equal(each) for head, each in zip(scene.heads, known, strict=True))

    far(body)


def test_rights_are_renewed_while_nothing_turns() -> None:
    async def body(scene: Far) -> None:
        for _ in range(100):
            await trio.sleep(0.1)
            assert all(head.right_end_s() > trio.current_time() + 0.2 for head in scene.heads)

    far(body)


@pytest.mark.parametrize("durable", [True, False])
def test_a_head_that_cannot_be_reached_delays_a_change_once(durable: bool) -> None:
    async def body(scene: Far) -> None:
        first, second, _ = scene.heads
        known, also = (await first.stat())[0], (await second.stat())[0]
        first.network.freeze()
        assert 0.2 < await scene.names.change(durable=durable) < RIGHTS_OVER_S + THERE_AND_BACK_S
        assert not first.repeats(known)
        assert not second.equal(also)
        assert await scene.names.change(durable=durable) < THERE_AND_BACK_S
        first.network.thaw()
        await scene.names.until(first.has_right)
        assert not first.equal(known)

    far(body)


@pytest.mark.parametrize("how", ["cut", "left"])
def test_a_head_that_asked_and_is_gone_is_not_answered_and_delays_a_change_once(how: str) -> None:
    async def body(scene: Far) -> None:
        head = scene.heads[0]
        (known,) = await head.stat()
        followers = list(scene.names.turns._heads)
        if how == "cut":
            head.network.cut_all()
            head.network.freeze()
        else:
            scene.following[0].cancel()
        await trio.sleep(0.05)
        assert not head.has_right()
        assert sum(follower.answer is None for follower in followers) == 1
        assert not head.repeats(known)
        assert await scene.names.change() > 0.2
        assert await scene.names.change() < THERE_AND_BACK_S

    far(body)


def test_names_that_end_take_rights_back_from_heads_that_wait_for_turns() -> None:
    async def body(scene: Far) -> None:
        before = trio.current_time()
        await scene.names.turns.end()
        assert trio.current_time() - before < THERE_AND_BACK_S
        assert not any(head.has_right() for head in scene.heads)

    far(body)


def test_names_that_drain_answer_heads_that_wait_for_turns() -> None:
    async def body(scene: Far) -> None:
        before = trio.current_time()
        await scene.server.drain(100)
        assert trio.current_time() - before < 1
        assert not any(head.has_right() for head in scene.heads)

    far(body)


def test_a_head_that_asks_again_before_its_answer_is_refused() -> None:
    async def body(scene: Far) -> None:
        (head,) = scene.heads
        async with head.connect() as connection, trio.open_nursery() as nursery:
            await connection.client.call(m.OpenTurns(0))
            await connection.client.call(m.FollowTurns(0, 0))
            nursery.start_soon(connection.client.call, m.FollowTurns(0, 100_000_000))
            await trio.sleep(0.05)
            with pytest.raises(InvalidArgument, match="one request at a time"):
                await connection.client.call(m.FollowTurns(0, 0))

    far(body, heads=1)
