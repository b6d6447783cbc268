"""Lengths and checksums of chunks that this process has stored, or has read whole: a bounded memory of the last ones.

Rules kept here:
- A chunk is noted only when its bytes were hashed here, or by the caller that stores it.  So what is known is a
  function of the chunk's id, and is true for ever.  It does not say that the chunk is stored.
- A member that says another length of a known chunk is wrong.  Its shard of that chunk counts nowhere, so the shard is
  stored elsewhere: at that member it would never be found.  That holds until the chunk is offered the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from lakefs.ids import ChunkId, MemberId
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
        self._wrong: dict[ChunkId, set[tuple[MemberId, int]]] = {}
        """Members, each with a shard of the chunk, that said another length of a known chunk last."""

    def note(self, chunk: ChunkId, length: int, crcs: bytes) -> None:
        """Note a chunk whose bytes were hashed."""
        self._known[chunk] = Known(length, crcs)
        self._known.move_to_end(chunk)
        if len(self._known) > self._count_max:
            oldest, _ = self._known.popitem(last=False)
            self._wrong.pop(oldest, None)

    def get(self, chunk: ChunkId) -> Known | None:
        """Return what is known of a chunk."""
        return self._known.get(chunk)

    def note_wrong(self, chunk: ChunkId, wrong: set[tuple[MemberId, int]]) -> None:
        """Note which members, each with a shard of a known chunk, said another length; those noted before are none."""
        if wrong:
            self._wrong[chunk] = wrong
        else:
            self._wrong.pop(chunk, None)

    def is_wrong(self, chunk: ChunkId, member: MemberId, shard: int) -> bool:
        """Return True if the member said another length of this chunk, with this shard, when it was asked last."""
        return (member, shard) in self._wrong.get(chunk, ())
