"""The walker ended anywhere, and random histories: nothing is lost, and the next walk makes everything whole.

The model is short: each chunk has a number of shards that may be lost or lie, as many as parity, until it is healed.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.walker.walker import Walker
from lakefs.cluster.members import Standing
from lakefs.errors import EngineUnreachable
from lakefs.ids import ChunkId, MemberId
from lakefs.limits import GRANULE_BYTES
from lakefs.wire import messages as m
from tests.shards import listed, offer
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import EPOCH_OF_WRITERS, PARTITIONS, Lake, member, shards_of

SIZES = (3000, GRANULE_BYTES, 2 * GRANULE_BYTES, 150_000, 300_000)
SEEDS = range(4)
STEPS = 25


async def ended_at(made: Lake, number: int, *, answered: bool) -> bool:
    """Walk, and end the walker at its request of that number: before it, or when it was done.  False: it ended."""
    left = number

    async def count(_: MemberId, __: m.Request) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            scope.cancel()
            await trio.lowlevel.checkpoint()

    hooks = made.after if answered else made.before
    hooks.append(count)
    try:
        with trio.CancelScope() as scope:
            await made.walk(deep=True)
    finally:
        hooks.clear()
    return scope.cancelled_caught


@pytest.mark.parametrize("answered", [True, False])
def test_a_walker_that_ends_at_any_of_its_requests_leaves_what_the_next_makes_whole(answered: bool) -> None:
    async def scenario(made: Lake) -> None:
        one, two, three = await made.write(150_000, 300_000, 3000)
        number, has_ended = 30, False
        while not has_ended:
            await made.take(made.shard(one, 1))
            await made.lie(made.shard(one, 4))
            await made.take(made.shard(two, 0))
            await made.put(made.home(made.shard(two, 5)), made.shard(two, 0))
            await made.put(made.home(made.shard(three, 4)), made.shard(three, 0))
            has_ended = not await ended_at(made, number, answered=answered)
            report = await made.walk(deep=True)
            assert report.is_healed
            await made.check()
            number += 1
        assert number > 25, "it was ended at many"

    on_a_lake(scenario)


class History:
    """Random steps on a lake, and what may be lost of each chunk."""

    def __init__(self, made: Lake, rng: random.Random) -> None:
        self.made = made
        self.rng = rng
        self.spare: dict[ChunkId, set[int]] = {}
        """For each chunk the shards that are lost or lie; two at most."""

    @property
    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        often = [self.write, self.take, self.lie, self.stray] * 2
        return [*often, self.offer, self.generation, self.restart, self.epoch, self.crash, self.outage, self.heal]

    async def run(self) -> None:
        await self.write()
        for _ in range(STEPS):
            await self.rng.choice(self.steps)()
        await self.heal()

    def victim(self) -> tuple[ChunkId, int] | None:
        """Return a shard that may be lost yet."""
        chunk = self.rng.choice(list(self.made.content))
        number = self.rng.choice(shards_of(chunk, self.made.content[chunk])).number
        hurt = self.spare.setdefault(chunk, set())
        if number in hurt or len(hurt) == 2:
            return None
        hurt.add(number)
        return chunk, number

    async def where(self, chunk: ChunkId, number: int) -> list[MemberId]:
        """Return the members that have a shard."""
        return [
            one
            for one, client in self.made.clients.items()
            if any((shard.chunk, shard.number) == (chunk, number) for shard in await listed(client, limit=100))
        ]

    async def write(self) -> None:
        await self.made.write(self.rng.choice(SIZES), generation=max(1, await self.made.state.generation()))

    async def take(self) -> None:
        if (victim := self.victim()) is not None:
            for one in await self.where(*victim):
                await self.made.take(self.made.shard(*victim), one)

    async def lie(self) -> None:
        if (victim := self.victim()) is not None:
            for one in await self.where(*victim):
                await self.made.lie(self.made.shard(*victim), one)

    async def stray(self) -> None:
        chunk = self.rng.choice(list(self.made.content))
        if self.spare.get(chunk):
            return
        shard = self.rng.choice(shards_of(chunk, self.made.content[chunk]))
        await self.made.put(self.rng.choice(list(self.made.clients)), shard)

    async def offer(self) -> None:
        generation = max(1, await self.made.state.generation())
        chunk = self.rng.choice(list(self.made.content))
        for client in self.made.clients.values():
            shards = shards_of(chunk, self.made.content[chunk])
            await offer(client, *shards, generation=generation, epoch=EPOCH_OF_WRITERS)

    async def generation(self) -> None:
        await self.made.advance_generation()

    async def restart(self) -> None:
        one = self.rng.choice(list(self.made.clients))
        await self.made.stop(one)
        await self.made.start(one)

    async def epoch(self) -> None:
        """Let one member of eight drain; the next epoch forgets the tables before if they are too many."""
        drained = self.rng.randrange(8)
        states = [Standing.DRAINING if n == drained else Standing.IN for n in range(8)]
        if len(self.made.whole_tables) > 2:
            await self.heal()
        await self.made.change(*[member(n, state) for n, state in enumerate(states)])

    async def crash(self) -> None:
        await ended_at(self.made, self.rng.randint(1, 120), answered=self.rng.random() < 0.5)

    async def outage(self) -> None:
        """Walk while a member fails now and then."""
        flaky = self.rng.choice(list(self.made.clients))

        async def fail(to: MemberId, _: m.Request) -> None:
            if to == flaky and self.rng.random() < 0.3:
                raise EngineUnreachable("it fails now and then")

        self.made.before.append(fail)
        await self.made.walk(deep=True)
        self.made.before.clear()

    async def heal(self) -> None:
        report = await self.made.walk(*self.made.clients, deep=True)
        assert report.is_healed, report
        await self.made.check()
        self.spare.clear()
        self.made.whole_tables = self.made.whole_tables[:1]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_a_walk_makes_every_stripe_whole(seed: int) -> None:
    async def scenario(made: Lake) -> None:
        await History(made, random.Random(seed)).run()

    on_a_lake(scenario, count=8, seed=seed)


def test_a_writer_that_stores_and_offers_and_a_walker_leave_every_stripe_whole() -> None:
    """Both at once, tasks in many orders; what the writer counted as touched stays so."""

    async def scenario(made: Lake) -> None:
        answered: dict[ChunkId, int] = {}
        stop = False

        async def walk() -> None:
            while not stop:
                for partition in PARTITIONS:
                    await walker.walk([partition])

        walker: Walker = made.walker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(walk)
            await write_and_offer(made, answered)
            stop = True
        assert (await made.walk()).is_healed
        await made.check()
        for chunk, generation in answered.items():
            for shard in shards_of(chunk, made.content[chunk]):
                touched = await listed(made.clients[made.home(shard)], limit=1000)
                (found,) = [g for s, g in touched.items() if (s.chunk, s.number) == (chunk, shard.number)]
                assert found >= generation

    on_a_lake(scenario)


async def write_and_offer(made: Lake, answered: dict[ChunkId, int]) -> None:
    """Store chunks, offer them again, and leave some shards elsewhere; note the generations that were answered."""
    rng = random.Random(3)
    for _ in range(30):
        generation = max(1, await made.state.generation())
        if answered and rng.random() < 0.5:
            chunk = rng.choice(list(answered))
            if not await present(made, chunk, generation):
                continue
        else:
            (chunk,) = await made.write(rng.choice(SIZES), generation=generation)
        answered[chunk] = generation
        if rng.random() < 0.3:
            shard = rng.choice(shards_of(chunk, made.content[chunk]))
            await made.put(rng.choice(list(made.clients)), shard, generation)
        if rng.random() < 0.2:
            await made.advance_generation()


async def present(made: Lake, chunk: ChunkId, generation: int) -> bool:
    """Offer a chunk as a head does: it counts as present when every home has its shard."""
    for shard in shards_of(chunk, made.content[chunk]):
        client = made.clients[made.home(shard)]
        if await offer(client, shard, generation=generation, epoch=EPOCH_OF_WRITERS) != [len(shard.payload)]:
            return False
    return True
