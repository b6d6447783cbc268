"""Opened objects of a real engine: what is in memory is read without a request, checked, and equal to the content."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

import lakefs
from lakefs.client.blocking.object_reader import BUFFER_BYTES, ObjectReader
from lakefs.errors import ChunkDamaged, EngineUnreachable
from lakefs.get import cached
from lakefs.grants import grant_reads
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES, KIB, MIB
from tests.e2e.served import WAIT_S, Served, serving
from tests.e2e.test_damage import flip, place_of
from tests.e2e.without_requests import EngineAskedError, no_requests, without_requests
from tests.served_devices import HEALS

SIZES = {"inline": 5000, "granule": GRANULE_BYTES, "vector": 1_300_007, "large": 9 * MIB + 5}
CONTENTS = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}
PARTS = [5 * MIB + 3, 5 * MIB + 70_001, 1]
"""Lengths of the parts of an object whose chunks begin anywhere."""
CONTENTS["parts"] = random.Random("parts").randbytes(sum(PARTS))


@pytest.fixture(scope="module")
def lakes(served: Served) -> Iterator[dict[lakefs.Check, lakefs.Lake]]:
    """Clients with each check; `CONTENTS` are stored in the bucket `opened`."""
    made = {check: lakefs.connect(served.server, check=check) for check in lakefs.Check}
    lake = made[lakefs.Check.BLAKE3]
    lake.create_bucket("opened")
    for name, content in CONTENTS.items():
        if name != "parts":
            lake.put(f"opened/{name}", content)
    upload = lake.create_upload("opened/parts")
    done, parts = 0, []
    for number, length in enumerate(PARTS, 1):
        parts.append((number, lake.put_part(upload, number, CONTENTS["parts"][done : done + length]).etag))
        done += length
    lake.complete_upload(upload, parts)
    yield made
    for lake in made.values():
        lake.close()


@contextmanager
def raw(lake: lakefs.Lake, name: str) -> Iterator[ObjectReader]:
    """Context manager: an object opened without a buffer."""
    with cast(ObjectReader, lake.open(name).detach()) as opened:
        yield opened


def until_in_memory(lake: lakefs.Lake, name: str) -> None:
    """Open and read an object until some of each chunk is read without a request.

    A lake brings chunks into memory in the background; what was opened before is read as it was then.
    """
    until = time.monotonic() + WAIT_S
    while not is_in_memory(lake, name):
        assert time.monotonic() < until


def is_in_memory(lake: lakefs.Lake, name: str) -> bool:
    with raw(lake, f"opened/{name}") as opened:
        opened.seek(1)
        opened.read_next(len(CONTENTS[name]))
        for at in range(1, len(CONTENTS[name]), MIB // 2):
            opened.seek(at)
            try:
                with no_requests("_start"):
                    opened.read_next(1)
            except EngineAskedError:
                return False
    return True


def read_whole(opened: ObjectReader) -> bytes:
    opened.seek(0)
    return opened.read_next(10 * MIB)  # all of it: there is no more


def random_places(name: str, length: int, count: int) -> list[int]:
    """Return offsets at which so many bytes can be read, none of which continues the last."""
    rng = random.Random(length)
    return [rng.randrange(0, len(CONTENTS[name]) - length, 3) for _ in range(count)]


_edges = [0, 1, GRANULE_BYTES - 1, GRANULE_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * MIB + 3, 10 * MIB + 70_004]
_offsets = st.one_of(st.sampled_from(_edges), st.integers(0, 11 * MIB))
_lengths = st.one_of(st.sampled_from([0, 1, 100, GRANULE_BYTES, MIB]), st.integers(0, 3 * MIB))


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(CONTENTS)),
    check=st.sampled_from(lakefs.Check),
    moves=st.lists(st.tuples(st.none() | _offsets, st.sampled_from(["read", "readinto", "raw", "line"]), _lengths)),
)
def test_any_reads_of_an_opened_object_are_those_of_a_file(
    lakes: dict[lakefs.Check, lakefs.Lake], name: str, check: lakefs.Check, moves: list[tuple[int | None, str, int]]
) -> None:
    content = CONTENTS[name]
    model = io.BytesIO(content)
    with lakes[check].open(f"opened/{name}") as opened, raw(lakes[check], f"opened/{name}") as bare:
        for offset, how, length in moves:
            if offset is not None:
                assert opened.seek(offset) == model.seek(offset)
            at = model.tell()
            if how == "read":
                assert opened.read(length) == model.read(length)
            elif how == "line":
                assert opened.readline(length) == model.readline(length)
            elif how == "readinto":
                memory = bytearray(length)
                count = opened.readinto(memory)
                assert memory[:count] == model.read(length)
            else:
                bare.seek(at)
                assert bare.read_next(length) == content[at : at + length]
                bare.seek(at)
                memory = bytearray(length)
                count = bare.readinto(memory)
                assert bool(count) == bool(content[at : at + length])
                assert memory[:count] == content[at : at + count]
            assert opened.tell() == model.tell()


@pytest.mark.parametrize("check", lakefs.Check)
@pytest.mark.parametrize("name", ["vector", "large", "parts"])
@pytest.mark.parametrize("length", [10, GRANULE_BYTES, MIB])
def test_what_is_in_memory_is_read_without_a_request_or_a_thread(
    lakes: dict[lakefs.Check, lakefs.Lake], name: str, check: lakefs.Check, length: int
) -> None:
    content = CONTENTS[name]
    until_in_memory(lakes[check], name)
    with raw(lakes[check], f"opened/{name}") as opened:
        opened.seek(1)  # a reader that began at the first byte and jumps is taken for a loader of tensors
        assert opened.read_next(len(content)) == content[1:]  # descriptors, slabs and places are known now

        def read(at: int) -> None:
            opened.seek(at)
            assert opened.read_next(length) == content[at : at + length]
            opened.seek(at)
            memory = bytearray(min(length, GRANULE_BYTES))
            assert opened.readinto(memory) == len(memory)
            assert memory == content[at : at + len(memory)]

        for at in random_places(name, length, 12):
            without_requests(partial(read, at), partial(read, at), "_start")
        assert opened.read_next(0) == b""


def test_a_reader_that_jumps_gets_a_granule_and_one_in_order_ever_more(lakes: dict[lakefs.Check, lakefs.Lake]) -> None:
    with raw(lakes[lakefs.Check.BLAKE3], "opened/large") as opened:
        buffer = bytearray(BUFFER_BYTES)
        opened.seek(MIB + 10)
        counts = [opened.readinto(buffer) for _ in range(7)]
        assert counts[0] == 2 * GRANULE_BYTES - 10  # to a granule's end, and at least a granule
        assert counts[1:5] == [128 * KIB, 256 * KIB, 512 * KIB, MIB]
        assert counts[5:] == [MIB, MIB]
        opened.seek(3 * MIB)
        assert opened.readinto(buffer) == GRANULE_BYTES
        longer = bytearray(BUFFER_BYTES + 1)
        opened.seek(5)
        assert opened.readinto(longer) == BUFFER_BYTES + 1  # never cut short: it passes buffers


def test_what_is_not_in_memory_is_read_as_ever(lakes: dict[lakefs.Check, lakefs.Lake]) -> None:
    content = CONTENTS["large"]
    for missing in ("may_be_cached", "cached_crcs", "cached_part", "read_cached"):
        with (
            lakes[lakefs.Check.CRC32C].open("opened/large") as opened,
            mock.patch.object(cached, missing, return_value=None) as asked,
        ):
            for at in (0, 4 * MIB - 7, 9 * MIB, 100):
                opened.seek(at)
                assert opened.read(MIB) == content[at : at + MIB]
            assert asked.called or missing == "read_cached"


@pytest.mark.one_engine(HEALS)
@pytest.mark.parametrize("check", lakefs.Check)
def test_a_bit_that_flips_under_an_opened_object_fails_what_touches_its_granule(
    folder: Path, check: lakefs.Check
) -> None:
    content = random.Random(9).randbytes(CHUNK_BYTES + 300 * KIB)
    # Without the DRAM tier, which has bytes of its own.
    with serving(folder, "--dram-tier-bytes", "0") as engine, lakefs.connect(engine.server, check=check) as lake:
        lake.put("bkt/a", content, create_bucket=True)
        with raw(lake, "bkt/a") as opened:
            assert opened.read_next(100_000) == content[:100_000]  # its checksums are known from now on
            path, place = place_of(engine.data, content[:512])
            bad = 10 * GRANULE_BYTES + 77
            flip(path, place + bad)
            for begin, end in ((0, GRANULE_BYTES), (bad + GRANULE_BYTES, bad + 2 * GRANULE_BYTES), (100, MIB // 2)):
                opened.seek(begin)
                assert opened.read_next(end - begin) == content[begin:end]
            for begin, end in ((bad, bad + 1), (bad - 5000, bad - 10), (bad + 1, bad + MIB), (bad - MIB // 2, bad)):
                opened.seek(begin)
                with pytest.raises(ChunkDamaged, match="bkt/a"):
                    opened.read_next(end - begin)
                assert opened.tell() == begin
                with pytest.raises(ChunkDamaged, match="bkt/a"):
                    while opened.tell() < end:
                        opened.readinto(bytearray(end - begin))


@pytest.mark.one_engine(HEALS)
@pytest.mark.parametrize("check", [lakefs.Check.BLAKE3, lakefs.Check.CRC32C])
def test_a_bit_that_flips_in_a_chunk_that_is_read_whole_fails_the_read(folder: Path, check: lakefs.Check) -> None:
    content = random.Random(10).randbytes(1_300_007)
    with serving(folder, "--dram-tier-bytes", "0") as engine, lakefs.connect(engine.server, check=check) as lake:
        lake.put("bkt/a", content, create_bucket=True)
        with raw(lake, "bkt/a") as opened:
            read = partial(read_whole, opened)
            assert read() == without_requests(read, read, "_start") == content
            path, place = place_of(engine.data, content[:512])
            flip(path, place + len(content) - 1)
            opened.seek(0)
            with pytest.raises(ChunkDamaged, match="bkt/a"):
                opened.read_next(len(content))


def test_an_unchecked_part_is_what_these_tests_find(
    lakes: dict[lakefs.Check, lakefs.Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks see exactly the bytes that are returned: other bytes in their place are refused."""
    content = CONTENTS["large"]
    plain = grant_reads.read_pieces_cached

    def shifted(*arguments: Any) -> bool:
        is_read = plain(*arguments)
        for piece in arguments[-1]:
            piece[0] ^= 1
        return is_read

    with raw(lakes[lakefs.Check.BLAKE3], "opened/large") as opened:
        opened.read_next(5 * MIB)
        monkeypatch.setattr(grant_reads, "read_pieces_cached", shifted)
        for at in (10, GRANULE_BYTES, CHUNK_BYTES - 100):
            opened.seek(at)
            assert opened.read_next(70_000) == content[at : at + 70_000]  # by the way of what fails its check


def test_a_closed_lake_is_not_read_from_memory(served: Served, lakes: dict[lakefs.Check, lakefs.Lake]) -> None:
    for name in ("inline", "large"):
        lake = lakefs.connect(served.server)
        with raw(lake, f"opened/{name}") as opened:
            assert opened.read_next(100) == CONTENTS[name][:100]
            lake.close()
            opened.seek(50)  # not on: nothing is to be brought in
            with pytest.raises(EngineUnreachable):
                opened.read_next(100)
