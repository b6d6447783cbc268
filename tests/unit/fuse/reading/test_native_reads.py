"""Pieces that native threads are taught: whole chunks whose place and checksums are known; all else is Python's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from fuse.native import layer
from fuse.reading.native_reads import SEGMENTS_MAX, NativeReads
from lakefs.errors import StaleGrant
from lakefs.get.opened import Opened, Piece
from lakefs.grants.descriptors import Held, SegmentDescriptors
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import GRANULE_BYTES
from lakefs.names import Name
from lakefs.wire.grants import Grant
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT
from lakefs.wire.messages import ObjectStat

LENGTH = GRANULE_BYTES + 1
CRCS = b"sum1sum2"


@dataclass
class Content:
    """A native content that only takes note; it is ended before what it reads from is let go."""

    lengths: list[int]
    taught: list[tuple[int, object]] = field(default_factory=list)
    ended: bool = False
    has_room: bool = True

    def teach(self, index: int, descriptor: int, place: int, nowait: int, crcs: bytes) -> bool:
        assert crcs == CRCS
        self.taught.append((index, (descriptor, place, nowait)))
        return self.has_room

    def teach_memory(self, index: int, memory: memoryview, crcs: bytes) -> bool:
        assert crcs == CRCS
        self.taught.append((index, bytes(memory)))
        return self.has_room

    def end(self) -> None:
        self.ended = True


class Descriptors:
    """Descriptors and slabs of an engine; segments from 100 on are not held."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.held: list[Held] = []
        self.slabs = self

    def hold(self, segment: SegmentId) -> Held | None:
        if segment >= 100:
            return None
        self.held.append(Held(int(segment) + 1000, 8))
        return self.held[-1]

    def let_go(self, held: Held) -> None:
        assert self.content.ended
        self.held.remove(held)

    def view(self, grant: Grant, begin: int, length: int) -> memoryview:
        if grant.epoch:
            raise StaleGrant("the cell is another chunk's")
        return memoryview(b"m" * length)


class Ground:
    """One object of `count` chunks, read natively."""

    def __init__(self, count: int = 1) -> None:
        chunks = [ChunkId(number.to_bytes(32, "big")) for number in range(count)]
        pieces = [Piece(chunk, number * LENGTH, LENGTH) for number, chunk in enumerate(chunks)]
        stat = ObjectStat("b", "k", 2, 1, count * LENGTH, "", 0)
        self.opened = Opened(Name("b", "k"), stat, 0, pieces, {}, {})
        self.content = Content([LENGTH] * count)
        self.descriptors = Descriptors(self.content)
        self.reads = NativeReads(
            cast(layer.NativeContent, self.content), cast(SegmentDescriptors, self.descriptors), self.opened
        )

    def teach(self, grant: Grant | None, crcs: bytes | None = CRCS, index: int = 0) -> list[tuple[int, object]]:
        """Teach a piece; return what native code was taught by that."""
        before = len(self.content.taught)
        self.reads.teach(index, grant, lambda chunk, grant: crcs)
        return self.content.taught[before:]


def granted(
    medium: int = MEDIUM_SEGMENT, segment: int = 3, stored: int = LENGTH, logical: int = LENGTH, epoch: int = 0
) -> Grant:
    """Return a grant."""
    return Grant(medium, segment, 4096, stored, logical, epoch=epoch)


def test_a_chunk_in_a_segment_or_in_the_engines_memory_is_taught() -> None:
    ground = Ground()
    assert ground.teach(granted()) == [(0, (1003, 4096, 8))]
    assert ground.teach(granted(MEDIUM_DRAM)) == [(0, b"m" * LENGTH)]
    assert len(ground.descriptors.held) == 1


@pytest.mark.parametrize(
    "grant",
    [
        None,  # the place is not known
        granted(stored=LENGTH - 1),  # not stored as it is
        granted(logical=LENGTH + 1),
        granted(stored=LENGTH + 1, logical=LENGTH + 1),  # another chunk's length
        granted(segment=100),  # no descriptor
        granted(MEDIUM_DRAM, epoch=1),  # moved since
    ],
)
def test_what_is_not_whole_and_in_place_is_pythons(grant: Grant | None) -> None:
    assert Ground().teach(grant) == []


@pytest.mark.parametrize("crcs", [None, b"", CRCS[:4], CRCS + b"sum3"])
def test_a_chunk_without_a_checksum_for_each_granule_is_pythons(crcs: bytes | None) -> None:
    assert Ground().teach(granted(), crcs) == []


def test_a_chunk_that_arrived_inline_is_pythons() -> None:
    ground = Ground()
    ground.opened.inline[ground.opened.pieces[0].chunk] = bytes(LENGTH)
    assert ground.teach(granted()) == []


def test_a_chunk_that_moves_again_and_again_is_pythons_in_the_end() -> None:
    ground = Ground()
    assert [len(ground.teach(granted(segment=number))) for number in range(6)] == [1, 1, 1, 1, 0, 0]


def test_descriptors_are_held_until_the_content_has_ended_and_have_a_bound() -> None:
    ground = Ground(SEGMENTS_MAX + 1)
    for number in range(SEGMENTS_MAX):
        assert ground.teach(granted(segment=number), index=number)
        assert ground.teach(granted(segment=number), index=number)
    assert ground.teach(granted(segment=SEGMENTS_MAX), index=SEGMENTS_MAX) == []
    assert len(ground.descriptors.held) == SEGMENTS_MAX
    ground.reads.close()
    assert ground.descriptors.held == []
