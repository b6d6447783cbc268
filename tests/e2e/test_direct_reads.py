"""Chunks of a real engine, read by their ids: its shared index has the places, and no request is made."""

from __future__ import annotations

import mmap
import os
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import lakefs
from lakefs.client.facade import driver_of
from lakefs.errors import ChunkNotFound, InvalidArgument, SourceChanged
from lakefs.get.pools import Pool
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import DRAM_PAYLOAD_BYTES_MIN
from lakefs.wire.media import MEDIUM_DRAM
from tests.e2e.served import WAIT_S, Served, serving
from tests.e2e.without_requests import EngineAskedError, no_requests, without_requests
from tests.served_devices import DEVICES, SEGMENTS


def until_hot(lake: lakefs.Lake, chunk: bytes) -> None:
    """Read the chunk until that takes no request: the index has it, its segment's or slab's descriptor is here."""
    get = partial(lake.chunks.get, chunk)
    without_requests(get, get)


def until_lost(lake: lakefs.Lake) -> None:
    """Wait until the end of the connection is seen: the kernel closes it before the process is gone."""
    until = time.monotonic() + WAIT_S
    while driver_of(lake).is_connected():
        assert time.monotonic() < until


@pytest.mark.one_engine("the tier of a head keeps what gc has freed, and content by its id is right for ever")
@pytest.mark.parametrize("check", lakefs.Check)
def test_a_chunk_is_read_without_a_request_and_is_not_there_when_it_was_freed(
    served: Served, check: lakefs.Check
) -> None:
    content = os.urandom(65_536)
    chunk = data_chunk_id(content)
    with lakefs.connect(served.server, check=check) as lake:
        lake.put(f"hot/{check.name}", content, create_bucket=True)
        until_hot(lake, chunk)
        buffer = bytearray(65_536)

        def assert_read() -> None:
            assert lake.chunks.get_into(chunk, buffer) == 65_536
            assert buffer == content == lake.chunks.get(chunk)
            assert lake.chunks.get_many_into([chunk] * 20, [bytearray(65_536) for _ in range(20)]) == [65_536] * 20

        without_requests(assert_read, partial(until_hot, lake, chunk))
        lake.remove(f"hot/{check.name}")
        while lake.gc()["freed_chunks"] == 0:
            pass
        with pytest.raises(lakefs.LakeError, match="not in the store"):
            lake.chunks.get(chunk)


def test_what_is_read_without_the_engine_is_told_to_it_and_then_read_from_its_memory(folder: Path) -> None:
    contents = [os.urandom(length) for length in (20 << 10, 64 << 10, 300 << 10)]
    chunks = [data_chunk_id(content) for content in contents]
    with serving(folder, "--dram-tier-bytes", "256M") as engine, lakefs.connect(engine.server) as lake:
        for number, content in enumerate(contents):
            lake.put(f"bkt/{number}", content, create_bucket=True)
        for chunk in chunks:
            until_hot(lake, chunk)
        hot = driver_of(lake).shares.index.at_hand()
        assert hot is not None
        until = time.monotonic() + WAIT_S
        while not all((found := hot.index.find(chunk)) and found[0] == MEDIUM_DRAM for chunk in chunks):
            assert [lake.chunks.get(chunk) for chunk in chunks] == contents
            assert time.monotonic() < until, lake.status()["dram"]
        while not lake.status()["dram"]["client_reads"]:
            for chunk in chunks:
                lake.chunks.get(chunk)
        assert [lake.chunks.get(chunk) for chunk in chunks] == contents  # now the client has the slabs
        buffers = [bytearray(len(content)) for content in contents]
        with no_requests(), mock.patch("lakefs.direct.chunk_reads.os.preadv", side_effect=AssertionError("a segment")):
            assert [lake.chunks.get(chunk) for chunk in chunks] == contents
            assert lake.chunks.get_many_into(chunks, buffers) == [len(content) for content in contents]
        assert buffers == contents
        engine.kill()
        with no_requests():
            assert [lake.chunks.get(chunk) for chunk in chunks] == contents, "what is mapped stays"
        engine.start()
        lake.status()
        assert [lake.chunks.get(chunk) for chunk in chunks] == contents


@pytest.mark.one_engine(SEGMENTS)
def test_chunks_are_read_after_the_engine_was_replaced(folder: Path) -> None:
    """The reads are from segments: what the DRAM tier had is gone after a clean stop."""
    content = os.urandom(65_536)
    chunk = data_chunk_id(content)
    with serving(folder, "--dram-tier-bytes", "0") as served, lakefs.connect(served.server) as lake:
        lake.put("hot/stays", content, create_bucket=True)
        until_hot(lake, chunk)
        served.stop()
        read = partial(lake.chunks.get, chunk)
        assert without_requests(read, partial(bring_in, served)) == content  # their checksum proves the bytes
        served.start()
        lake.put("hot/another", b"x")
        assert driver_of(lake).shares.index.at_hand() is None
        assert without_requests(read, read) == content


def bring_in(served: Served) -> None:
    """Have the kernel read all segments into its page cache."""
    for path in served.segments():
        path.read_bytes()


def load_alone(served: Served, lake: lakefs.Lake, chunks: list[bytes], pool: Pool, offsets: list[int]) -> list[int]:
    """Load the chunks without a request, as soon as index and page cache have them and the descriptors are here."""

    def prepare() -> None:
        bring_in(served)
        lake.load_many(chunks, pool, offsets)

    return without_requests(partial(lake.load_many, chunks, pool, offsets), prepare)


@pytest.mark.parametrize("check", lakefs.Check)
def test_cached_chunks_are_loaded_into_a_pool_without_a_request_and_the_rest_by_the_engine(
    served: Served, check: lakefs.Check
) -> None:
    shortest = DRAM_PAYLOAD_BYTES_MIN if DEVICES else 3_000  # a head's tier takes no shorter ones
    sizes = [65_536] * 20 + [shortest, 50_000, 200_000, 1 << 20]
    contents = [os.urandom(size) for size in sizes]
    chunks: list[bytes] = [data_chunk_id(content) for content in contents]
    offsets = [number << 20 for number in range(len(sizes))]
    with lakefs.connect(served.server, check=check) as lake, lake.pool(size_bytes=32 << 20) as pool:
        lake.put_many([(f"pooled/{check.name}-{n}", content) for n, content in enumerate(contents)], create_bucket=True)

        def assert_loaded(rooms: list[int] | tuple[()] = ()) -> None:
            pool.buffer[:] = bytes(32 << 20)
            assert lake.load_many(chunks, pool, offsets, rooms) == sizes
            for offset, content in zip(offsets, contents, strict=True):
                assert pool.buffer[offset : offset + len(content)] == content
                assert not any(pool.buffer[offset + len(content) : offset + len(content) + 10])

        assert_loaded()
        small, places = chunks[:22], offsets[:22]  # large chunks are not in the page cache: they were written past it
        load_alone(served, lake, small, pool, places)
        pool.buffer[:] = bytes(32 << 20)
        assert load_alone(served, lake, small, pool, places) == sizes[:22]
        for offset, content in zip(places, contents, strict=False):
            assert pool.buffer[offset : offset + len(content)] == content
        assert load_alone(served, lake, [chunks[0]] * 3, pool, [3, 1 << 20, 70_000]) == [65_536] * 3
        assert_loaded()
        assert_loaded(sizes)
        with mock.patch.object(SegmentDescriptors, "may_be_cached", return_value=False):
            assert_loaded()
        assert lake.load_many([f"pooled/{check.name}-1", chunks[0]], pool, [0, 1 << 20]) == [65_536] * 2


def test_what_is_wrong_with_a_load_is_told_by_the_engine_though_the_chunks_are_cached(served: Served) -> None:
    contents = [os.urandom(65_536) for _ in range(4)]
    chunks: list[bytes] = [data_chunk_id(content) for content in contents]
    places = [0, 65_536, 131_072, 196_608]
    with lakefs.connect(served.server) as lake:
        lake.put_many([(f"wrong/{number}", content) for number, content in enumerate(contents)], create_bucket=True)
        with lake.pool(size_bytes=1 << 20) as pool:
            load_alone(served, lake, chunks, pool, places)
            missing: bytes = data_chunk_id(b"never stored")
            for wanted, offsets, rooms, error in (
                (chunks, [0, 65_536, 131_071, 196_608], [], InvalidArgument),
                (chunks, [0, 65_536, 131_072, -1], [], InvalidArgument),
                (chunks, [0, 65_536, 131_072, (1 << 20) - 65_535], [], InvalidArgument),
                (chunks, places, [65_536, 65_536, 65_535, 65_536], InvalidArgument),
                (chunks, places[:3], [], InvalidArgument),
                (chunks, places, [65_536], InvalidArgument),
                ([*chunks[:3], missing], places, [], ChunkNotFound),
                ([*chunks[:3], b"no id"], places, [], InvalidArgument),
            ):
                with pytest.raises(error):
                    lake.load_many(wanted, pool, offsets, rooms)
            assert lake.load_many(chunks, pool, places) == [65_536] * 4


@pytest.mark.parametrize("check", lakefs.Check)
def test_a_pool_that_shrank_is_an_error_also_when_the_client_fills_it_itself(
    served: Served, check: lakefs.Check
) -> None:
    content = os.urandom(65_536)
    chunk: bytes = data_chunk_id(content)
    memory = os.memfd_create("shrinks", os.MFD_CLOEXEC)
    os.ftruncate(memory, 1 << 20)
    with lakefs.connect(served.server, check=check) as lake, lake.pool(descriptor=memory) as pool:
        lake.put(f"shrunk/{check.name}", content, create_bucket=True)
        load_alone(served, lake, [chunk], pool, [0])
        for length in (4096, 0):
            os.ftruncate(memory, length)
            with pytest.raises(SourceChanged):
                lake.load_many([chunk], pool, [0])
            with pytest.raises(SourceChanged):
                lake.load_many([chunk, chunk], pool, [0, 65_536])
        os.ftruncate(memory, 1 << 20)
        assert lake.load_many([chunk], pool, [4096]) == [65_536]
        assert os.pread(memory, 65_536, 4096) == content
    os.close(memory)


def test_a_pool_may_lie_on_reserved_huge_pages(served: Served) -> None:
    content = os.urandom(3_000_000)
    memory = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    os.ftruncate(memory, 4 << 20)
    try:
        mapped = mmap.mmap(memory, 4 << 20)
    except OSError as error:
        os.close(memory)
        pytest.skip(f"no huge pages are set aside (sysctl vm.nr_hugepages=2): {error}")
    with lakefs.connect(served.server) as lake, lake.pool(descriptor=memory) as pool:
        lake.put("huge/pages", content)
        assert lake.load_many(["huge/pages"], pool, [4096]) == [len(content)]
    assert mapped[4096 : 4096 + len(content)] == content
    mapped.close()
    os.close(memory)


@pytest.mark.one_engine("what a head's tier has is in memory that nobody writes to when the head is gone")
def test_unverified_reads_ask_the_engine_again_once_it_was_killed(served: Served) -> None:
    content = os.urandom(65_536)
    chunk = data_chunk_id(content)
    with lakefs.connect(served.server, check=lakefs.Check.NONE) as lake:
        lake.put("hot/killed", content, create_bucket=True)
        until_hot(lake, chunk)
        buffer = bytearray(65_536)
        assert without_requests(partial(lake.chunks.get_into, chunk, buffer), partial(until_hot, lake, chunk)) == 65_536
        served.kill()
        until_lost(lake)
        hot = driver_of(lake).shares.index.at_hand()
        assert hot is not None
        assert hot.index.is_current  # the killed engine could not mark it as stale
        assert hot.read(ChunkId(chunk)) is None
        with no_requests(), pytest.raises(EngineAskedError):
            lake.chunks.get_many_into([chunk] * 2, [bytearray(65_536) for _ in range(2)])
        served.start()
        assert lake.chunks.get_into(chunk, buffer) == 65_536
        assert buffer == content
        read = partial(lake.chunks.get, chunk)
        assert without_requests(read, read) == content
