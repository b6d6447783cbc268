"""Keyed blobs on every driver and connection: match, load, get, put, remove, pin, and what a bad batch is answered."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from lakefs.client.blocking.lake import Lake
from lakefs.client.blocking.spaces import Space
from lakefs.client.trio.spaces import TrioSpace
from lakefs.errors import ChunkNotFound, InvalidArgument, RequestTooLarge, SpaceNotFound
from lakefs.get.keyed import MISS
from lakefs.get.pools import Pool
from lakefs.ids import data_chunk_id
from lakefs.lake.spaces import SpaceSteps
from lakefs.limits import BODY_BYTES_MAX, CHUNK_BYTES, KEYED_QUOTA_BYTES_MIN, KIB, MIB
from lakefs.put.keyed import KeyedResult, Outcome
from lakefs.put.shared_memory import SharedMemory, Slot
from lakefs.steps.steps import send
from lakefs.wire import messages as m
from tests.contract.engines import KEYED, KINDS, Kind, every
from tests.contract.test_lake import Driven, run
from tests.contract.test_lake_pools import pool_of

SIZES = (1, 4000, 64 * KIB - 1, 64 * KIB, 300_000, CHUNK_BYTES, CHUNK_BYTES + 1)


@pytest.fixture(params=every(KEYED))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest() + number.to_bytes(4, "big")


def value_of(size: int, seed: int = 0) -> bytes:
    return random.Random(size * 1000 + seed).randbytes(size)


class Asker:
    """A space, asked by steps, so that the requests are counted."""

    def __init__(self, lake: Driven, number: int) -> None:
        self.lake = lake
        self.number = number

    @property
    def steps(self) -> SpaceSteps:
        return SpaceSteps(self.lake.steps, self.number)

    async def put(
        self, keys: Sequence[bytes], values: Sequence[bytes | Slot], *, depths: Sequence[int] = (), resize: bool = False
    ) -> KeyedResult:
        return await self.lake.run(self.steps.put_many(keys, values, depths=depths, resize=resize))

    async def load(
        self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
    ) -> list[int]:
        return await self.lake.run(self.steps.load(keys, pool, offsets, rooms))

    async def get(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        buffers = [bytearray(size) for size in sizes]
        lengths = await self.lake.run(self.steps.get_many_into(keys, buffers))
        return [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]

    async def present(self, keys: Sequence[bytes]) -> list[bool]:
        return (await self.lake.run(self.steps.match(keys))).present


Body = Callable[[Asker], Awaitable[None]]


def keyed(kind: Kind, body: Body) -> None:
    """Run `body` with a new space."""

    async def with_space(lake: Driven) -> None:
        stat = await lake.run(lake.steps.open_space("llama/tp2", quota="10G"))
        await body(Asker(lake, stat.number))

    run(kind, with_space)


def test_values_of_every_length_are_matched_loaded_and_read(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        keys = [key_of(number) for number in range(len(SIZES))]
        values = [value_of(size) for size in SIZES]
        result = await space.put(keys, values)
        assert result.outcomes == [Outcome.STORED] * len(keys)
        matched = await space.lake.run(space.steps.match([*keys[:3], b"absent", *keys[3:]]))
        assert matched == (3, [True] * 3 + [False] + [True] * (len(keys) - 3))
        assert await space.get(keys, SIZES) == values
        async with pool_of(space.lake, 40 * MIB) as pool:
            offsets = [number * 5 * MIB for number in range(len(SIZES))]
            for rooms in ((), SIZES):
                assert await space.load(keys, pool, offsets, rooms) == list(SIZES)
                for offset, value in zip(offsets, values, strict=True):
                    assert pool.buffer[offset : offset + len(value)] == value

    keyed(kind, body)


def test_a_miss_is_a_miss_and_the_other_keys_are_read(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        small, large = value_of(5000), value_of(70_000)
        await space.put([b"small", b"large"], [small, large])
        assert await space.get([b"none", b"small", b"large"], [9, 5000, 69_999]) == [b"", small, b""]
        async with pool_of(space.lake, MIB) as pool:
            lengths = await space.load([b"large", b"small", b"none"], pool, [100_000, 0, 300_000], [69_999, 5000, 10])
            assert lengths == [MISS, 5000, MISS]
            assert pool.buffer[:5000] == small
            assert await space.load([b"large", b"small"], pool, [0, 69_999]) == [MISS, 5000]  # up to the next slot

    keyed(kind, body)


def test_values_are_written_once(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        first = value_of(100_000)
        await space.put([b"a"], [first])
        again = await space.put([b"a", b"b"], [value_of(100_000, 1), first])
        assert again.outcomes == [Outcome.PRESENT, Outcome.STORED]
        assert await space.get([b"a", b"b"], [100_000] * 2) == [first, first]

    keyed(kind, body)


@pytest.mark.parametrize("size", [1000, 300_000, CHUNK_BYTES + 1, BODY_BYTES_MAX + 1])
def test_a_value_of_another_length_is_no_match_and_a_put_that_resizes_replaces_it(kind: Kind, size: int) -> None:
    async def body(space: Asker) -> None:
        async def matched(*sizes: int) -> list[bool]:
            return (await space.lake.run(space.steps.match([b"a", b"b", b"none"], sizes))).present

        first, other = value_of(size), value_of(size + 1)
        await space.put([b"a", b"b"], [first, other])
        assert await matched(size, size, size) == [True, False, False]
        assert await matched(0, size + 1, 0) == [True, True, False], "0 is any length"
        assert await matched() == [True, True, False]
        again = await space.put([b"a", b"b"], [value_of(size, 7), first], resize=True)
        assert again.outcomes == [Outcome.PRESENT, Outcome.STORED]
        assert await matched(size, size, size) == [True, True, False]
        assert await space.get([b"a", b"b"], [size] * 2) == [first, first]
        with pytest.raises(InvalidArgument, match="do not go together"):
            await matched(size)

    keyed(kind, body)


def test_a_slot_of_shared_memory_resizes_too(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        memory = await trio.to_thread.run_sync(SharedMemory, MIB)
        try:
            memory.buffer[:100_000] = value_of(100_000)
            await space.put([b"a"], [b"short"])
            assert (await space.put([b"a"], [memory.slot(0, 100_000)])).outcomes == [Outcome.PRESENT]
            for outcome in (Outcome.STORED, Outcome.PRESENT):
                assert (await space.put([b"a"], [memory.slot(0, 100_000)], resize=True)).outcomes == [outcome]
            assert await space.get([b"a"], [100_000]) == [value_of(100_000)]
        finally:
            await space.lake.run(space.lake.steps.return_memory(memory))
            memory.close()

    keyed(kind, body)


def test_present_keys_are_not_sent_again(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        keys, values = [key_of(n) for n in range(16)], [value_of(64 * KIB, n) for n in range(16)]
        await space.put(keys, values)
        space.lake.asked.clear()
        assert (await space.put(keys, values)).count(Outcome.PRESENT) == 16
        assert [type(request) for request in space.lake.asked] == [m.KeyedMatch]

    keyed(kind, body)


def test_removed_values_are_gone_and_may_be_put_anew(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        await space.put([b"a", b"b"], [b"one", b"two"])
        assert await space.lake.run(space.steps.remove([b"a", b"none"])) == [True, False]
        assert await space.present([b"a", b"b"]) == [False, True]
        assert (await space.put([b"a"], [b"three"])).outcomes == [Outcome.STORED]
        assert await space.get([b"a"], [10]) == [b"three"]

    keyed(kind, body)


def test_slots_of_shared_memory_and_a_value_longer_than_a_request(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        long = value_of(BODY_BYTES_MAX + 70_001)
        memory = await trio.to_thread.run_sync(SharedMemory, 24 * MIB)
        try:
            memory.buffer[: len(long)] = long
            slots = [memory.slot(0, 100_000), memory.slot(0, len(long))]
            result = await space.put([b"slot", b"long"], slots, depths=[0, 7])
            assert result.outcomes == [Outcome.STORED] * 2, result.failures
            assert (await space.put([b"long"], [long])).outcomes == [Outcome.PRESENT]
            assert (await space.put([b"plain"], [long])).outcomes == [Outcome.STORED]
            read = await space.get([b"slot", b"long", b"plain"], [100_000, len(long), len(long)])
            assert read == [long[:100_000], long, long]
            async with pool_of(space.lake) as pool:
                assert await space.load([b"long"], pool, [3]) == [len(long)]
                assert pool.buffer[3 : 3 + len(long)] == long
        finally:
            await space.lake.run(space.lake.steps.return_memory(memory))
            memory.close()

    keyed(kind, body)


def test_a_long_value_that_fails_ends_its_session_and_stops_no_other(kind: Kind) -> None:
    kind.need_one_home()

    async def body(space: Asker) -> None:
        await space.lake.run(space.lake.steps.open_space("llama/tp2", quota=KEYED_QUOTA_BYTES_MIN))
        long, longest = value_of(BODY_BYTES_MAX + 1), bytes(KEYED_QUOTA_BYTES_MIN + 1)
        space.lake.asked.clear()
        result = await space.put([b"longest", b"long"], [longest, long])
        assert result.outcomes == [Outcome.FAILED, Outcome.STORED]
        assert isinstance(result.failures[0], RequestTooLarge)
        assert space.lake.count(m.SessionOpen) == 2
        reply = (await space.lake.run(send(m.Status()))).message
        assert isinstance(reply, m.StatusReply)
        assert json.loads(reply.status_json)["clients"]["sessions"] == 0

    keyed(kind, body)


@pytest.mark.parametrize("keys", [[b""], [b"x" * 65], [b"a", b"b", b"a"], ["text"], [None]])
def test_bad_keys_are_refused_before_a_request(keys: list[bytes]) -> None:
    async def body(space: Asker) -> None:
        space.lake.asked.clear()
        steps = space.steps
        async with pool_of(space.lake, MIB) as pool:
            for bad in (
                lambda: steps.match(keys),
                lambda: steps.remove(keys),
                lambda: steps.pin(keys),
                lambda: steps.put_many(keys, [b"v"] * len(keys)),
                lambda: steps.get_many_into(keys, [bytearray(1) for _ in keys]),
                lambda: steps.load(keys, pool, list(range(len(keys)))),
            ):
                with pytest.raises(InvalidArgument):
                    await space.lake.run(bad())
        assert space.lake.asked == []

    keyed(next(iter(KINDS.values())), body)


@pytest.mark.parametrize(
    ("offsets", "rooms"), [([0, 0], ()), ([0, 5], (10, 10)), ([0, MIB], ()), ([-1, 5], ()), ([0], ()), ([0, 9], (9,))]
)
def test_slots_that_overlap_or_lie_outside_are_refused(offsets: list[int], rooms: tuple[int, ...]) -> None:
    async def body(space: Asker) -> None:
        await space.put([b"a", b"b"], [b"12345678", b"12345678"])
        space.lake.asked.clear()
        async with pool_of(space.lake, MIB) as pool:
            with pytest.raises(InvalidArgument):
                await space.load([b"a", b"b"], pool, offsets, rooms)
        assert space.lake.asked == []

    keyed(next(iter(KINDS.values())), body)


def test_values_without_a_byte_and_bad_depths_are_refused(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        for values, depths in (([b""], ()), ([b"v"], [65_536]), ([b"v"], [-1]), ([b"v"], [1, 2]), ([], ())):
            with pytest.raises(InvalidArgument):
                await space.put([b"a"], values, depths=depths)
        assert await space.present([b"a"]) == [False]

    keyed(kind, body)


def parts_of(value: bytes) -> list[bytes]:
    """Return the parts of a value, each of which is a chunk."""
    return [value[at : at + CHUNK_BYTES] for at in range(0, len(value), CHUNK_BYTES)]


async def chunks_that_exist(space: Asker, parts: Sequence[bytes]) -> list[bool]:
    """Return for each part if its chunk can be read, after a cycle of gc; its bytes are compared."""
    for keeper in await space.lake.engine.keepers():
        await keeper.call(m.RunGc())
    found: list[bool] = []
    for part in parts:
        try:
            assert await space.lake.run(space.lake.steps.get_chunks([data_chunk_id(part)])) == [part]
            found.append(True)
        except ChunkNotFound:
            found.append(False)
    return found


def test_a_pin_keeps_the_bytes_of_removed_values_until_it_ends_and_no_others(kind: Kind) -> None:
    kind.need_what_is_freed_to_be_gone()

    async def body(space: Asker) -> None:
        pinned_value, other_value = value_of(CHUNK_BYTES + 70_000), value_of(200_000)
        parts = [*parts_of(pinned_value), *parts_of(other_value)]
        await space.put([b"a", b"b"], [pinned_value, other_value])
        pinned = await space.lake.run(space.steps.pin([b"none", b"a"]))
        assert pinned.present == [False, True]
        again = await space.lake.run(space.steps.pin([b"a"]))
        assert again.present == [True]
        await space.lake.run(space.steps.remove([b"a", b"b"]))
        assert await chunks_that_exist(space, parts) == [True, True, False]
        await space.lake.run(space.steps.unpin(pinned))
        assert not pinned.leases
        await space.lake.run(space.steps.unpin(pinned))  # the second time it does nothing, also not to other pins
        assert await space.present([b"a"]) == [False]
        assert await chunks_that_exist(space, parts) == [True, True, False], "the second pin was given back too"
        await space.lake.run(space.steps.unpin(again))
        assert await chunks_that_exist(space, parts) == [False, False, False]

    keyed(kind, body)


def test_a_pin_of_nothing_keeps_nothing(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        value = value_of(100_000)
        await space.put([b"a"], [value])
        pinned = await space.lake.run(space.steps.pin([b"none"]))
        assert (pinned.present, pinned.leases) == ([False], [])
        await space.lake.run(space.steps.remove([b"a"]))
        assert await chunks_that_exist(space, [value]) == [False]
        await space.lake.run(space.steps.unpin(pinned))

    keyed(kind, body)


def test_a_space_that_is_gone_says_so(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        await space.put([b"a"], [b"v"])
        await space.lake.run(space.lake.steps.remove_space("llama/tp2"))
        with pytest.raises(SpaceNotFound):
            await space.present([b"a"])
        with pytest.raises(SpaceNotFound):
            await space.put([b"a"], [b"v"])
        with pytest.raises(SpaceNotFound):
            await space.lake.run(space.lake.steps.open_space("llama/tp2", create=False))

    keyed(kind, body)


def test_a_space_has_its_settings_and_its_usage(kind: Kind) -> None:
    async def body(space: Asker) -> None:
        await space.put([b"a", b"b"], [value_of(1000), value_of(2000)])
        steps = space.lake.steps
        (stat,) = await space.lake.run(steps.spaces())
        assert (stat.name, stat.quota_bytes, stat.entries, stat.value_bytes) == ("llama/tp2", 10 << 30, 2, 3000)
        changed = await space.lake.run(steps.open_space("llama/tp2", quota=0, ttl="7d"))
        assert (changed.number, changed.quota_bytes, changed.ttl_s) == (space.number, 0, 7 * 86_400)

        short = await space.lake.run(steps.open_space("llama/tp2", ttl=0.5))
        assert short.ttl_s == 1, "0 would mean for ever"
        for quota, ttl in ((None, math.inf), (None, math.nan), (None, 1e300), (None, -1), (1 << 70, None), (-1, None)):
            with pytest.raises(InvalidArgument, match="of a space is 0, for none"):
                await space.lake.run(steps.open_space("llama/tp2", quota=quota, ttl=ttl))
        assert await space.lake.run(steps.open_space("llama/tp2")) == short

    keyed(kind, body)


def test_the_methods_of_both_clients(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        value, buffer = value_of(70_000), bytearray(80_000)
        if isinstance(lake.lake, Lake):
            blocking = lake.lake

            def use() -> tuple[object, ...]:
                space: Space = blocking.space("s")
                space.put_many([b"k"], [value])
                found = space.get_many_into([b"k", b"none"], [buffer, bytearray(1)])
                return (
                    space.match([b"k"]).prefix,
                    found,
                    space.get_many_into([b"k"], [bytearray(3)]),
                    space.remove([b"k"]),
                )

            seen = await trio.to_thread.run_sync(use)
        else:
            space: TrioSpace = await lake.lake.space("s")
            await space.put_many([b"k"], [value])
            found = await space.get_many_into([b"k", b"none"], [buffer, bytearray(1)])
            short = await space.get_many_into([b"k"], [bytearray(3)])
            seen = (await space.match([b"k"])).prefix, found, short, await space.remove([b"k"])
        assert seen == (1, [70_000, MISS], [MISS], [True])
        assert buffer[:70_000] == value

    run(kind, body)
