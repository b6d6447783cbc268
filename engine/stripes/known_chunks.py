"""Lengths and checksums of chunks that this process has stored, or has read whole: a bounded memory of the last ones.

Rules kept here:
- A chunk is noted only when its bytes were hashed here, or by the caller that stores it.  So what is known is a
  function of the chunk's id, and is true for ever.  It does not say that the chunk is stored.
- A member that says another length of a known chunk is wrong.  Its shard of that chunk counts nowhere until it says the
  right one, so the shard is stored elsewhere: at that member it would never be found.  Once it is gone there it may be
  stored there anew.
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

    def note_said(self, chunk: ChunkId, member: MemberId, shard: int, *, right: bool) -> None:
        """Note whether a member said the right lengths of its shard of a known chunk, or has none now."""
        if not right:
            self._wrong.setdefault(chunk, set()).add((member, shard))
        elif chunk in self._wrong:
            self._wrong[chunk].discard((member, shard))

    def is_wrong(self, chunk: ChunkId, member: MemberId, shard: int) -> bool:
        """Return True if the member said another length of this chunk, with this shard, when it was asked last."""
        return (member, shard) in self._wrong.get(chunk, ())
