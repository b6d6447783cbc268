"""Reading chunks by their ids, with an index of places in this process and without, whichever driver and connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import pytest
import trio

from lakefs.client.blocking import chunks as blocking_chunks
from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.lake import Lake
from lakefs.client.trio.driver import TrioDriver
from lakefs.content.verify import Check
from lakefs.direct.batch_reads import DirectBatch
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.errors import ChunkNotFound, InvalidArgument
from lakefs.ids import EMPTY_CHUNK, ChunkId, data_chunk_id
from lakefs.limits import CLIENT_THREADS
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import capacity_for, table_bytes
from lakefs.steps.steps import send
from lakefs.wire import messages as m
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, content_of, run

SIZES = (5, 40_000, 65_536, 65_537, 300_000, 1_000_000)
CONTENTS = [content_of(size) for size in SIZES]
CHUNKS: list[bytes] = [data_chunk_id(content) for content in CONTENTS]


async def chunks_of(lake: Driven, method: str, *args: object) -> Any:
    """Call a method of `lake.chunks`, of either kind of lake."""
    call = getattr(lake.lake.chunks, method)
    if isinstance(lake.driver, TrioDriver):
        return await call(*args)
    return await trio.to_thread.run_sync(call, *args)


async def stored(lake: Driven) -> None:
    for chunk, content in zip(CHUNKS, CONTENTS, strict=True):
        await lake.run(lake.steps.put(f"bkt/{chunk.hex()}", content))


async def index_of(lake: Driven, chunks: Sequence[bytes] = CHUNKS) -> SharedTable:
    """Make an index that knows these chunks; the lake uses it from now on."""
    reply = await lake.run(send(m.Locate(list(chunks))))
    assert isinstance(reply.message, m.Located)
    capacity = capacity_for(len(chunks))
    table = SharedTable(bytearray(table_bytes(capacity)), capacity)
    for chunk, grant in zip(chunks, reply.message.grants, strict=True):
        assert table.put(chunk, grant.medium, grant.segment, grant.offset, grant.stored_bytes, grant.crc)
    shared = lake.driver.shares.index
    shared.use(shared.reads_by(cast("Any", Index(table)), lake.driver.epoch), lake.driver.epoch)
    return table


class Index:
    """A table as clients use the engine's."""

    is_current = True

    def __init__(self, table: SharedTable) -> None:
        self.find = table.find
        self.find_many = table.find_many
        self.find_packed = table.find_packed


def without_requests(lake: Driven) -> Any:
    """Make every request to the engine fail."""
    return mock.patch.object(type(lake.driver), "run", side_effect=AssertionError("the engine was asked"))


async def read_all(lake: Driven) -> list[bytes]:
    buffers = [bytearray(size + 1) for size in SIZES]
    assert await chunks_of(lake, "get_many_into", CHUNKS, buffers) == list(SIZES)
    return [bytes(buffer[:-1]) for buffer in buffers]


def test_chunks_are_read_by_their_ids(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        await stored(lake)
        assert await read_all(lake) == CONTENTS
        assert await chunks_of(lake, "get_many", [*CHUNKS, CHUNKS[0], EMPTY_CHUNK]) == [*CONTENTS, CONTENTS[0], b""]
        for chunk, content in zip(CHUNKS, CONTENTS, strict=True):
            buffer = bytearray(len(content))
            assert await chunks_of(lake, "get", chunk) == content
            assert await chunks_of(lake, "get_into", chunk, buffer) == len(content)
            assert buffer == content
        for method, args in (("get", ()), ("get_into", (bytearray(9),))):
            with pytest.raises(ChunkNotFound, match=data_chunk_id(b"none").hex()[2:]):
                await chunks_of(lake, method, data_chunk_id(b"none"), *args)
            with pytest.raises(InvalidArgument, match="no chunk's id"):
                await chunks_of(lake, method, b"no id", *args)
        with pytest.raises(InvalidArgument, match="has 40000 bytes"):
            await chunks_of(lake, "get_many_into", CHUNKS[:2], [bytearray(5), bytearray(39_999)])
        with pytest.raises(InvalidArgument, match="do not go together"):
            await chunks_of(lake, "get_many_into", CHUNKS[:2], [bytearray(5)])

    run(kind, body)


@pytest.mark.parametrize("check", Check)
def test_what_the_index_knows_and_the_page_cache_has_is_read_without_a_request(kind: Kind, check: Check) -> None:
    kind.need_segments()

    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        object.__setattr__(lake.steps, "check", check)
        await stored(lake)
        assert await read_all(lake) == CONTENTS  # now the client has the descriptors
        await index_of(lake)
        with without_requests(lake):
            for chunk, content in zip(CHUNKS[:3], CONTENTS, strict=False):
                buffer = bytearray(len(content))
                assert await chunks_of(lake, "get_into", chunk, buffer) == len(content)
                assert buffer == content
            if isinstance(lake.driver, BlockingDriver):
                assert await read_all(lake) == CONTENTS
                assert [await chunks_of(lake, "get", chunk) for chunk in CHUNKS] == CONTENTS
        assert await read_all(lake) == CONTENTS

    run(kind, body)


@pytest.mark.parametrize("check", [Check.BLAKE3, Check.CRC32C])
def test_an_index_of_nonsense_costs_time_and_gives_no_wrong_bytes(kind: Kind, check: Check) -> None:
    async def body(lake: Driven) -> None:
        object.__setattr__(lake.steps, "check", check)
        await stored(lake)
        assert await read_all(lake) == CONTENTS
        table = await index_of(lake)
        good = {chunk: table.find(chunk) for chunk in CHUNKS}
        for change in (
            lambda tier, segment, offset, length, crc: (tier, segment, offset + 1, length, crc),
            lambda tier, segment, offset, length, crc: (tier, segment + 77, offset, length, crc),
            lambda tier, segment, offset, length, crc: (tier, segment, offset, length - 1, crc),
            lambda tier, segment, offset, length, crc: (tier, segment, offset, length + 1, crc),
            lambda tier, segment, offset, length, crc: (tier, segment, 4_000_000_000, length, crc),
            lambda tier, segment, offset, length, crc: (9, segment, offset, length, crc),
            lambda tier, segment, offset, length, crc: (tier, segment, offset, 0, crc),
        ):
            for chunk, found in good.items():
                assert found is not None
                assert table.put(chunk, *change(*found))
            assert await read_all(lake) == CONTENTS
            assert await chunks_of(lake, "get", CHUNKS[2]) == CONTENTS[2]

    run(kind, body)


def test_what_was_moved_meanwhile_is_asked_for_where_nothing_is_checked(kind: Kind) -> None:
    kind.need_segments()

    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        object.__setattr__(lake.steps, "check", Check.NONE)
        await stored(lake)
        assert await read_all(lake) == CONTENTS
        table = await index_of(lake)
        shared = lake.driver.shares.index.at_hand()
        assert shared is not None
        chunk = ChunkId(CHUNKS[2])
        found = table.find(chunk)
        assert found is not None
        target = memoryview(bytearray(found[3]))
        assert shared.read_found(chunk, found, target) == found[3]
        assert _batch_of_two(shared, chunk) == [found[3]] * 2
        with mock.patch.object(shared.index, "is_current", False):  # a stale index: removed chunks would stay in it
            assert shared.read_found(chunk, found, target) == NOT_READ
            assert _batch_of_two(shared, chunk) == [NOT_READ] * 2
        with mock.patch.object(type(lake.driver), "is_connected", return_value=False):  # the engine has ended
            assert shared.read_found(chunk, found, target) == NOT_READ
            assert _batch_of_two(shared, chunk) == [NOT_READ] * 2
        with mock.patch.object(type(lake.driver), "epoch", lake.driver.epoch + 1):  # another engine has started
            assert lake.driver.is_connected()
            assert shared.read_found(chunk, found, target) == NOT_READ
            assert _batch_of_two(shared, chunk) == [NOT_READ] * 2
        assert (
            _batch_of_two(shared, chunk, lambda: table.put(chunk, *found[:2], found[2] + 1, *found[3:]))
            == [NOT_READ] * 2
        )
        assert table.remove(chunk)
        assert shared.read_found(chunk, found, target) == NOT_READ

    run(kind, body)


def _batch_of_two(shared: DirectReads, chunk: bytes, meanwhile: Callable[[], object] = lambda: None) -> list[int]:
    """Read a chunk twice in one call, and call `meanwhile` between read and end; return the lengths."""
    with DirectBatch(shared, [chunk, chunk], [memoryview(bytearray(65_536)) for _ in range(2)]) as batch:
        for task in batch.tasks(is_shared=False):
            task()
        meanwhile()
    return batch.lengths


@pytest.mark.parametrize("check", Check)
def test_chunks_side_by_side_are_read_together_and_checked_each_by_itself(kind: Kind, check: Check) -> None:
    async def body(lake: Driven) -> None:
        if not (lake.steps.offers.segments and isinstance(lake.lake, Lake)):
            return
        object.__setattr__(lake.steps, "check", check)
        contents = [bytes([number]) * size for size in (65_536, 700) for number in range(20)]
        names = [f"bkt/{number}" for number in range(len(contents))]
        stats = await lake.run(lake.steps.put_many(list(zip(names, contents, strict=True))))
        chunks = [stat.blob for stat in stats]
        buffers = [bytearray(65_536) for _ in chunks]
        lengths = [len(content) for content in contents]
        assert await chunks_of(lake, "get_many_into", chunks, buffers) == lengths
        table = await index_of(lake, chunks)
        buffers = [bytearray(65_536) for _ in chunks]
        with without_requests(lake):
            with mock.patch.object(DirectReads, "read_found", side_effect=AssertionError("one by one")):
                assert await chunks_of(lake, "get_many_into", chunks[:5], buffers[:5]) == lengths[:5]
            assert await chunks_of(lake, "get_many_into", chunks, buffers) == lengths
        assert [bytes(b[: len(c)]) for b, c in zip(buffers, contents, strict=True)] == contents
        if check is Check.NONE:
            return
        for wrong, right in ((3, 4), (25, 24)):
            found, other = table.find(chunks[wrong]), table.find(chunks[right])
            assert found is not None
            assert other is not None
            assert table.put(chunks[wrong], *other[:4], found[4])
            assert table.put(chunks[right], *found[:4], other[4])
        assert await chunks_of(lake, "get_many_into", chunks, buffers) == lengths
        assert [bytes(b[: len(c)]) for b, c in zip(buffers, contents, strict=True)] == contents

    run(kind, body)


def test_a_read_does_not_wait_for_threads_that_have_other_work(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments or not isinstance(lake.driver, BlockingDriver):
            return
        await stored(lake)
        assert await read_all(lake) == CONTENTS
        await index_of(lake)
        threads, is_free = lake.driver.work_threads(), threading.Event()
        ended: list[bool] = []
        works = [threads.submit(lambda: ended.append(is_free.wait(60))) for _ in range(CLIENT_THREADS)]
        with without_requests(lake), mock.patch.object(blocking_chunks, "SHARED_FROM_BYTES", 1):
            assert await read_all(lake) == CONTENTS
        assert not ended
        is_free.set()
        for work in works:
            work.wait()
        assert ended == [True] * CLIENT_THREADS
        with mock.patch.object(blocking_chunks, "SHARED_FROM_BYTES", 1):
            assert await read_all(lake) == CONTENTS

    run(kind, body)


@pytest.mark.parametrize("check", Check)
def test_more_neighbours_than_one_call_of_the_kernel_takes_are_read_without_a_request(kind: Kind, check: Check) -> None:
    async def body(lake: Driven) -> None:
        if not (lake.steps.offers.segments and isinstance(lake.lake, Lake)) or kind.simulated:
            return
        object.__setattr__(lake.steps, "check", check)
        contents = [number.to_bytes(4, "big") for number in range(1_500)]
        await lake.run(lake.steps.put_many([(f"bkt/{number}", content) for number, content in enumerate(contents)]))
        chunks: list[bytes] = [data_chunk_id(content) for content in contents]
        buffers = [bytearray(4) for _ in chunks]
        assert await chunks_of(lake, "get_many_into", chunks[:1], buffers[:1]) == [4]
        await index_of(lake, chunks)
        with without_requests(lake):
            assert await chunks_of(lake, "get_many_into", chunks, buffers) == [4] * len(chunks)
        assert buffers == contents

    run(kind, body)


def test_what_is_no_chunks_id_is_refused_where_an_index_is_used_too(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        await stored(lake)
        await index_of(lake)
        for chunk in (b"no id", b"\x09" + bytes(32)):
            with pytest.raises(InvalidArgument, match="no chunk's id"):
                await chunks_of(lake, "get", chunk)
            with pytest.raises(InvalidArgument, match="no chunk's id"):
                await chunks_of(lake, "get_into", chunk, bytearray(9))
            with pytest.raises(InvalidArgument, match="no chunk's id"):
                await chunks_of(lake, "get_many_into", [CHUNKS[0], chunk], [bytearray(9), bytearray(9)])

    run(kind, body)
