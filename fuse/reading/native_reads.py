"""One opened object as native threads read it: its pieces are taught as Python has read them.

Python answers the first read of each chunk, and so fetches its place and its checksums.  From then on the chunk is
native code's, until a check of it fails, or the object is closed.  A chunk that was moved, or is damaged, fails its
check; then Python answers, which locates it anew and decides what is damaged, and may teach it again.

Rules kept here:
- Taught are whole chunks, in segments or in the DRAM tier.  What came inline Python answers.
- A cell of the DRAM tier may become another chunk's at any time: the check of the copied bytes finds that.
- Descriptors of segments are held from the first chunk in them until the content has ended.
- At most `SEGMENTS_MAX` segments are held for one object, and `HELD_MAX` of `lakefs.grants.descriptors` for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from fuse.native import layer
from lakefs.errors import StaleGrant
from lakefs.get.opened import Opened
from lakefs.grants.descriptors import Held, SegmentDescriptors
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import GRANULE_BYTES
from lakefs.wire.grants import Grant
from lakefs.wire.media import IN_SLABS

SEGMENTS_MAX: Final = 64
_TEACHINGS_PER_PIECE: Final = 4
"""A chunk that is moved more often is Python's: what was taught before is kept as long as the content."""


class NativeReads:
    """The native content of one opened object, and the descriptors that it reads from."""

    def __init__(self, content: layer.NativeContent, descriptors: SegmentDescriptors, opened: Opened) -> None:
        self._content = content
        self._descriptors = descriptors
        self._opened = opened
        self._held: dict[SegmentId, Held] = {}
        self._taught = 0
        self._taught_max = _TEACHINGS_PER_PIECE * len(opened.pieces)

    @classmethod
    def of(cls, descriptors: SegmentDescriptors, opened: Opened, size_bytes: int) -> Self | None:
        """Make the native content of an object; None if there is no layer, or the object is not of its kind."""
        lengths = [piece.length for piece in opened.pieces]
        if not layer.answers_reads() or len(lengths) > layer.CONTENT_PIECES_MAX:
            return None
        try:
            return cls(layer.NativeContent(size_bytes, lengths), descriptors, opened)
        except (OSError, ValueError):
            return None

    def add(self, handle: int) -> None:
        """Have the reads of a handle answered from here."""
        self._content.add(handle)

    def knows(self, index: int) -> bool:
        """Return True if a piece is read natively."""
        return self._content.knows(index)

    def teach(self, index: int, grant: Grant | None, crcs_of: Callable[[ChunkId, Grant], bytes | None]) -> None:
        """Have a piece read natively from its granted place, if that can be; `crcs_of` returns known checksums."""
        piece = self._opened.pieces[index]
        if grant is None or piece.chunk in self._opened.inline or self._taught >= self._taught_max:
            return
        if not grant.logical_bytes == grant.stored_bytes == piece.length:
            return
        try:
            crcs = crcs_of(piece.chunk, grant)
            if crcs is None or len(crcs) != 4 * -(-piece.length // GRANULE_BYTES):
                return
            if grant.medium in IN_SLABS:
                cell = self._descriptors.slabs.view(grant, 0, piece.length)
                self._taught += self._content.teach_memory(index, cell, crcs)
            elif (held := self._hold(SegmentId(grant.segment))) is not None:
                self._taught += self._content.teach(index, held.descriptor, grant.offset, held.nowait, crcs)
        except StaleGrant:
            return  # it was moved since it was read

    def close(self) -> None:
        """End the content, then let its descriptors go."""
        self._content.end()
        while self._held:
            self._descriptors.let_go(self._held.popitem()[1])

    def _hold(self, segment: SegmentId) -> Held | None:
        held = self._held.get(segment)
        if held is None and len(self._held) < SEGMENTS_MAX:
            held = self._descriptors.hold(segment)
            if held is not None:
                self._held[segment] = held
        return held
