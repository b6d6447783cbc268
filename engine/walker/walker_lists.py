"""Members' lists of shards of one range of digests, read page by page and merged as windows.

    window = await Windows(lists).next()        per member its shards of the same chunks, in the order of chunks
    by_partition(window, bits)                  the same, partition by partition

Rules kept here:
- A window holds all listed shards of each of its chunks: a chunk at the end of a page waits for the next page.
- Memory: for each member a page, and what is left of the one before; at most 255 shards of one chunk.
- A list that fails ends: its member counts as one that has not answered, from that window on.  What it had listed in
  earlier windows is true.
- A shard that its member knows to be damaged is a row of DAMAGED_BYTES bytes, in its place.
- A page is no instant.  A shard that is stored or dropped during the walk is in its list or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from engine.host.tasks import run_all
from engine.members.ports import Members
from lakefs.errors import EngineUnreachable, LakeError, ProtocolError
from lakefs.ids import MemberId, Partition
from lakefs.wire import messages as m

DAMAGED_BYTES: Final = 0
"""Length of a damaged shard in a list: no other has it."""
_log: Final = structlog.get_logger(__name__)


@dataclass
class Columns:
    """Shards of one member, in the order of their chunks' ids and numbers: one list for each field."""

    chunks: list[bytes] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    chunk_lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.chunks)

    def append(self, other: Columns | m.ShardsListed) -> None:
        """Add shards behind these."""
        self.chunks += other.chunks
        self.shards += other.shards
        self.lengths += other.lengths
        self.crcs += other.crcs
        self.chunk_lengths += other.chunk_lengths

    def part(self, begin: int, end: int) -> Columns:
        """Return a copy of some of the shards."""
        return Columns(
            self.chunks[begin:end],
            self.shards[begin:end],
            self.lengths[begin:end],
            self.crcs[begin:end],
            self.chunk_lengths[begin:end],
        )

    def take(self, count: int) -> Columns:
        """Remove and return the first shards."""
        taken = self.part(0, count)
        for column in (self.chunks, self.shards, self.lengths, self.crcs, self.chunk_lengths):
            del column[:count]
        return taken


Window = Sequence[tuple[MemberId, Columns]]


class ShardList:
    """The list of one member.  Used by one task."""

    def __init__(self, members: Members, member: MemberId, begin: bytes, end: bytes, page: int) -> None:
        self.member: Final = member
        self.has_failed = False
        self._members = members
        self._range = begin, end
        self._page = page
        self._after = b""
        self._is_done = False
        self._buffer = Columns()

    @property
    def last(self) -> bytes | None:
        """The chunk that more pages may have shards of; None if there are no more pages."""
        return None if self._is_done or not self._buffer.chunks else self._buffer.chunks[-1]

    @property
    def is_done(self) -> bool:
        """True if there are no more pages."""
        return self._is_done

    async def fetch(self) -> None:
        """Read pages until there is one with a shard, or no more."""
        try:
            while not self._is_done:
                request = m.ListShards(*self._range, self._after, self._page)
                reply = await self._members.call(self.member, request)
                reply.body.release()
                page = reply.message
                assert isinstance(page, m.ShardsListed), page
                if len(page.chunk_lengths) != len(page.chunks):
                    raise ProtocolError("a list of shards has not the length of each one's chunk")
                self._after = page.next_after
                self._is_done = not page.next_after
                columns = _with_damaged(page) if page.damaged_chunks else page
                self._buffer.append(columns)
                if columns.chunks:
                    return
        except LakeError as error:
            if not isinstance(error, EngineUnreachable):  # that it is away was said once, by its link
                _log.warning("a member's shards are not listed", member=self.member.hex(), reason=error.message)
            self.has_failed = self._is_done = True
            self._buffer = Columns()

    def take(self, boundary: bytes | None) -> Columns:
        """Remove and return the shards of chunks below the boundary; None: of all."""
        count = len(self._buffer) if boundary is None else bisect_left(self._buffer.chunks, boundary)
        return self._buffer.take(count)


def _with_damaged(page: m.ShardsListed) -> Columns:
    """Return the shards of a page, the damaged ones among them."""
    good = zip(page.chunks, page.shards, page.lengths, page.crcs, page.chunk_lengths, strict=True)
    named = zip(page.damaged_chunks, page.damaged_shards, strict=True)
    damaged = [(chunk, shard, DAMAGED_BYTES, 0, DAMAGED_BYTES) for chunk, shard in named]
    return Columns(*map(list, zip(*sorted([*good, *damaged]), strict=True)))


class Windows:
    """The windows of several lists, in the order of chunks.  Used by one task."""

    def __init__(self, lists: Sequence[ShardList]) -> None:
        self._lists = lists
        self._waiting = list(lists)
        """Lists of which a page is needed for the next window; none: the last window was returned."""

    async def next(self) -> Window | None:
        """Return the next window with a shard in it; None when all lists have ended."""
        while self._waiting:
            await run_all(ShardList.fetch, self._waiting)
            boundary = min((one.last for one in self._lists if one.last is not None), default=None)
            taken = [(one.member, one.take(boundary)) for one in self._lists]
            self._waiting = [one for one in self._lists if not one.is_done and one.last in (None, boundary)]
            window = [(member, columns) for member, columns in taken if len(columns)]
            if window:
                return window
        return None


def by_partition(window: Window, partition_bits: int) -> Iterator[tuple[Partition, Window]]:
    """Yield the parts of a window that are of one partition and of one kind of chunk, in the order of chunks."""
    at = [0] * len(window)
    while True:
        first = min((c.chunks[i] for (_, c), i in zip(window, at, strict=True) if i < len(c)), default=None)
        if first is None:
            return
        partition = (first[1] << 8 | first[2]) >> 16 - partition_bits
        boundary = _end_of_partition(first[0], partition, 16 - partition_bits)
        ends = [bisect_left(c.chunks, boundary, i) for (_, c), i in zip(window, at, strict=True)]
        part = [
            (member, columns.part(begin, end))
            for (member, columns), begin, end in zip(window, at, ends, strict=True)
            if begin < end
        ]
        yield Partition(partition), part
        at = ends


def _end_of_partition(kind: int, partition: int, shift: int) -> bytes:
    """Return the least id of a chunk behind those of a kind in a partition."""
    return ((kind << 16) + (partition + 1 << shift)).to_bytes(3, "big")
