"""Shards that members on this machine read to where a chunk is put together: over real sockets, past which bytes go."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from engine.members.lent_area import LentArea
from engine.members.lent_payload import _LentRead
from engine.members.ports import Got, Wanted
from engine.members.read_memory import ReadMemory
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.walker.walker_calls import ReadShard, ShardCalls
from engine.walker.walker_compare import Copy
from lakefs.content.verify import granule_crcs
from lakefs.errors import EngineUnreachable, InvalidArgument, LakeError, SessionLost
from lakefs.ids import ChunkId, MemberId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.contract.test_requests_chunks import refused
from tests.shards import Shard, drop, store
from tests.store_rig import ask, run, simulated_store
from tests.unit.engine.cluster.stripe_rig import LAKE, payload_of
from tests.unit.engine.cluster.test_lent_payload import GENERATION, Lake, lake

PAYLOAD = payload_of(CHUNK_BYTES)


@asynccontextmanager
async def stored(folder: Path, *payloads: bytes) -> AsyncIterator[Lake]:
    """A lake at 2+1 with chunks."""
    async with lake(folder, reads=ReadMemory(), protection="2+1") as made:
        await made.stripes.store(GENERATION, [made.in_area(payload) for payload in payloads])
        yield made


async def read(made: Lake, payload: bytes, offset: int = 0, length: int = 0) -> Got:
    [got] = await made.stripes.read([Wanted(data_chunk_id(payload), len(payload), offset, length)])
    assert isinstance(got, Got), got
    assert granule_crcs(got.payload) == got.crcs
    end = offset + length if length else len(payload)
    assert bytes(got.payload) == payload[got.offset : got.offset + len(got.payload)]
    assert got.offset <= offset < end <= got.offset + len(got.payload)
    return got


def sent_bytes(made: Lake) -> int:
    """Return the bytes that members have sent through their sockets since the last call."""
    total = sum(sum(member.read_bytes) for member in made.members)
    for member in made.members:
        member.read_bytes.clear()
    return total


def test_long_shards_pass_no_socket_and_short_ones_do(tmp_path: Path) -> None:
    async def main() -> None:
        odd, short = payload_of(3 * MIB + 7, 1), payload_of(100_000, 2)
        async with stored(tmp_path, PAYLOAD, odd, short) as made:
            for payload in (PAYLOAD, odd):
                await read(made, payload)
                await read(made, payload, 10, 2 * MIB + 100 * KIB)
                await read(made, payload, len(payload) - 300 * KIB)
            assert sent_bytes(made) == 0
            await read(made, short)
            assert sent_bytes(made) == len(short)
            await read(made, PAYLOAD, 70 * KIB, 10)
            assert sent_bytes(made) == 64 * KIB

    trio.run(main)


def test_a_shard_that_a_member_lacks_is_decoded_from_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path, PAYLOAD) as made:
            homes = made.links.tables[0].homes(data_chunk_id(PAYLOAD))
            code = made.stripes._reader._code
            begin, size = code.extent(CHUNK_BYTES, 0)
            lost = Shard(data_chunk_id(PAYLOAD), 0, PAYLOAD[begin : begin + size])
            (member,) = [each for each in made.members if MemberId(each.store.superblock.store_id) == homes[0]]
            client = EmbeddedEngine(member, descriptors=False)
            await drop(client, lost, touched=GENERATION, epoch=1)
            await client.aclose()
            await read(made, PAYLOAD)
            await read(made, PAYLOAD, 100, 1 * MIB)
            assert sent_bytes(made) == 0

    trio.run(main)


def test_an_older_member_sends_its_shards(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path, PAYLOAD) as made:
            for member in made.members[:2]:
                member.is_older = True
            await read(made, PAYLOAD)
            assert sent_bytes(made) >= CHUNK_BYTES // 2

    trio.run(main)


def test_what_a_late_member_writes_is_in_nobodys_memory(tmp_path: Path) -> None:
    """A read that does not wait for a member is answered from others, and its memory waits for the member."""

    async def main() -> None:
        async with stored(tmp_path, PAYLOAD) as made:
            await read(made, PAYLOAD)
            homes = made.links.tables[0].homes(data_chunk_id(PAYLOAD))
            (late,) = [each for each in made.members if MemberId(each.store.superblock.store_id) == homes[1]]
            late.may_read = trio.Event()
            reads = late.reads
            got = await read(made, PAYLOAD)
            assert late.reads == reads + 1
            others = [made.reads.take(CHUNK_BYTES) for _ in range(8)]
            for other in others:
                other[:] = bytes(CHUNK_BYTES)
            late.may_read.set()
            while not late.read_bytes:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert bytes(got.payload) == PAYLOAD
            assert not any(any(other) for other in others)

    trio.run(main)


def test_a_cancelled_reads_memory_is_not_used_before_the_member_has_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path, PAYLOAD) as made:
            await read(made, PAYLOAD)
            for member in made.members:
                member.may_read = trio.Event()
                member.read_bytes.clear()
                member.reads = 0
            with trio.move_on_after(0.05):
                await read(made, PAYLOAD)
            others = [made.reads.take(CHUNK_BYTES) for _ in range(8)]
            for other in others:
                other[:] = bytes(CHUNK_BYTES)
            for member in made.members:
                member.may_read.set()
            asked = [member for member in made.members if member.reads]
            assert asked
            while not all(member.read_bytes for member in asked):
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert not any(any(other) for other in others)
            await read(made, PAYLOAD)

    trio.run(main)


# --- the walker's reads -----------------------------------------------------------------------------------


def walks_calls(made: Lake) -> ShardCalls:
    members = {MemberId(each.store.superblock.store_id) for each in made.members}
    return ShardCalls(made.links, made.links.tables[0].ring_epoch, members, made.reads.take)


def copies_of(made: Lake, payload: bytes) -> list[tuple[ChunkId, Copy]]:
    """Return the data shards of a chunk."""
    chunk, code = data_chunk_id(payload), made.stripes._reader._code
    homes = made.links.tables[0].homes(chunk)
    sizes = [code.extent(len(payload), shard)[1] for shard in range(code.data_shards(len(payload)))]
    return [(chunk, Copy(homes[shard], shard, size, len(payload), None)) for shard, size in enumerate(sizes)]


def test_long_shards_that_the_walker_reads_pass_no_socket(tmp_path: Path) -> None:
    async def main() -> None:
        short = payload_of(300 * KIB, 3)
        async with stored(tmp_path, PAYLOAD, short) as made:
            sent_bytes(made)
            for payload, is_sent in ((PAYLOAD, False), (short, True)):
                calls, found = walks_calls(made), bytearray()
                for name in copies_of(made, payload):
                    [shard] = await calls.read(name[1].member, [name]) or []
                    assert isinstance(shard, ReadShard)
                    assert granule_crcs(shard.payload) == shard.crcs
                    found += shard.payload
                assert found == payload
                assert bool(sent_bytes(made)) is is_sent
                calls.release()

    trio.run(main)


def test_a_shard_that_is_gone_leaves_those_beside_it_in_their_places(tmp_path: Path) -> None:
    async def main() -> None:
        other = payload_of(CHUNK_BYTES, 4)
        async with stored(tmp_path, PAYLOAD, other) as made:
            [(chunk, copy), *_] = copies_of(made, PAYLOAD)
            there = [name for name in copies_of(made, other) if name[1].member == copy.member]
            absent = data_chunk_id(b"never stored")
            asked = [(chunk, copy), (absent, copy), *there]
            found = await walks_calls(made).read(copy.member, asked)
            assert found is not None
            first, missing, *rest = found
            assert isinstance(missing, LakeError)
            for shard in (first, *rest):
                assert isinstance(shard, ReadShard)
                assert granule_crcs(shard.payload) == shard.crcs
                assert memoryview(shard.payload).nbytes == copy.length

    trio.run(main)


def test_memory_of_a_walkers_read_that_is_cancelled_waits_for_the_member(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path, PAYLOAD) as made:
            [name, *_] = copies_of(made, PAYLOAD)
            (member,) = [e for e in made.members if MemberId(e.store.superblock.store_id) == name[1].member]
            member.may_read = trio.Event()
            member.read_bytes.clear()
            with trio.move_on_after(0.05):
                await walks_calls(made).read(name[1].member, [name])
            others = [made.reads.take(name[1].length) for _ in range(8)]
            for other in others:
                other[:] = bytes(len(other))
            member.may_read.set()
            while not member.read_bytes:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert not any(any(other) for other in others)
            [shard] = await walks_calls(made).read(name[1].member, [name]) or []
            assert isinstance(shard, ReadShard)
            assert bytes(shard.payload) == PAYLOAD[: name[1].length]

    trio.run(main)


# --- answers ----------------------------------------------------------------------------------------------


class Answers:
    """Takes the answer to a read into memory of its own."""

    def __init__(self, memory: ReadMemory, *sizes: int) -> None:
        self.memory = memory
        view = memory.take(MIB)
        self.at = memory.offsets_of([view])
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        into = [view[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self.results: list[outcome.Outcome[Reply]] = []
        self.read = _LentRead(memory, into, self.results.append)

    def is_used_again(self) -> bool:
        """Return True if the memory of the answer is given to the next reader."""
        self.results.clear()
        return any(self.memory.offsets_of([view]) == self.at for view in [self.memory.take(MIB)])


def reply_of(*lengths: int) -> outcome.Value[Reply]:
    return outcome.Value(Reply(m.ReadChunksReply([m.ReadPiece(0, length, b"") for length in lengths])))


def test_memory_of_an_answer_is_used_again_and_that_of_a_lost_connection_never() -> None:
    def refused_as(error: LakeError) -> outcome.Error:
        return outcome.Error(error)

    answers_of: list[tuple[Callable[[], outcome.Outcome[Reply]], bool]] = [
        (partial(reply_of, 100, 200), True),
        (partial(refused_as, InvalidArgument("refused")), True),
        (partial(refused_as, EngineUnreachable("the connection was lost")), False),
    ]
    for answer_of, is_used_again in answers_of:
        for is_given_up in (False, True):
            answers = Answers(ReadMemory(size_bytes=8 * MIB), 100, 200)
            if is_given_up:
                answers.read.give_up()
            assert not answers.is_used_again(), "the member may still write"
            answers.read.answered(answer_of())
            assert len(answers.results) == (not is_given_up)
            assert answers.is_used_again() == is_used_again


@pytest.mark.parametrize(
    ("lengths", "parts"), [((100, 200), [100, 200]), ((0, 200), [200]), ((101, 200), []), ((100,), []), ((), [])]
)
def test_pieces_that_do_not_fit_their_places_are_none(lengths: tuple[int, ...], parts: list[int]) -> None:
    answers = Answers(ReadMemory(size_bytes=8 * MIB), 100, 200)
    answers.read.answered(reply_of(*lengths))
    (result,) = answers.results
    assert isinstance(result, outcome.Value)
    assert [len(part) for part in result.value.body.parts] == parts


# --- a member's side --------------------------------------------------------------------------------------


def memory_of(size_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create("read", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


async def lend(client: EmbeddedEngine, *, seals: int = fcntl.F_SEAL_SHRINK, writable: bool = True) -> tuple[int, int]:
    descriptor = memory_of(2 * MIB, seals)
    reply = await client.call(m.LendMemory(2 * MIB, writable), descriptors=[descriptor])
    assert isinstance(reply.message, m.MemoryLent)
    return reply.message.memory, descriptor


def test_a_member_reads_shards_to_lent_memory_and_refuses_what_does_not_fit() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as member:
            client = EmbeddedEngine(Service(member), descriptors=True)
            long, short = payload_of(MIB, 1), payload_of(1000, 2)
            one, two = Shard(data_chunk_id(long), 0, long), Shard(data_chunk_id(short), 0, short)
            await store(client, one, two)
            memory, descriptor = await lend(client)

            def request(number: int, *targets: int, lengths: tuple[int, ...] = (MIB, 1000, 9)) -> m.ReadChunks:
                chunks: list[bytes] = [one.chunk, two.chunk, data_chunk_id(b"absent")]
                return m.ReadChunks(chunks, [0, 0, 0], list(lengths), [0, 0, 0], number, list(targets))

            answer = await ask(client, request(memory, MIB, 50, 100), m.ReadChunksReply)
            assert [piece.length for piece in answer.pieces] == [MIB, 1000, 0]
            assert [piece.crcs for piece in answer.pieces] == [granule_crcs(long), granule_crcs(short), b""]
            assert os.pread(descriptor, 2 * MIB, 0) == bytes(50) + short + bytes(MIB - 1050) + long
            wide = await ask(client, request(memory, MIB, 50, 100, lengths=(MIB - 1, 9, 9)), m.ReadChunksReply)
            assert [piece.length for piece in wide.pieces] == [0, 0, 0], "granules are wider than their targets"
            shrinks, _ = await lend(client, seals=fcntl.F_SEAL_GROW)
            read_only, _ = await lend(client, writable=False)
            bad: list[tuple[type[LakeError], m.ReadChunks]] = [
                (InvalidArgument, request(memory, MIB, 50)),
                (InvalidArgument, request(memory, MIB + 1, 50, 100)),
                (InvalidArgument, request(memory, -1, 50, 100)),
                (InvalidArgument, request(memory, MIB, 50, 100, lengths=(0, 1000, 9))),
                (InvalidArgument, request(shrinks, MIB, 50, 100)),
                (InvalidArgument, request(read_only, MIB, 50, 100)),
                (SessionLost, request(memory + 1000, MIB, 50, 100)),
            ]
            for error, wrong in bad:
                await refused(client, error, wrong)
            await client.aclose()

    run(main)


def test_an_area_gives_pages_back() -> None:
    area = LentArea(MIB)
    part: Any = area.part(MIB)
    part[:] = bytes([1]) * MIB
    area.forget(0, MIB // 2)
    assert part[: MIB // 2] == bytes(MIB // 2)
    assert part[MIB // 2 :] == bytes([1]) * (MIB // 2)
