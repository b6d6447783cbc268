"""Requests about shards: each is done as its message says, refused when it cannot be, and refused by other engines."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from msgspec import structs

from lakefs.content.verify import granule_crcs
from lakefs.errors import (
    AlreadyExists,
    ChunkNotFound,
    EngineBusy,
    InvalidArgument,
    LakeError,
    PermissionDenied,
    PreconditionFailed,
    RequestTooLarge,
    SessionLost,
    StaleEpoch,
)
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import KINDS, MEMBERS, Engine, Kind
from tests.shards import (
    ALL_PARTITIONS,
    WALK,
    Shard,
    chunk_at,
    collect,
    drop,
    listed,
    names_of,
    offer,
    read,
    set_epoch,
    store,
    store_request,
)
from tests.store_rig import ask, fsck, gc, put, read as read_whole, session_of, store_chunks

SIZES = (1, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 700_000, 2 * MIB)
_generator = random.Random(3)
SHARDS = [Shard(chunk_at(300 * index), index, _generator.randbytes(size)) for index, size in enumerate(SIZES)]
SMALL, LONG = SHARDS[1], SHARDS[5]


async def known_epoch(client: EngineClient, epoch: int = 0, table: bytes = b"") -> tuple[int, bytes]:
    """Bring a table; return the epoch and the table that the member has."""
    known = await set_epoch(client, epoch, table)
    return known.epoch, known.table


@pytest.fixture(params=MEMBERS)
def member(request: pytest.FixtureRequest) -> Kind:
    """Each way to ask a member."""
    return MEMBERS[request.param]


def test_shards_are_stored_once_and_read_back_whole_and_in_ranges(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        assert await store(client, *SHARDS) == [True] * len(SHARDS)
        assert await store(client, SMALL, SHARDS[0], generation=2) == [False, False]
        assert await read(client, *SHARDS) == [shard.payload for shard in SHARDS]
        assert await read(client, LONG, ranges=[(70_000, 10)]) == [LONG.payload[65536:131_072]]
        assert (await fsck(client))["findings"] == []

    member.run(main)


def test_the_shards_of_a_chunk_and_the_chunk_itself_do_not_meet(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        whole = os.urandom(100_000)
        chunk = ChunkId(data_chunk_id(whole))
        parts = [Shard(chunk, number, bytes((number,)) * 70_000) for number in (0, 1, 254)]
        await store(client, *parts)
        with pytest.raises(ChunkNotFound):
            await read_whole(client, chunk)
        session = await session_of(client)
        assert (await ask(client, m.Offer(session, [chunk]), m.Offered)).present == [False]
        await store_chunks(client, session, [whole])
        assert await read_whole(client, chunk) == whole
        assert await read(client, Shard(chunk, 255, b""), *parts) == [whole, *(part.payload for part in parts)]

    member.run(main)


def test_an_offer_tells_what_is_present(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        await store(engine.client, SMALL, LONG)
        neighbour = Shard(SMALL.chunk, SMALL.number + 1, b"")
        assert await offer(engine.client, LONG, neighbour, SMALL) == [len(LONG.payload), 0, len(SMALL.payload)]

    member.run(main)


def test_checksums_that_differ_are_refused_and_nothing_is_stored(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        request = store_request([SMALL, LONG])
        lying = bytearray(request.crcs[1])
        lying[-1] ^= 1
        for crcs in (bytes(lying), b"", request.crcs[1][:-4], request.crcs[1] + b"\0\0\0\0"):
            wrong = structs.replace(request, crcs=[request.crcs[0], crcs])
            with pytest.raises(InvalidArgument, match="do not match the checksums"):
                await engine.client.call(wrong, [SMALL.payload, LONG.payload])
        assert await offer(engine.client, SMALL, LONG) == [0, 0]

    member.run(main)


def test_a_present_shard_is_not_replaced_by_other_bytes(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        await store(engine.client, LONG)
        for other in (LONG.with_payload(LONG.payload[:-1]), LONG.with_payload(bytes(len(LONG.payload)))):
            with pytest.raises(AlreadyExists):
                await store(engine.client, SMALL, other)
        assert await offer(engine.client, SMALL) == [0]
        assert await read(engine.client, LONG) == [LONG.payload]

    member.run(main)


def test_the_length_of_its_chunk_is_said_wherever_a_shard_is_named(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        first, last = replace(LONG, chunk_bytes=4 * MIB), Shard(LONG.chunk, LONG.number + 1, b"last", 4 * MIB)
        absent = Shard(LONG.chunk, 9, b"")
        await store(client, SMALL, first, last)
        lengths = [len(SMALL.payload), 4 * MIB, 4 * MIB, 0]
        names = names_of([SMALL, first, last, absent])
        assert (await ask(client, m.OfferShards(0, 1, *names), m.ShardsOffered)).chunk_lengths == lengths
        assert (await ask(client, m.ListShards(), m.ShardsListed)).chunk_lengths == lengths[:3]
        for begin, size in ((0, 0), (4 * MIB, 1)):  # what is not in the shard, too
            reply = await client.call(m.ReadChunks(names[0], [begin] * 4, [size] * 4, names[1]))
            reply.body.release()
            assert isinstance(reply.message, m.ReadChunksReply)
            assert reply.message.chunk_lengths == lengths
            assert [piece.failure is None for piece in reply.message.pieces] == [not begin] * 3 + [False]
        assert await read(client, SMALL, first, last) == [SMALL.payload, LONG.payload, b"last"]
        assert (await fsck(client))["findings"] == []

    member.run(main)


def test_a_shard_is_not_stored_again_with_another_length_of_its_chunk(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        await store(engine.client, replace(LONG, chunk_bytes=MIB))
        with pytest.raises(AlreadyExists, match="another length of its chunk"):
            await store(engine.client, SMALL, replace(LONG, chunk_bytes=MIB + 1))
        assert await offer(engine.client, SMALL) == [0]
        assert await store(engine.client, replace(LONG, chunk_bytes=MIB)) == [False]

    member.run(main)


def test_a_shard_that_no_chunk_of_that_length_has_is_refused(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        size = len(LONG.payload)
        for shard, length in ((LONG, size - 1), (LONG, 4 * MIB + 1), (LONG, -1), (SMALL, 64 * KIB), (SMALL, 0)):
            wrong = structs.replace(store_request([shard]), chunk_lengths=[length])
            with pytest.raises(InvalidArgument, match="no chunk of"):
                await engine.client.call(wrong, [shard.payload])
        for lengths in ([], [size, size]):
            with pytest.raises(InvalidArgument, match="go together"):
                await engine.client.call(structs.replace(store_request([LONG]), chunk_lengths=lengths), [LONG.payload])
        assert await store(engine.client, replace(SMALL, chunk_bytes=64 * KIB + 1)) == [True]

    member.run(main)


def test_shards_are_taken_from_lent_memory() -> None:
    async def main(engine: Engine) -> None:
        descriptor = os.memfd_create("shards")
        try:
            os.ftruncate(descriptor, MIB)
            os.pwrite(descriptor, SMALL.payload, 4096)
            os.pwrite(descriptor, LONG.payload, 65_536)
            lent = (await engine.client.call(m.LendMemory(MIB), (), [descriptor])).message
        finally:
            os.close(descriptor)
        assert isinstance(lent, m.MemoryLent)
        plain = store_request([SMALL, LONG])
        request = structs.replace(plain, memory=lent.memory, offsets=[4096, 65_536])
        with pytest.raises(SessionLost):
            await engine.client.call(structs.replace(request, memory=lent.memory + 1))
        with pytest.raises(InvalidArgument):
            await engine.client.call(structs.replace(request, offsets=[4096, 65_535]))
        assert (await ask(engine.client, request, m.ShardsStored)).fresh == [True, True]
        assert await read(engine.client, SMALL, LONG) == [SMALL.payload, LONG.payload]

    MEMBERS["unix"].run(main)


def test_lists_are_in_order_and_of_a_range_of_digests(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        shards = [
            Shard(chunk_at(partition, kind), number, b"%d" % partition)
            for kind in (1, 2)
            for partition in (0, 1, 15, 16, 4095)
            for number in (0, 3)
        ]
        mixed = shards[::]
        random.Random(1).shuffle(mixed)
        await store(client, *mixed, generation=4)
        await put(client, "whole", b"no shard")
        names = [(shard.chunk, shard.number) for shard in shards]
        for limit in (1, 3, 100):
            found = await listed(client, limit=limit)
            assert [(shard.chunk, shard.number) for shard in found] == names
            assert set(found.values()) == {4}
        for begin, end in ((b"\x00\x10", b"\x00\xf0"), (b"", b"\x00\x10"), (b"\x00\xf0", b""), (b"\x01", b"\x01")):
            found = await listed(client, begin, end)
            assert [(shard.chunk, shard.number) for shard in found] == [
                (chunk, number) for chunk, number in names if chunk[1:] >= begin and (not end or chunk[1:] < end)
            ]
        page = await ask(client, m.ListShards(limit=1), m.ShardsListed)
        assert page.lengths == [1]
        assert page.crcs == [int.from_bytes(granule_crcs(b"0"), "little")]

    member.run(main)


def test_a_shard_is_dropped_unless_it_was_touched_later_than_its_copy(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        await store(client, SMALL, LONG, generation=5)
        await offer(client, LONG, generation=6)
        assert await drop(client, SMALL, LONG, SHARDS[2], touched=5) == [0, 6, 0]
        assert await offer(client, SMALL, LONG) == [0, len(LONG.payload)]
        assert await drop(client, LONG, touched=6) == [0]
        assert await listed(client) == {}
        with pytest.raises(ChunkNotFound):
            await read(client, LONG)
        assert (await fsck(client))["findings"] == []

    member.run(main)


def test_an_older_epoch_is_refused_and_a_newer_one_is_not_learnt(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        assert await known_epoch(client) == (0, b"")
        assert await known_epoch(client, 7, b"table 7") == (7, b"table 7")
        assert await known_epoch(client, 6, b"table 6") == (7, b"table 7")
        with pytest.raises(InvalidArgument):
            await set_epoch(client, 7, b"another")
        await store(client, SMALL, epoch=9)
        assert (await set_epoch(client)).epoch == 7
        brief = await ask(client, m.SetEpoch(0, without_table=True), m.EpochKnown)
        assert (brief.epoch, brief.table) == (7, b"")
        for refused in (store, offer):
            with pytest.raises(StaleEpoch, match="7") as raised:
                await refused(client, LONG, epoch=6)
            assert raised.value.subject == "7"
        with pytest.raises(StaleEpoch):
            await drop(client, SMALL, touched=9, epoch=6)
        assert await offer(client, SMALL, LONG, epoch=7) == [len(SMALL.payload), 0]

    member.run(main)


def test_a_member_says_how_its_store_was_opened_and_what_is_durable(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        first = await set_epoch(engine.client)
        assert len(first.opening) == 16
        assert first.recovered == 0
        await store(engine.client, SMALL)
        then = await set_epoch(engine.client)
        assert (then.opening, then.recovered) == (first.opening, 0)
        assert then.durable > first.durable

    member.run(main)


def test_a_cycle_of_gc_frees_what_is_neither_marked_nor_touched(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        marked, touched, dead = SHARDS[0], SHARDS[3], [SHARDS[1], SHARDS[5]]
        sibling = Shard(marked.chunk, 9, b"another shard of the marked chunk")
        await store(client, *SHARDS[:6], sibling, generation=1)
        await offer(client, touched, SHARDS[2], generation=2)
        await put(client, "whole", b"the member's own")
        swept = await collect(client, 3, [marked.chunk, SHARDS[4].chunk])
        assert (swept.freed_shards, swept.kept_because) == (2, "")
        left = [marked, SHARDS[2], touched, SHARDS[4], sibling]
        assert await read(client, *left) == [shard.payload for shard in left]
        assert await offer(client, *dead, generation=3) == [0, 0]
        assert (await gc(client))["freed_chunks"] == 0
        assert await read(client, *left) == [shard.payload for shard in left]
        assert (await fsck(client))["findings"] == []

    member.run(main)


def test_a_cycle_without_all_its_marks_frees_nothing(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        await store(client, SMALL, generation=1)
        await ask(client, m.GcBegin(5, WALK), m.Done)
        for _ in range(2):  # one that is repeated is counted once
            await ask(client, m.GcMark(WALK, 0, []), m.Done)
        swept = await ask(client, m.GcSweep(WALK, 2, ALL_PARTITIONS), m.ShardsSwept)
        assert (swept.freed_shards, swept.kept_because) == (0, "1 of 2 batches of marks were received")
        with pytest.raises(PreconditionFailed):
            await ask(client, m.GcSweep(WALK, 1, ALL_PARTITIONS), m.ShardsSwept)
        await ask(client, m.GcBegin(6, WALK), m.Done)
        await ask(client, m.GcBegin(6, b"another walk    "), m.Done)
        with pytest.raises(PreconditionFailed):
            await ask(client, m.GcMark(WALK, 0, []), m.Done)
        with pytest.raises(InvalidArgument):
            await ask(client, m.GcBegin(5, WALK), m.Done)
        assert await offer(client, SMALL) == [len(SMALL.payload)]

    member.run(main)


def test_gc_frees_nothing_outside_the_partitions_of_which_the_member_is_a_home(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        client = engine.client
        here, there = Shard(chunk_at(17), 0, b"here"), Shard(chunk_at(18), 0, b"there")
        await store(client, here, there, generation=1)
        homes = bytearray(512)
        homes[17 >> 3] |= 1 << (17 & 7)
        assert (await collect(client, 3, homes=bytes(homes))).freed_shards == 1
        assert await offer(client, here, there) == [0, 5]

    member.run(main)


ODD: list[tuple[m.Request, type[LakeError]]] = [
    (m.StoreShards(0, 1, [SMALL.chunk], [255], [1], [b"crcs"], chunk_lengths=[1]), InvalidArgument),
    (m.StoreShards(0, 1, [SMALL.chunk], [-1], [1], [b"crcs"], chunk_lengths=[1]), InvalidArgument),
    (m.StoreShards(0, 1, [SMALL.chunk], [1], [1], [], chunk_lengths=[1]), InvalidArgument),
    (m.StoreShards(0, 1, [SMALL.chunk], [1], [1], [b"crcs"]), InvalidArgument),
    (m.StoreShards(0, 1, [SMALL.chunk], [1], [0], [b""], 1, [0], [1]), InvalidArgument),
    (m.StoreShards(0, 1, [SMALL.chunk], [1], [1], [b"crcs"], 1, [0], [1 << 40]), InvalidArgument),
    (m.StoreShards(0, 1, [SMALL.chunk] * 2, [1] * 2, [1] * 2, [b""] * 2, chunk_lengths=[1] * 2), InvalidArgument),
    (m.StoreShards(0, 0, [SMALL.chunk], [1], [1], [b"crcs"], chunk_lengths=[1]), InvalidArgument),
    (m.StoreShards(-1, 1, [SMALL.chunk], [1], [1], [b"crcs"], chunk_lengths=[1]), InvalidArgument),
    (m.OfferShards(0, 1, [b"no id"], [1]), InvalidArgument),
    (m.OfferShards(0, 1, [SMALL.chunk], [1, 2]), InvalidArgument),
    (m.OfferShards(0, 1, [SMALL.chunk] * 4097, [1] * 4097), RequestTooLarge),
    (m.OfferShards(0, m.TOUCHED_UNKNOWN, [SMALL.chunk], [1]), InvalidArgument),
    (m.ListShards(limit=0), InvalidArgument),
    (m.ListShards(begin=bytes(33)), InvalidArgument),
    (m.ListShards(after=b"x" * 600), InvalidArgument),
    (m.DropShards(0, [SMALL.chunk], [1], []), InvalidArgument),
    (m.DropShards(0, [SMALL.chunk], [1], [0]), InvalidArgument),
    (m.SetEpoch(-1), InvalidArgument),
    (m.SetEpoch(1, b"", -1), InvalidArgument),
    (m.SetEpoch(1, bytes(m.EPOCH_TABLE_BYTES_MAX + 1)), RequestTooLarge),
    (m.GcBegin(1, b"short"), InvalidArgument),
    (m.GcBegin(0, WALK), InvalidArgument),
    (m.GcMark(WALK, -1, []), InvalidArgument),
    (m.GcMark(WALK, 0, []), PreconditionFailed),
    (m.GcSweep(WALK, 0, ALL_PARTITIONS), PreconditionFailed),
    (m.GcSweep(WALK, 0, bytes(3)), InvalidArgument),
    (m.GcSweep(WALK, 0, b""), InvalidArgument),
    (m.ReadChunks([SMALL.chunk], [0], [0], [256]), InvalidArgument),
    (m.ReadChunks([SMALL.chunk], [0], [0], [1, 2]), InvalidArgument),
]


def test_odd_arguments_are_refused(member: Kind) -> None:
    async def main(engine: Engine) -> None:
        for request, error in ODD:
            with pytest.raises(error):
                await engine.client.call(request)
        for offset, length in ((len(SMALL.payload), 0), (-1, 5), (0, len(SMALL.payload) + 1)):
            await store(engine.client, SMALL)
            with pytest.raises(InvalidArgument, match="outside"):
                await read(engine.client, SMALL, ranges=[(offset, length)])
        with pytest.raises(InvalidArgument):
            await engine.client.call(store_request([SMALL]), [SMALL.payload + b"more"])

    member.run(main)


@pytest.mark.parametrize("name", ["simulated", "unix"])
def test_an_engine_that_is_no_member_refuses_every_request_about_shards(name: str) -> None:
    async def main(engine: Engine) -> None:
        requests: list[m.Request] = [shape for shape, _ in ODD]
        requests += [m.ReadChunks([SMALL.chunk], [0], [0], [0]), m.SetEpoch(0), m.ListShards()]
        for request in requests:
            with pytest.raises(PermissionDenied):
                await engine.client.call(request)
        with pytest.raises(PermissionDenied):
            await store(engine.client, SMALL)

    KINDS[name].run(main)


def test_a_sweep_that_is_under_way_is_not_begun_twice() -> None:
    async def main(engine: Engine) -> None:
        assert engine.store is not None
        assert engine.store.member is not None
        collector = engine.store.member.collector
        collector.begin(3, WALK)
        cycle = collector._cycle
        assert cycle is not None
        cycle.is_swept = True
        with pytest.raises(EngineBusy):
            await collector.sweep(WALK, 0, ALL_PARTITIONS)

    MEMBERS["simulated"].run(main)
