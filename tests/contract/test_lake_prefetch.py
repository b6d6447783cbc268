"""Prefetch: the places that a client has brought in ahead of its reader, on each kind of connection."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lakefs.errors import LakeError
from lakefs.get import lookahead
from lakefs.get.opened import Opened
from lakefs.grants.read_ahead import ReadAhead
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import CHUNK_BYTES, KIB, MIB, TABLE_HEADER_BYTES_MAX
from tests.contract.engines import KINDS, Kind
from tests.contract.test_lake import Driven, content_of, run, safetensors

LOCAL = ["unix", "blocking-unix"]
TENSORS = 14
LATER = 5
"""Tensors after which the order is known: a step into the first one says nothing yet."""

Place = tuple[SegmentId, int, int]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Collect the places that the client wants brought in; none of them is."""
    places: list[Place] = []

    def want(ahead: ReadAhead, segment: SegmentId, offset: int, length: int) -> bool:
        places.append((segment, offset, length))
        return False

    monkeypatch.setattr(ReadAhead, "want", want)
    monkeypatch.setattr(lookahead, "TABLE_OBJECT_BYTES_MIN", 4 * MIB)
    return places


def is_told(told: Sequence[Place], opened: Opened, offset: int) -> bool:
    """Return whether this byte of the object was wanted."""
    [piece] = opened.overlapping(offset, 1)
    grant = opened.grants.get(ChunkId(piece.chunk))
    if grant is None:
        return False
    place = grant.offset + offset - piece.offset
    return any(segment == grant.segment and begin <= place < begin + length for segment, begin, length in told)


def model() -> tuple[bytes, list[tuple[str, int]]]:
    """Make a file whose tensors lie in another order than their names; return it, and the tensors' offsets by name."""
    names = [f"layer.{number:02}" for number in range(TENSORS)]
    random.Random(3).shuffle(names)
    content = safetensors(dict.fromkeys(names, MIB), random.Random(4))
    first = len(content) - TENSORS * MIB
    return content, sorted((name, first + MIB * place) for place, name in enumerate(names))


async def load(lake: Driven, opened: Opened, tensors: Sequence[tuple[str, int]], told: list[Place]) -> list[bool]:
    """Read the header, then tensor by tensor; return for each whether it was wanted before it was read."""
    header = await lake.run(lake.steps.read(opened, 0, 8))
    await lake.run(lake.steps.read(opened, 8, int.from_bytes(header, "little")))
    before: list[bool] = []
    for _, begin in tensors:
        before.append(is_told(told, opened, begin))
        await lake.run(lake.steps.read(opened, begin, MIB))
    return before


@pytest.mark.parametrize("kind", [KINDS[name] for name in LOCAL], ids=LOCAL)
def test_tensors_taken_by_name_are_brought_in_before_they_are_read(kind: Kind, told: list[Place]) -> None:
    content, tensors = model()

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/model", content))
        opened = await lake.run(lake.steps.open("bkt/model"))
        before = await load(lake, opened, tensors, told)
        assert not any(before[:2])
        assert all(before[LATER:])
        assert await lake.run(lake.steps.read(opened, tensors[3][1], 100)) == content[tensors[3][1] :][:100]
        await lake.run(lake.steps.close(opened))

    run(kind, body)


def test_a_reader_without_descriptors_brings_in_nothing(told: list[Place]) -> None:
    content, tensors = model()

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/model", content))
        opened = await lake.run(lake.steps.open("bkt/model"))
        await load(lake, opened, tensors, told)
        assert not told
        await lake.run(lake.steps.close(opened))

    run(KINDS["tcp"], body)


@pytest.mark.parametrize("json_bytes", [10, 2 * TABLE_HEADER_BYTES_MAX, 1 << 40])
def test_what_only_begins_like_a_table_is_read_as_ever(json_bytes: int, told: list[Place]) -> None:
    content = json_bytes.to_bytes(8, "little") + b"{" + content_of(5 * MIB)

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/k", content))
        opened = await lake.run(lake.steps.open("bkt/k"))
        for offset in (0, 3 * MIB, MIB, 4 * MIB, 2 * MIB):
            assert await lake.run(lake.steps.read(opened, offset, 1000)) == content[offset : offset + 1000]
        assert not told
        await lake.run(lake.steps.close(opened))

    run(KINDS["unix"], body)


def test_a_reader_here_and_there_that_turns_to_reading_on_is_preceded_into_the_next_chunks(told: list[Place]) -> None:
    content = content_of(5 * CHUNK_BYTES)

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/k", content))
        opened = await lake.run(lake.steps.open("bkt/k"))
        for offset in (9 * MIB, 2 * MIB, 17 * MIB, 5 * MIB):
            await lake.run(lake.steps.read(opened, offset, 64 * KIB))
        assert not told
        begin = 2 * CHUNK_BYTES - MIB
        for offset in range(begin, begin + 6 * MIB, 512 * KIB):
            assert offset < begin + MIB or is_told(told, opened, offset)
            await lake.run(lake.steps.read(opened, offset, 512 * KIB))
        await lake.run(lake.steps.close(opened))

    run(KINDS["unix"], body)


def test_a_table_that_cannot_be_read_is_nobody_s_error(told: list[Place], monkeypatch: pytest.MonkeyPatch) -> None:
    content, tensors = model()
    asked: list[object] = []

    def fails(*arguments: object) -> None:
        asked.append(arguments)
        raise LakeError("no table")

    monkeypatch.setattr("lakefs.get.prefetch.tensor_table", fails)

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/model", content))
        opened = await lake.run(lake.steps.open("bkt/model"))
        await load(lake, opened, tensors, told)
        for _, begin in tensors:
            assert await lake.run(lake.steps.read(opened, begin, 100)) == content[begin : begin + 100]
        assert len(asked) == 1
        await lake.run(lake.steps.close(opened))

    run(KINDS["unix"], body)
