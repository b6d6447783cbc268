"""An object opened for reading (its pieces, their places, its lease), and `Access`: how a client reads.

No request is sent and nothing is read here; see `lakefs.get.objects` for objects and `lakefs.get.fetch` for chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from lakefs.content.verify import Check
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.read_ahead import ReadAheadWindow
from lakefs.ids import ChunkId
from lakefs.names import Name
from lakefs.wire.media import BY_FABRIC, MEDIA_FABRIC, PLACES
from lakefs.wire.messages import Grant, ObjectStat, OpenedObject
from lakefs.wire.offers import Offers

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric

AT_ONCE_BYTES = 256 << 10
"""Most cached payload that is copied and checked between two steps, in the driver's own thread: 60 us of a loop."""


Learned = tuple[Name, ObjectStat, bytes]
"""A name, its stat, and the stamps of what both rest on; b"": the answer may not be repeated."""


class Learner(Protocol):
    """Takes answers about names that may be repeated while their stamps stand; see `lakefs.known`."""

    @property
    def wants_stamps(self) -> bool:
        """True if answers should be asked for with stamps, to be learned."""

    def learn(self, answers: Sequence[Learned], epoch: int, *, is_opened: bool) -> None:
        """Learn durable answers about current versions of names; `is_opened`: to a request to open them.

        `epoch`: the number of the connection that they arrived on.
        """


@dataclass(frozen=True)
class Access:
    """Settings of a client's reads: its descriptors, the offers of its connection, and its progress callback.

    `progress(bytes_done, bytes_already_there)` is called with increments from the driver's own thread.
    """

    descriptors: SegmentDescriptors
    offers: Offers
    check: Check = Check.BLAKE3
    media: int = 0
    """Media of grants that the client understands beside segments and inline; see `OpenObjects`."""
    at_once_bytes: int = AT_ONCE_BYTES
    """Most bytes that may be copied and checked between two steps."""
    progress: Callable[[int, int], None] = lambda done, present: None
    is_held: Callable[[int], bool] = lambda epoch: True
    """Returns True if leases of that epoch are still held: its connection is open."""
    learner: Learner | None = None
    """Learns the answers to requests that open names."""
    fabric: ClientFabric | None = None
    """The client's RDMA, over a network; None: bytes are streamed."""

    @property
    def media_now(self) -> int:
        """Media for a request: those that the client understands, and READs while it has a queue pair."""
        has_link = self.fabric is not None and self.fabric.link is not None
        return self.media | MEDIA_FABRIC if has_link else self.media

    def reads_here(self, grant: Grant | None) -> bool:
        """Return True if the client reads the bytes of a grant itself; else the engine sends them."""
        return grant is not None and grant.medium in self.offers.places


class Piece(NamedTuple):
    """One chunk of a blob, with its offset and length in the blob."""

    chunk: ChunkId
    offset: int
    length: int


@dataclass(slots=True)
class Opened:
    """An object opened for reading: its pieces in order, their known places, and its lease."""

    name: Name
    stat: ObjectStat
    lease: int
    pieces: list[Piece]
    grants: dict[ChunkId, Grant]
    inline: dict[ChunkId, bytes]
    epoch: int = 0
    """Number of the connection that it was opened on; its lease ends with that connection."""
    stamps: bytes = b""
    """Stamps of the records that the name was read from, of that connection's engine; see `lakefs.stamps.stamps`."""
    crcs: dict[ChunkId, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """CRCs of the granules of chunks that `lakefs.get.cached` has read from; not of all."""
    _window: ReadAheadWindow | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def window(self) -> ReadAheadWindow:
        """The prediction of its reader's next bytes; made on first use, by reads of ranges."""
        if self._window is None:
            self._window = ReadAheadWindow()
        return self._window

    def overlapping(self, offset: int, length: int) -> list[Piece]:
        """Return the pieces that hold bytes of [offset, offset + length)."""
        if length <= 0 or not self.pieces:
            return []
        first = bisect_right(self.pieces, offset, key=_start_of) - 1
        return self.pieces[first : bisect_left(self.pieces, offset + length, lo=first, key=_start_of)]


def opened_at(name: Name, answer: OpenedObject, epoch: int = 0) -> Opened:
    """Make an `Opened` from an answer to `OpenObjects`: lease, places, and the layout if the answer has it.

    Inline payloads are left out.  `epoch`: the number of the connection that the answer arrived on.
    """
    opened = Opened(name, answer.stat, answer.lease, pieces_of(answer.chunks, answer.lengths), {}, {}, epoch)
    for chunk, grant in zip(answer.chunks, answer.grants, strict=True):
        if grant.medium in PLACES:
            opened.grants[ChunkId(chunk)] = noted_grant(grant, epoch)
    return opened


def noted_grant(grant: Grant, epoch: int) -> Grant:
    """Return a grant as it is kept: one of MEDIUM_FABRIC has the connection's number, as its key ends with that."""
    return msgspec.structs.replace(grant, epoch=epoch) if grant.medium in BY_FABRIC else grant


def chunk_of_stat(stat: ObjectStat) -> ChunkId:
    """Return the chunk that the object's blob id names."""
    return ChunkId(stat.blob)


def pieces_of(chunks: Sequence[bytes], lengths: Sequence[int]) -> list[Piece]:
    """Return the pieces of a layout, in order."""
    if len(chunks) == 1:
        return [Piece(ChunkId(chunks[0]), 0, lengths[0])]
    offsets = accumulate(lengths, initial=0)
    return [
        Piece(ChunkId(chunk), offset, length) for chunk, offset, length in zip(chunks, offsets, lengths, strict=False)
    ]


def _start_of(piece: Piece) -> int:
    return piece.offset
