"""Loading chunks and objects into a pool, on every driver and connection: what arrives, and what a failure leaves."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from engine.segments.files import SEGMENTS_FOLDER
from lakefs.client.blocking.lake import Lake
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.errors import (
    ChunkDamaged,
    ChunkNotFound,
    InvalidArgument,
    KeyNotFound,
    LakeError,
    LocalFileError,
    SourceChanged,
)
from lakefs.get import load as loading
from lakefs.get.pools import Pool
from lakefs.ids import EMPTY_CHUNK, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.steps.steps import Start, Step, Wait
from lakefs.wire import messages as m
from tests.contract.engines import KINDS, InThreads, Kind
from tests.contract.test_lake import MANY, Driven, content_of, run
from tests.seen_steps import asks, seen

T = TypeVar("T")
SIZES = (0, 1, 4000, 64 * KIB - 1, 64 * KIB, 300_000, MIB)
POOL = 32 * MIB


@asynccontextmanager
async def pool_of(lake: Driven, size_bytes: int = POOL, descriptor: int | None = None) -> AsyncIterator[Pool]:
    """Make a pool with the method that the lake has for that."""
    if not isinstance(lake.lake, Lake):
        async with lake.lake.pool(size_bytes=size_bytes, descriptor=descriptor) as found:
            yield found
    else:
        blocking = lake.lake.pool(size_bytes=size_bytes, descriptor=descriptor)
        found = await trio.to_thread.run_sync(blocking.__enter__)
        try:
            yield found
        finally:
            await trio.to_thread.run_sync(blocking.__exit__, None, None, None)
    gc.collect()  # the traceback of an expected error refers to the pool


async def load(
    lake: Driven, wanted: Sequence[bytes | str], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
) -> list[int]:
    return await lake.run(lake.steps.load_many(wanted, pool, offsets, rooms))


async def put(lake: Driven, *contents: bytes) -> list[str]:
    names = [f"bkt/{index}-{len(content)}" for index, content in enumerate(contents)]
    for name, content in zip(names, contents, strict=True):
        await lake.run(lake.steps.put(name, content))
    return names


async def raises(error: type[LakeError], lake: Driven, *arguments: object) -> str:
    with pytest.raises(error) as raised:
        await load(lake, *arguments)  # type: ignore[arg-type]
    return raised.value.message


@pytest.mark.parametrize("check", list(Check))
def test_chunks_and_objects_arrive_in_the_pool(kind: Kind, check: Check) -> None:
    if check is not Check.BLAKE3 and ("tcp" in kind.name or kind.simulated):
        pytest.skip("streams are checked alike")

    async def body(lake: Driven) -> None:
        object.__setattr__(lake.steps, "check", check)
        contents = [content_of(size) for size in SIZES]
        names = await put(lake, *contents, MANY)
        wanted: list[bytes | str] = [*names, EMPTY_CHUNK, *(data_chunk_id(content) for content in contents[1:])]
        expected = [*contents, MANY, b"", *contents[1:]]
        offsets = [0]
        for content in expected[:-1]:
            offsets.append(offsets[-1] + -(-len(content) // 4096) * 4096)
        async with pool_of(lake) as pool:
            for _ in range(2):
                lengths = await load(lake, wanted, pool, offsets)
                assert lengths == [len(content) for content in expected]
                for offset, content in zip(offsets, expected, strict=True):
                    assert pool.buffer[offset : offset + len(content)] == content
                pool.buffer[:] = bytes(POOL)
            assert lake.count(m.LendMemory) == (1 if lake.engine.client.carries_descriptors else 0)
        assert await load_of_nothing(lake) == []

    run(kind, body)


async def load_of_nothing(lake: Driven) -> list[int]:
    async with pool_of(lake, 4096) as pool:
        return await load(lake, [], pool, [])


def test_memory_that_is_there_is_filled_in_place_and_can_be_used_by_its_owner(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        (name,) = await put(lake, content_of(300_000))
        memory = os.memfd_create("of another program", os.MFD_CLOEXEC)
        os.ftruncate(memory, MIB)
        async with pool_of(lake, 0, memory) as pool:
            assert pool.size_bytes == MIB
            assert await load(lake, [name], pool, [4096]) == [300_000]
            assert os.pread(memory, 300_000, 4096) == content_of(300_000)
        async with pool_of(lake, 400_000, memory) as pool:
            await raises(InvalidArgument, lake, [name], pool, [100_001])
            assert await load(lake, [name], pool, [100_000]) == [300_000]
            os.close(memory)
            assert await load(lake, [name], pool, [0]) == [300_000]

    run(kind, body)


def test_what_cannot_be_loaded_is_an_error_that_names_it(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        names = await put(lake, content_of(1000), content_of(MIB))
        missing = data_chunk_id(b"never stored")
        async with pool_of(lake, 2 * MIB) as pool:
            message = await raises(ChunkNotFound, lake, [names[0], missing], pool, [0, 4096])
            assert missing.hex()[2:] in message
            await raises(KeyNotFound, lake, ["bkt/none", names[0]], pool, [0, 4096])
            await raises(InvalidArgument, lake, names, pool, [0, 4096], [999, MIB])
            await raises(InvalidArgument, lake, names, pool, [0, 4096], [1000, MIB - 1])
            await raises(InvalidArgument, lake, names, pool, [0])
            chunk = data_chunk_id(content_of(MIB))
            await raises(InvalidArgument, lake, [chunk], pool, [2 * MIB - 4096])
            await raises(InvalidArgument, lake, [chunk], pool, [-1])
            await raises(InvalidArgument, lake, [chunk], pool, [0], [MIB - 1])
            assert await load(lake, names, pool, [0, 4096], [1000, MIB]) == [1000, MIB]

    run(kind, body)


@pytest.mark.parametrize("ends", [False, True])
def test_slots_that_overlap_are_refused_however_the_load_is_divided(kind: Kind, ends: bool) -> None:
    """Each request may name but some of the slots, and streams have none."""

    async def body(lake: Driven) -> None:
        contents = [content_of(4000 + number) for number in range(40)]
        chunks = [data_chunk_id(content) for content in contents]
        await put(lake, *contents)
        async with pool_of(lake) as pool:
            for number in range(1, 40):
                offsets = [4096 * index for index in range(40)]
                offsets[number] = offsets[number - 1] + len(contents[number - 1]) - 1
                rooms = [4096] * 40 if ends else []
                await raises(InvalidArgument, lake, chunks, pool, offsets, rooms)
            assert await load(lake, chunks, pool, [4096 * index for index in range(40)]) == [*range(4000, 4040)]

    run(kind, body)


def test_a_pool_that_shrank_is_an_error_and_the_engine_goes_on(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.engine.client.carries_descriptors:
            return  # the client writes to its own memory then
        names = await put(lake, content_of(MIB))
        memory = os.memfd_create("shrinks", os.MFD_CLOEXEC)
        os.ftruncate(memory, 2 * MIB)
        async with pool_of(lake, 0, memory) as pool:
            assert await load(lake, names, pool, [0]) == [MIB]
            os.ftruncate(memory, 4096)
            await raises(SourceChanged, lake, names, pool, [0])
            os.ftruncate(memory, 2 * MIB)
            assert await load(lake, names, pool, [0]) == [MIB]
            assert pool.buffer[:MIB] == content_of(MIB)
        os.close(memory)

    run(kind, body)


def test_bytes_that_are_not_the_chunks_are_damage_and_not_content(kind: Kind) -> None:
    kind.need_segments()

    async def body(lake: Driven) -> None:
        if kind.simulated:
            return  # a simulated disk has no folder
        names = await put(lake, content_of(64 * KIB), content_of(70_000))
        folder = Path(lake.engine.folder) / "store" / SEGMENTS_FOLDER
        for path in folder.glob("*.large"):
            content = path.read_bytes()
            at = content.index(content_of(64 * KIB)[:100])
            with path.open("r+b") as file:
                file.seek(at + 50)
                file.write(b"rot")
        async with pool_of(lake) as pool:
            message = await raises(ChunkDamaged, lake, names, pool, [0, MIB])
            assert names[0] in message
            assert await load(lake, names[1:], pool, [0]) == [70_000]

    run(kind, body)


def test_a_pool_is_lent_anew_on_another_connection() -> None:
    async def body(lake: Driven) -> None:
        names = await put(lake, content_of(300_000))
        client = lake.engine.client
        assert isinstance(client, InThreads)
        async with pool_of(lake) as pool:
            assert await load(lake, names, pool, [0]) == [300_000]
            for expected in (2, 3):
                client.engine.close()
                pool.buffer[:300_000] = bytes(300_000)
                assert await load(lake, names, pool, [0]) == [300_000]
                assert pool.buffer[:300_000] == content_of(300_000)
                assert lake.count(m.LendMemory) == expected
            chunks = [data_chunk_id(content_of(300_000))] * 3
            assert await load(lake, chunks, pool, [0, MIB, 2 * MIB]) == [300_000] * 3

    run(KINDS["blocking-unix"], body)


def test_an_engine_that_takes_no_memory_sends_the_bytes(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sessions.lendings.LENT_MEMORIES_MAX", 0)

    async def body(lake: Driven) -> None:
        names = await put(lake, content_of(300_000), MANY)
        async with pool_of(lake) as pool:
            assert await load(lake, names, pool, [0, MIB]) == [300_000, len(MANY)]
            assert pool.buffer[:300_000] == content_of(300_000)
            assert pool.buffer[MIB : MIB + len(MANY)] == MANY
            assert lake.count(m.LoadSlots) == 0

    run(kind, body)


def test_a_load_that_failed_has_nothing_in_flight_any_more(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BATCH_MIN", 1)
    monkeypatch.setattr(loading, "BATCH_MAX", 1)

    async def body(lake: Driven) -> None:
        if not lake.engine.client.carries_descriptors:
            return
        await put(lake, content_of(300_000))
        chunk, missing = data_chunk_id(content_of(300_000)), data_chunk_id(b"never stored")
        in_flight: set[int] = set()

        def see(step: Step, answer: object) -> None:
            if isinstance(step, Start) and asks(step, m.LoadSlots):
                in_flight.add(id(answer))
            elif isinstance(step, Wait):
                in_flight.discard(id(step.ticket))

        async with pool_of(lake) as pool:
            steps = lake.steps.load_many([missing, chunk, chunk], pool, [0, MIB, 2 * MIB])
            with pytest.raises(ChunkNotFound):
                await lake.run(seen(steps, see))
            assert lake.count(m.LoadSlots) == 3
            assert not in_flight
            assert await load(lake, [chunk], pool, [0]) == [300_000]
            assert lake.count(m.LendMemory) == 1

    run(kind, body)


def test_a_load_that_was_cancelled_has_its_lending_ended(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not (isinstance(lake.lake, TrioLake) and lake.engine.client.carries_descriptors):
            return
        (name,) = await put(lake, content_of(300_000))
        async with pool_of(lake) as pool:
            with trio.CancelScope() as scope:

                def see(step: Step, answer: object) -> None:
                    if asks(step, m.LoadSlots):
                        scope.cancel()

                await lake.run(seen(lake.steps.load_many([name], pool, [0]), see))
            assert scope.cancelled_caught
            assert lake.count(m.ReturnMemory) == 1
            assert await load(lake, [name], pool, [MIB]) == [300_000]
            assert pool.buffer[MIB : MIB + 300_000] == content_of(300_000)
            assert lake.count(m.LendMemory) == 2

    run(kind, body)


def test_many_chunks_are_asked_for_in_few_requests(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.engine.client.carries_descriptors:
            return
        await put(lake, content_of(1000))
        chunks = [data_chunk_id(content_of(1000))] * 600
        async with pool_of(lake) as pool:
            assert await load(lake, chunks, pool, range(0, 600 * 1024, 1024)) == [1000] * 600
            assert lake.count(m.LoadSlots) == -(-600 // loading.BATCH_MAX)
            for at in range(0, 600 * 1024, 1024):
                assert pool.buffer[at : at + 1000] == content_of(1000)

    run(kind, body)


@pytest.mark.parametrize("arguments", [{}, {"size_bytes": -1}, {"size_bytes": 0}, {"descriptor": 1 << 30}])
def test_a_pool_of_nothing_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        Pool(**arguments)


def test_memory_that_is_shorter_than_told_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4096)
        with pytest.raises(LocalFileError):
            Pool(size_bytes=8192, descriptor=file.fileno())


def test_memory_that_the_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakefs.host.new_memory.os.sysconf", lambda name: 1)
    with pytest.raises(LocalFileError, match="the machine has less"):
        Pool(size_bytes=4096)


def test_a_pool_that_is_looked_into_keeps_its_bytes_when_it_is_closed() -> None:
    pool = Pool(size_bytes=4096)
    view = pool.slot(10, 5)
    view[:] = b"bytes"
    pool.close()
    pool.close()
    assert bytes(view) == b"bytes"
