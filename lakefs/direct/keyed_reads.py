"""Keyed blobs found and read without a request, through the keyed index and the page cache.

At a head of a lake, by the indexes of the members on this machine: see `lakefs.direct.key_homes`.

    match   look up the keys             ->  present, absent, or to be asked for
    plan    look up the keys             ->  misses, values to read here with their places, or to be asked for
    read    like any direct read         ->  checked by CRC32C, or to be asked for

Rules kept here:
- An answer is used only if the engine still maintains the index, and is connected, after the look-up: so what it says
  was true at a moment of the call.  `confirm` is called after the bytes were read.
- Bytes are checked by the CRC32C of their entry, whatever the client's `Check`: a chunk that was moved leaves other
  bytes or none behind, of which no entry tells.  A client that checks by BLAKE3 does not read so, because an entry has
  no chunk id: it asks which chunks the values are.
- A value of several parts, one that is not cached and one that fails its check are asked for.
- Whatever was found here is noted for the engine (`lakefs.shares.keys_in_use`), which evicts keys that are used least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lakefs.content.verify import Check
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.direct.key_homes import KeyHomesReader
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.ids import ChunkId, ChunkKind
from lakefs.shared_index.keyed_index import KeyedIndexReader
from lakefs.shared_index.table_format import Found, unpacked

NAMELESS: Final = ChunkId(bytes([ChunkKind.DATA]) + bytes(32))
"""Stands for the id of a chunk that is known by its place alone."""
_KEYS_AT_ONCE: Final = 1024
"""Keys looked up by one native call: a quarter of a millisecond."""


class Plan(NamedTuple):
    """Knowledge of the keys of one call."""

    lengths: list[int]
    """`MISS` for a key without value, or whose value does not fit; NOT_READ for all others."""
    indexes: list[int]
    """Indexes of the keys whose values may be read here."""
    packed: bytearray
    """Place of each of those, as a `PLACE`."""

    @property
    def places(self) -> list[Found]:
        """The same places."""
        return unpacked(self.packed)


class KeyedReads:
    """Look-ups and reads of values by one keyed index, or those of a lake's members."""

    def __init__(
        self,
        index: KeyedIndexReader | KeyHomesReader,
        descriptors: SegmentDescriptors,
        check: Check,
        is_connected: Callable[[], bool],
    ) -> None:
        """`is_connected` returns True while the engine that maintains the index, or the head, is connected."""
        self.index = index
        self.reads = DirectReads(index, descriptors, Check.CRC32C, is_connected)
        """Reads of places that `plan` found."""
        self.has_ids: Final = check is not Check.BLAKE3
        """False if values are to be read by their chunks' ids."""

    def match(self, space: int, keys: list[bytes], sizes: list[int] | None = None) -> list[bool | None]:
        """Return for each key if it has a value, of that length if `sizes` are given; None for keys to be asked for.

        Keys are those of keyed blobs.
        """
        present: list[bool | None] = []
        try:
            for begin in range(0, len(keys), _KEYS_AT_ONCE):
                some = slice(begin, begin + _KEYS_AT_ONCE)
                present += self.index.finder.match(space, keys[some], sizes and sizes[some])
        except ValueError:  # a key of a type of its own
            return [None] * len(keys)
        return present if self.confirm() else [None] * len(keys)

    def lasting(self, space: int, keys: list[bytes], sizes: list[int] | None = None) -> list[bool]:
        """Return for each key if it has a value that does not expire, as far as it is known here.

        `sizes` as in `match`.  A put takes such a value for present.  In a space of which some values expire, one whose
        time is over looks like any other, so the engine is asked for all.
        """
        present = self.match(space, keys, sizes)
        if not any(present):
            return [False] * len(keys)
        # Behind the look-up: it never says less later.
        if self.index.may_expire(space) or not self.confirm():
            return [False] * len(keys)
        return [flag is True for flag in present]

    def plan(self, space: int, keys: list[bytes], rooms: Sequence[int]) -> Plan:
        """Return what is known of keys, each of whose values has so much room."""
        if len(keys) <= _KEYS_AT_ONCE:
            try:
                return Plan(*self.index.finder.plan(space, keys, rooms))
            except ValueError:  # a key of a type of its own
                return Plan([NOT_READ] * len(keys), [], bytearray())
        whole = Plan([], [], bytearray())
        for begin in range(0, len(keys), _KEYS_AT_ONCE):
            end = begin + _KEYS_AT_ONCE
            lengths, indexes, packed = self.plan(space, keys[begin:end], rooms[begin:end])
            whole.lengths.extend(lengths)
            whole.indexes.extend(begin + at for at in indexes)
            whole.packed.extend(packed)
        return whole

    def confirm(self) -> bool:
        """Return True if the engine maintains the index: what was found before was true when it was found."""
        return self.reads.is_kept()
