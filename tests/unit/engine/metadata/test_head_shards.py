"""A head that repeats the stamps of names in several shards: nothing that any of them answered is missed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
import trio

from engine.head.head_stamps import HeadStamps
from engine.head.names_link import NamesConnection, NamesLink
from engine.lake.embedded_names import embedded_names
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from lakefs.errors import EngineUnreachable
from lakefs.ids import EMPTY_BLOB, NamesShard
from lakefs.stamps.stamps import STAMP
from lakefs.wire import messages as m
from tests.names_rig import names_store
from tests.store_rig import ask, good, run
from tests.turns_rig import BOOTED_NS, A, boottime_ns

FIRST, SECOND, THIRD = map(NamesShard, range(3))


class Shard:
    """The names of one shard, a client of another machine, and the connections of the head."""

    def __init__(self, number: NamesShard, store: KeyedStore) -> None:
        self.number = number
        self.service = NamesService(store, gate=BindGate())
        self.other = EmbeddedEngine(self.service, descriptors=False)
        self.lost = trio.Event()
        self.answered: dict[str, int] = {}
        """The node of each key by the last change that was answered; later ones are higher."""

    def connect(self) -> AbstractAsyncContextManager[NamesConnection]:
        if self.lost.is_set():
            raise EngineUnreachable("it stays away")
        return embedded_names(self.service, self.lost.wait)()

    def lose(self) -> None:
        self.lost.set()
        self.lost = trio.Event()

    async def change(self, key: str = "a") -> None:
        """Bind a name anew, at another head."""
        changes = [m.NameChange("bkt", key, EMPTY_BLOB, m.ObjectAttributes(), create_bucket=True)]
        request = m.BindBlobs(m.Answered(0, 0), changes, [0], [1])
        (stat,) = good(await ask(self.other, request, m.NameResults))
        self.answered[key] = stat.node


class Rig:
    """A head over shards."""

    def __init__(self, shards: list[Shard], nursery: trio.Nursery) -> None:
        self.shards = shards
        self.nursery = nursery
        self.stamps = HeadStamps(boottime_ns)
        self.links: dict[NamesShard, NamesLink] = {}
        self.followed: dict[NamesShard, trio.CancelScope] = {}

    def begin(self, shard: Shard) -> None:
        self.nursery.start_soon(self.stamps.run, shard.connect, shard.number)

    def link(self, shard: Shard) -> NamesLink:
        if shard.number not in self.links:
            link = NamesLink(self.nursery, shard.connect, lambda: None, shard.number)
            link.learn = lambda message: self.stamps.learn(message, shard.number)
            self.links[shard.number] = link
        return self.links[shard.number]

    async def stat(self, shard: Shard, key: str = "a") -> bytes:
        """Return the stamps of an answer."""
        return (await self.look(shard, key)).stamps

    async def look(self, shard: Shard, key: str) -> m.NameResult:
        link = self.link(shard)
        request = m.StatNames([("bkt", key)], stamps=await self.stamps.join(link))
        (result,) = (await link.ask(request, m.NameResults)).results
        return result

    def equal(self, stamps: bytes) -> bool:
        slots = dict(STAMP.iter_unpack(stamps))
        return self.stamps._stamps.read(list(slots)) == list(slots.values())

    def has_right(self) -> bool:
        return (self.stamps._stamps.right_end_ns - BOOTED_NS) / 1e9 > trio.current_time()

    def repeats(self, stamps: bytes) -> bool:
        return bool(stamps) and self.has_right() and self.equal(stamps)

    async def until(self, happens: Callable[[], Any]) -> None:
        with trio.fail_after(100):
            while not happens():  # noqa: ASYNC110 - as users see it
                await trio.sleep(0.01)


def scene(body: Callable[[Rig], Awaitable[None]], count: int = 2, followed: int | None = None) -> None:
    """Run with a head over shards, of which the first `followed` are followed and have a right."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(names_store()) for _ in range(count)]
            shards = [Shard(NamesShard(number), store) for number, store in enumerate(stores)]
            async with trio.open_nursery() as nursery:
                rig = Rig(shards, nursery)
                for shard in shards:
                    await shard.change()
                for shard in shards[:followed]:
                    rig.begin(shard)
                await rig.until(lambda: all(rig.stamps.turns(shard.number) for shard in shards[:followed]))
                with trio.fail_after(1000):
                    await body(rig)
                for link in rig.links.values():
                    await link.aclose()
                nursery.cancel_scope.cancel()
            rig.stamps.close()
            for shard in shards:
                await shard.other.aclose()

    run(main)


def test_names_of_each_shard_are_repeated_until_they_change_there() -> None:
    async def body(rig: Rig) -> None:
        first, second = rig.shards
        for _ in range(2):  # where both have one slot, learning what one says of it turns the other's
            known = {shard.number: await rig.stat(shard) for shard in rig.shards}
        await trio.sleep(20)
        assert all(map(rig.repeats, known.values()))
        await second.change()
        assert not rig.repeats(known[SECOND])
        anew = await rig.stat(second)
        assert rig.repeats(anew)
        await first.change()
        assert not rig.repeats(known[FIRST])
        assert rig.repeats(await rig.stat(first))

    scene(body)


def test_a_shard_that_is_new_ends_nothing_that_is_known() -> None:
    async def body(rig: Rig) -> None:
        first, second = rig.shards
        known = await rig.stat(first)
        assert await rig.stat(second) == b"", "its turns are not followed"
        rig.begin(second)
        for _ in range(100):
            await trio.sleep(0.001)
            assert rig.has_right()
        assert rig.stamps.turns(SECOND)
        # its base has raised all counters: what was known is learned anew
        assert not rig.equal(known)
        assert rig.repeats(await rig.stat(first))
        assert rig.repeats(await rig.stat(second))

    scene(body, followed=1)


def test_without_one_shard_the_others_are_repeated_and_nothing_of_that_one() -> None:
    async def body(rig: Rig) -> None:
        first, second = rig.shards
        known = [await rig.stat(shard) for shard in (second, first, second)][1:]
        second.lost.set()  # it stays away
        await trio.testing.wait_all_tasks_blocked()
        assert not any(map(rig.repeats, known))
        assert rig.repeats(again := await rig.stat(first))
        await trio.sleep(10)
        assert rig.repeats(again)
        await second.change()
        assert not rig.repeats(known[1])

    scene(body)


def test_the_shortest_right_is_that_of_all() -> None:
    async def body(rig: Rig) -> None:
        first, second = rig.shards
        known = [await rig.stat(shard) for shard in (second, first, second)][1:]
        stamps = rig.stamps
        stamps.make(m.TurnsFollowed(0, b"", 50 * 10**9, False), boottime_ns(), FIRST)
        assert rig.has_right()
        assert (stamps._stamps.right_end_ns - boottime_ns()) / 1e9 <= 1
        assert all(map(rig.repeats, known))

    scene(body)


def test_an_answer_that_arrives_behind_its_turn_stands_never() -> None:
    async def body(rig: Rig) -> None:
        _, second = rig.shards
        link = rig.link(second)
        await rig.stamps.join(link)
        link.learn = lambda message: message  # it stays on its way
        (late,) = (await link.ask(m.StatNames([A], stamps=True), m.NameResults)).results
        await second.change()
        translated = rig.stamps.learn(m.NameResults([late]), SECOND)
        assert isinstance(translated, m.NameResults)
        assert not rig.equal(translated.results[0].stamps)
        for _ in range(5):
            await second.change()
            assert not rig.equal(translated.results[0].stamps)

    scene(body)


def test_what_a_shard_has_turned_while_it_was_alone_is_known_when_another_begins() -> None:
    async def body(rig: Rig) -> None:
        first, second = rig.shards
        link = rig.link(first)
        await rig.stamps.join(link)
        link.learn = lambda message: message  # it stays on its way
        (late,) = (await link.ask(m.StatNames([A], stamps=True), m.NameResults)).results
        await first.change()
        rig.begin(second)
        await rig.until(lambda: rig.stamps.turns(SECOND))
        translated = rig.stamps.learn(m.NameResults([late]), FIRST)
        assert isinstance(translated, m.NameResults)
        assert not rig.equal(translated.results[0].stamps)

    scene(body, followed=1)


def test_stamps_of_folders_in_answers_are_translated_too() -> None:
    async def body(rig: Rig) -> None:
        _, second = rig.shards
        await rig.stat(second)
        request = m.SetAttributes("bkt", "a", mode=0o600, folders=True)
        (result,) = (await rig.link(second).ask(request, m.NameResults)).results
        assert result.folder is not None
        assert rig.repeats(result.folder.stamps)
        await second.change("b")
        assert not rig.repeats(result.folder.stamps)

    scene(body)


@pytest.mark.parametrize("seed", range(12))
def test_random_shards_heads_and_losses(seed: int) -> None:
    """Whatever is repeated is what the shard has: of that key no later change was answered."""
    choose = random.Random(seed)
    repeated = 0

    async def changing(shard: Shard) -> None:
        while True:
            await trio.sleep(choose.expovariate(2))
            await shard.change(choose.choice("abc"))

    async def losing(shard: Shard) -> None:
        while True:
            await trio.sleep(choose.expovariate(0.3))
            shard.lose()

    async def reading(rig: Rig, shard: Shard) -> None:
        nonlocal repeated
        while True:
            key = choose.choice("abc")
            try:
                result = await rig.look(shard, key)
            except EngineUnreachable:
                rig.links.pop(shard.number)
                continue
            node = 0 if result.stat is None else result.stat.node
            for _ in range(choose.randrange(40)):
                if rig.repeats(result.stamps):
                    repeated += 1
                    assert node >= shard.answered.get(key, 0)
                await trio.sleep(choose.expovariate(20))

    async def body(rig: Rig) -> None:
        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:
                for shard in rig.shards:
                    nursery.start_soon(changing, shard)
                    nursery.start_soon(losing, shard)
                    nursery.start_soon(reading, rig, shard)

    scene(body, count=3)
    assert repeated > 100
