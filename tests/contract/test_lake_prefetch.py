"""Prefetch: the places that a client has brought in ahead of its reader, on each kind of connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lakefs.get.opened import Opened
from lakefs.grants.read_ahead import ReadAhead
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import CHUNK_BYTES, KIB, MIB
from tests.contract.engines import KINDS, Kind
from tests.contract.test_lake import Driven, content_of, run

LOCAL = ["unix", "blocking-unix"]
Place = tuple[SegmentId, int, int]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Collect the places that the client wants brought in; none of them is."""
    places: list[Place] = []

    def want(ahead: ReadAhead, segment: SegmentId, offset: int, length: int) -> bool:
        places.append((segment, offset, length))
        return False

    monkeypatch.setattr(ReadAhead, "want", want)
    return places


def is_told(told: Sequence[Place], opened: Opened, offset: int) -> bool:
    """Return whether this byte of the object was wanted."""
    [piece] = opened.overlapping(offset, 1)
    grant = opened.grants.get(ChunkId(piece.chunk))
    if grant is None:
        return False
    place = grant.offset + offset - piece.offset
    return any(segment == grant.segment and begin <= place < begin + length for segment, begin, length in told)


def test_a_reader_without_descriptors_brings_in_nothing(told: list[Place]) -> None:
    content = content_of(5 * MIB)

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/k", content))
        opened = await lake.run(lake.steps.open("bkt/k"))
        for offset in range(0, 5 * MIB, MIB):
            assert await lake.run(lake.steps.read(opened, offset, MIB)) == content[offset : offset + MIB]
        assert not told
        await lake.run(lake.steps.close(opened))

    run(KINDS["tcp"], body)


@pytest.mark.parametrize("json_bytes", [10, MIB, 1 << 40])
@pytest.mark.parametrize("kind", [KINDS[name] for name in LOCAL], ids=LOCAL)
def test_what_begins_like_a_safetensors_file_is_read_here_and_there_as_anything_is(
    kind: Kind, json_bytes: int, told: list[Place]
) -> None:
    content = json_bytes.to_bytes(8, "little") + b"{" + content_of(5 * MIB)

    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put("bkt/k", content))
        opened = await lake.run(lake.steps.open("bkt/k"))
        for offset in (0, 3 * MIB, MIB, 4 * MIB, 2 * MIB):
            assert await lake.run(lake.steps.read(opened, offset, 1000)) == content[offset : offset + 1000]
        assert not told
        await lake.run(lake.steps.close(opened))

    run(kind, body)


@pytest.mark.parametrize("kind", [KINDS[name] for name in LOCAL], ids=LOCAL)
def test_a_reader_here_and_there_that_turns_to_reading_on_is_preceded_into_the_next_chunks(
    kind: Kind, told: list[Place]
) -> None:
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

    run(kind, body)
