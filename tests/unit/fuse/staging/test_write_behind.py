"""Storing a long file while it is still written: the same chunks, once, however the writing goes on."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fuse.staging.write_behind import WriteBehind
from lakefs.get.opened import Piece
from lakefs.host.page_cache import is_cached, is_in_memory
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES, PAGE_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.steps.steps import Send, Start, Steps
from lakefs.wire import messages as m
from tests.contract.engines import KINDS, Kind
from tests.contract.test_lake import safetensors
from tests.edited_file import NAME, Edited, data_lengths, edit, small_chunks

TEST_CHUNK = 80_000
TENSOR = 3 * CHUNK_BYTES + 1000


@pytest.fixture(params=["embedded", "unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine in the same process, on its socket, and over a network."""
    return KINDS[request.param]


async def run_behind(edited: Edited) -> None:
    assert edited.behind is not None
    if edited.behind.has_work():
        await edited.lake.run(edited.behind.run())


async def whole(edited: Edited) -> m.ObjectStat:
    """Put the same content in one go."""
    return (await edited.lake.run(edited.lake.steps.put("bkt/whole", bytes(edited.content)))).stat


@pytest.mark.parametrize("seed", range(6))
def test_random_writes_end_as_a_put_of_the_whole(kind: Kind, seed: int) -> None:
    rng = random.Random(seed)

    async def body(edited: Edited) -> None:
        edited.store_behind()
        if seed % 3 == 0:
            edited.write(0, safetensors({"a": 300_000, "b": 500_000, "c": 10}, rng)[: 400_000 + seed])
        for _ in range(40):
            size = len(edited.content)
            match rng.randrange(12):
                case 0 if size:
                    edited.write(rng.randrange(size), rng.randbytes(rng.randrange(1, TEST_CHUNK)))
                case 1:
                    edited.write(size + rng.randrange(TEST_CHUNK), rng.randbytes(10))
                case 2 if rng.randrange(3) == 0:
                    edited.truncate(rng.randrange(size + TEST_CHUNK))
                case 3 | 4 | 5:
                    await run_behind(edited)
                case _:
                    edited.write(size, rng.randbytes(rng.randrange(1, TEST_CHUNK)))
        stat = await edited.store()
        assert stat.blob == (await whole(edited)).blob
        await edited.end_behind()

    with small_chunks(TEST_CHUNK, SMALL_PAYLOAD_BYTES):
        edit(kind, body)


def test_the_commit_stores_only_what_was_not_stored_behind(kind: Kind) -> None:
    rng = random.Random(1)

    async def body(edited: Edited) -> None:
        edited.store_behind()
        for _ in range(5):
            edited.write(len(edited.content), rng.randbytes(CHUNK_BYTES))
            await run_behind(edited)
        edited.write(len(edited.content), b"tail")
        edited.write(CHUNK_BYTES + 5, b"written again")
        stat = await edited.store()
        assert edited.sent_bytes == 2 * CHUNK_BYTES + 4, "the chunk written again, the last whole one, the tail"
        assert stat.blob == (await whole(edited)).blob
        await edited.end_behind()

    edit(kind, body)


def test_pages_of_stored_bytes_are_given_up_once_the_disk_has_them(kind: Kind, tmp_path: Path) -> None:
    rng = random.Random(9)

    async def body(edited: Edited) -> None:
        edited.stage_in(tmp_path)  # on a disk
        descriptor = edited.file.descriptor
        if is_in_memory(descriptor) or is_cached(descriptor, 0, 1) is None:
            pytest.skip("this file system has no pages to give up, or this kernel does not say which it has")

        async def write_on() -> list[bool | None]:
            """Write two chunks; return which of the first four are in memory."""
            for _ in range(2):
                edited.write(len(edited.content), rng.randbytes(CHUNK_BYTES))
            await run_behind(edited)
            return [is_cached(descriptor, number * CHUNK_BYTES, PAGE_BYTES) for number in range(4)]

        edited.store_behind()
        for _ in range(3):
            await write_on()
        os.fsync(descriptor)
        with mock.patch("fuse.staging.write_behind.is_written_out", lambda _, offset, length: offset < 2 * CHUNK_BYTES):
            assert await write_on() == [False, False, True, True]
        edited.write(CHUNK_BYTES, b"written again")
        assert await write_on() == [False, True, False, False]
        stat = await edited.store()
        assert stat.blob == (await whole(edited)).blob
        await edited.end_behind()

    edit(kind, body)


def test_a_safetensors_file_is_cut_at_its_tensors_before_it_is_whole(kind: Kind) -> None:
    content = safetensors({"a": TENSOR, "b": TENSOR}, random.Random(2))

    async def body(edited: Edited) -> None:
        edited.store_behind()
        for at in range(0, len(content), 1_000_000):
            edited.write(at, content[at : at + 1_000_000])
            await run_behind(edited)
        stat = await edited.store()
        assert edited.sent_bytes == 1000, "the end of the last tensor"
        assert stat.blob == (await whole(edited)).blob
        await edited.end_behind()

    edit(kind, body)


def test_a_file_that_does_not_become_what_its_header_tells_is_cut_every_4_mib(kind: Kind) -> None:
    content = safetensors({"a": TENSOR, "b": TENSOR}, random.Random(3))

    async def body(edited: Edited) -> None:
        edited.store_behind()
        edited.write(0, content)
        await run_behind(edited)
        edited.write(len(content), b"more")
        stat = await edited.store()
        assert stat.blob == (await whole(edited)).blob
        await edited.end_behind()

    edit(kind, body)


def test_what_is_written_again_while_it_is_stored_is_stored_again(kind: Kind) -> None:
    rng = random.Random(4)

    def with_a_write_in_flight(edited: Edited, steps: Steps[None]) -> Steps[None]:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = yield step
            if isinstance(step, Start) and isinstance(step.effect, Send) and data_lengths(step.effect.request):
                edited.write(100, rng.randbytes(10))

    async def body(edited: Edited) -> None:
        edited.store_behind()
        assert edited.behind is not None
        edited.write(0, rng.randbytes(3 * CHUNK_BYTES))
        await edited.lake.run(with_a_write_in_flight(edited, edited.behind.run()))
        if edited.lake.steps.offers.sources:
            assert edited.behind.chunk(0, CHUNK_BYTES) is None
            assert edited.behind.chunk(CHUNK_BYTES, CHUNK_BYTES) is not None
        await edited.store()
        await edited.end_behind()

    edit(kind, body)


def test_a_chunk_that_the_store_has_lost_meanwhile_is_stored_again(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.store_behind()
        assert edited.behind is not None
        content = random.Random(5).randbytes(3 * CHUNK_BYTES)
        edited.write(0, content)
        # Like after a restart of the engine: the id is right, and nothing has it.
        edited.behind._stored.append(Piece(data_chunk_id(content[:CHUNK_BYTES]), 0, CHUNK_BYTES))
        await edited.store()
        assert edited.sent_bytes == 3 * CHUNK_BYTES
        await edited.end_behind()

    edit(kind, body)


def test_short_files_and_files_over_stored_content_are_left_to_the_commit(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.store_behind()
        assert edited.behind is not None
        edited.write(0, bytes(2 * CHUNK_BYTES - 1))
        assert not edited.behind.has_work()
        await edited.store()
        await edited.end_behind()
        with pytest.raises(AssertionError, match="stored content"):
            WriteBehind(edited.lake.steps, edited.file)

    edit(kind, body)


def test_nothing_is_begun_after_a_failure(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.store_behind()
        behind = edited.behind
        assert behind is not None
        edited.write(0, random.Random(6).randbytes(3 * CHUNK_BYTES))
        steps = behind.run()
        next(steps)
        with pytest.raises(OSError, match="lost"):
            steps.throw(OSError("lost"))
        assert not behind.has_work()
        stat = await edited.store()
        assert stat.blob == (await whole(edited)).blob
        assert str(NAME) == "bkt/folder/file"

    edit(kind, body)
