"""Storing an edited file: all of it, once, and no more bytes than the edit, on every kind of connection."""

from __future__ import annotations

import random

import pytest

from lakefs import errors
from lakefs.get.objects import close_object
from lakefs.limits import CHUNK_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.wire import messages as m
from tests.contract.engines import KINDS, Kind
from tests.contract.test_lake import safetensors
from tests.edited_file import NAME, Edited, edit, small_chunks

ASKED = ["embedded", "unix", "tcp"]


@pytest.fixture(params=ASKED)
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine in the same process, on its socket, and over a network."""
    return KINDS[request.param]


TEST_CHUNK = 80_000


@pytest.mark.parametrize("seed", range(8))
def test_random_edits_are_read_back_by_others(kind: Kind, seed: int) -> None:
    rng = random.Random(seed)

    async def body(edited: Edited) -> None:
        if seed % 4:
            await edited.base_on(rng.randbytes(rng.randrange(6 * TEST_CHUNK)))
        for _ in range(12):
            for _ in range(rng.randrange(4)):
                size = len(edited.content)
                match rng.randrange(8):
                    case 0:
                        edited.truncate(rng.randrange(size + 1))
                    case 1:
                        edited.truncate(size + rng.randrange(2 * TEST_CHUNK))
                    case 2:
                        edited.write(size, rng.randbytes(rng.randrange(1, 3 * TEST_CHUNK)))
                    case 3:
                        edited.write(size + rng.randrange(TEST_CHUNK), rng.randbytes(10))
                    case _:
                        edited.write(rng.randrange(size + 1), rng.randbytes(int(2 ** rng.uniform(0, 18))))
            await edited.store()

    with small_chunks(TEST_CHUNK, SMALL_PAYLOAD_BYTES):
        edit(kind, body)


def test_an_edit_stores_the_chunks_that_it_touches(kind: Kind) -> None:
    rng = random.Random(1)
    content = rng.randbytes(5 * CHUNK_BYTES + 100_000)

    async def body(edited: Edited) -> None:
        await edited.base_on(content)
        edited.write(CHUNK_BYTES + 5, b"edited")
        stat = await edited.store()
        assert edited.sent_bytes == CHUNK_BYTES
        assert stat.chunk_count == 6
        edited.write(2 * CHUNK_BYTES, rng.randbytes(CHUNK_BYTES))
        await edited.store()
        assert edited.sent_bytes == CHUNK_BYTES
        by_descriptor = edited.lake.count(m.StoreFromSource)
        assert by_descriptor == (1 if edited.lake.steps.offers.sources else 0)
        edited.write(len(edited.content), b"appended")
        await edited.store()
        assert edited.sent_bytes == 8
        edited.truncate(3 * CHUNK_BYTES)
        stat = await edited.store()
        assert edited.sent_bytes == 0
        assert stat.chunk_count == 3
        edited.truncate(2 * CHUNK_BYTES + 1)
        edited.truncate(2 * CHUNK_BYTES + 1000)
        stat = await edited.store()
        assert edited.sent_bytes == 1000
        whole = await edited.lake.run(edited.lake.steps.put("bkt/whole", bytes(edited.content)))
        assert whole.stat.blob == stat.blob, "cut as a whole file is"

    edit(kind, body)


@pytest.mark.parametrize("size", [10, 100_000, 2 * CHUNK_BYTES + 5])
def test_content_that_did_not_change_keeps_its_blob(kind: Kind, size: int) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, safetensors({"a": 20 << 10, "b": size}, random.Random(3)))
        first = await edited.store()
        second = await edited.store()
        assert (second.blob, second.etag, second.node) == (first.blob, first.etag, first.node)
        assert edited.sent_bytes == 0

    edit(kind, body)


def test_a_new_file_is_stored_as_a_put_stores_it(kind: Kind) -> None:
    rng = random.Random(4)
    contents = [
        b"",
        b"small",
        rng.randbytes(SMALL_PAYLOAD_BYTES + 1),
        rng.randbytes(2 * CHUNK_BYTES + 1),
        safetensors({"a": 2 << 20, "b": 1 << 20, "c": 100, "d": 5 << 20}, rng),
    ]

    async def body(edited: Edited) -> None:
        for content in contents:
            for over in (False, True):  # an older content, and all of it truncated
                edited.truncate(0)
                if not over:
                    await edited.close_base()
                    edited.file.discard()
                    edited.file = edited.staging.new(str(NAME), None)
                for offset in range(0, len(content), 1 << 20):
                    edited.write(offset, content[offset : offset + (1 << 20)])
                stat = await edited.store()
                put = await edited.lake.run(edited.lake.steps.put("bkt/put", content))
                assert (stat.blob, stat.etag) == (put.stat.blob, put.stat.etag)

    edit(kind, body)


def test_small_content_is_one_request(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, b"first")
        edited.write(SMALL_PAYLOAD_BYTES - 2, b"!")
        await edited.store()
        edited.write(5, b"more")  # the rest of the content was inline in the answer to the open
        for _ in range(2):
            edited.lake.asked.clear()
            await edited.lake.run(edited.storing())
            assert [type(asked) for asked in edited.lake.asked] == [m.PutObjects]
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)


def test_a_long_hole_costs_one_chunk_of_zeros(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(5, b"begin")
        edited.file.truncate(1000 * CHUNK_BYTES)
        edited.file.write(1000 * CHUNK_BYTES, b"end")
        edited.lake.asked.clear()
        stat = await edited.lake.run(edited.storing())
        assert (stat.size_bytes, stat.chunk_count) == (1000 * CHUNK_BYTES + 3, 1001)
        assert edited.sent_bytes == 2 * CHUNK_BYTES + 3
        opened = await edited.lake.run(edited.lake.steps.open(str(NAME)))
        read = edited.lake.steps.read
        assert await edited.lake.run(read(opened, 0, 12)) == bytes(5) + b"begin" + bytes(2)
        assert await edited.lake.run(read(opened, 500 * CHUNK_BYTES - 5, 10)) == bytes(10)
        assert await edited.lake.run(read(opened, 1000 * CHUNK_BYTES - 2, 10)) == bytes(2) + b"end"
        await edited.lake.run(close_object(opened))

    edit(kind, body)


def test_a_name_keeps_its_node_when_that_is_asked_for(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        for content in (b"small", random.Random(5).randbytes(CHUNK_BYTES + 10)):
            edited.write(0, content)
            first = await edited.store()
            edited.write(0, b"edited")
            second = await edited.store()
            assert second.node == first.node
            edited.write(0, b"again!")
            with pytest.raises(errors.PreconditionFailed):
                await edited.lake.run(edited.storing(keep_node=first.node + 1000))
            with pytest.raises(errors.PreconditionFailed):
                await edited.lake.run(edited.storing(condition=m.Condition(absent=True)))
            await edited.store()

    edit(kind, body)


def test_an_answer_before_it_is_durable_can_be_asked_for(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        for content in (b"small", random.Random(6).randbytes(CHUNK_BYTES + 10)):
            edited.write(0, content)
            for durable in (False, True):
                edited.lake.asked.clear()
                await edited.lake.run(edited.storing(durable=durable))
                told = [a.durable for a in edited.lake.asked if isinstance(a, m.PutObjects | m.Commit)]
                assert told == [durable]
            assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)
