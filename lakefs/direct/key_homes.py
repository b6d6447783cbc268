"""Key homes: the ring of keys of a lake, and the keyed indexes of the members on this machine, as a client has them.

The head makes the memory, one for each ring epoch and set of indexes (`engine.head.local_keys`), and replaces its magic
by zeros when another one is to be used (`lakefs.shared_index.homes_format`).

Rules kept here:
- A key is looked up in the keyed index of its home, as at one engine (`lakefs.shared_index.keyed_index`).  Of a key
  whose home is elsewhere nothing is known.
- What is found was so at a moment of the look-up, if everything `is_current` after it: no other ring is in use, no
  index was replaced, and the process of each member lives (its stamps say that).
- Places name segments of several members: the highest 16 bits of a segment are the number of its home's index, which
  the head gives to one index, and takes back when it has given all others.
- The memory may be any bytes: that costs time, and makes misses and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.host.aligned_mapping import map_aligned
from lakefs.host.descriptors import is_cuttable
from lakefs.shared_index.homes_format import FORMAT_VERSION, HEADER, MAGIC, homes_bytes
from lakefs.shared_index.keyed_index import HomesFinder, KeyedIndexReader
from lakefs.shared_index.table_format import Found
from lakefs.stamps.stamps import StampReader


class KeyHomesReader:
    """A read-only mapping of key homes, and of what belongs to it; used from any thread of the process."""

    def __init__(self, descriptors: Sequence[int], numbers: Sequence[int]) -> None:
        """Map all by the head's descriptors, which stay the caller's: key homes, then index and stamps of each home.

        `numbers`: those of the indexes.  PermissionDenied: memory that could be shrunk under the mapping.
        StoreDamaged: it is of another version, or was replaced.
        """
        first, *others = descriptors
        if is_cuttable(first):
            raise PermissionDenied("the key homes lie in a file that could be cut under their readers")
        if len(others) != 2 * len(numbers):
            raise StoreDamaged("each home has an index and stamps", subject="key homes")
        self._indexes: Final = [KeyedIndexReader(descriptor) for descriptor in others[::2]]
        self._stamps: Final = [StampReader(descriptor) for descriptor in others[1::2]]
        try:
            with map_aligned(first, HEADER.size)[0] as memory:
                magic, version, vnodes, self.ring_epoch, *_ = HEADER.unpack_from(memory)
            if magic != MAGIC or version != FORMAT_VERSION:
                raise ValueError("they are of another version, or were replaced")
            mapped, begin = map_aligned(first, homes_bytes(vnodes))
            self._memory = memoryview(mapped).toreadonly()[begin : begin + homes_bytes(vnodes)]
            ring = self._memory[HEADER.offset_of("hash_key") :]
            finders = [index.finder for index in self._indexes]
            self.finder: Final = HomesFinder(ring, vnodes, finders, list(numbers))
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"the key homes cannot be used: {error}", subject="key homes") from error

    @property
    def is_current(self) -> bool:
        """True while the head uses this ring and these indexes, and their members maintain them."""
        if bytes(self._memory[: len(MAGIC)]) != MAGIC:
            return False
        return all(index.is_current for index in self._indexes) and all(stamps.is_live for stamps in self._stamps)

    def may_expire(self, space: int) -> bool:
        """Return True unless no value of this space expires, at any home here."""
        return any(index.may_expire(space) for index in self._indexes)

    # Places of chunks are not known by their ids here.

    def find(self, chunk: bytes) -> Found | None:
        """Return None."""
        return None

    def find_many(self, chunks: list[bytes]) -> list[Found | None]:
        """Return None for each chunk."""
        return [None] * len(chunks)

    def find_packed(self, chunks: Sequence[bytes], places: bytearray) -> int:
        """Write no place for any chunk; return 0."""
        places[:] = bytes(len(places))
        return 0
