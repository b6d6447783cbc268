"""Lengths and checksums of chunks that this process has stored, or has read whole: a bounded memory of the last ones.

Rules kept here:
- A chunk is noted only when its bytes were hashed here, or by the caller that stores it.  So what is known is a
  function of the chunk's id, and is true for ever.  It does not say that the chunk is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from lakefs.ids import ChunkId
from lakefs.limits import KNOWN_CHUNKS_MAX


class Known(NamedTuple):
    """A chunk's length, and the CRC32C of each of its granules, 4 bytes each."""

    length: int
    crcs: bytes


class KnownChunks:
    """The chunks that were noted last."""

    def __init__(self, count_max: int = KNOWN_CHUNKS_MAX) -> None:
        self._count_max = count_max
        self._known: OrderedDict[ChunkId, Known] = OrderedDict()

    def note(self, chunk: ChunkId, length: int, crcs: bytes) -> None:
        """Note a chunk whose bytes were hashed."""
        self._known[chunk] = Known(length, crcs)
        self._known.move_to_end(chunk)
        if len(self._known) > self._count_max:
            self._known.popitem(last=False)

    def get(self, chunk: ChunkId) -> Known | None:
        """Return what is known of a chunk."""
        return self._known.get(chunk)
