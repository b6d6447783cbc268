"""Keyed blobs found and read without a request, through the keyed index and the page cache.

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
- Whatever was found here is noted for the engine, of whose keys it evicts those that are used least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lakefs.content.verify import Check
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.direct.index_in_use import Connected, opened_index
from lakefs.direct.read_notes import KeyNotes
from lakefs.grants import batch_plan
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.ids import ChunkId, ChunkKind
from lakefs.shared_index import keyed_index
from lakefs.shared_index.key_format import SOME_EXPIRE, id_of_space
from lakefs.shared_index.keyed_index import KeyedIndexReader
from lakefs.shared_index.table_format import Found, unpacked
from lakefs.steps.steps import Steps
from lakefs.wire.messages import NoteReads, OpenKeyedIndex

NAMELESS: Final = ChunkId(bytes([ChunkKind.DATA]) + bytes(32))
"""Stands for the id of a chunk that is known by its place alone."""
_KEYS_AT_ONCE: Final = 1024
"""Keys looked up by one native call: a quarter of a millisecond."""
_SPACES_NOTED: Final = 64
"""Most spaces of whose keys notes are kept."""
_NEVER: Final = -1


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
    """Look-ups and reads of values by one keyed index."""

    def __init__(
        self, index: KeyedIndexReader, descriptors: SegmentDescriptors, check: Check, is_connected: Callable[[], bool]
    ) -> None:
        """`is_connected` returns True while the engine that maintains the index is connected."""
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
        entry = self.index.table.find(id_of_space(space))  # behind the look-up: it never says less later
        if entry is None or entry[3] == SOME_EXPIRE or not self.confirm():
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


class KeyedIndexUser:
    """The keyed index of one connection, and the reads by it."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self.forget()

    def forget(self) -> None:
        """Drop the index and the notes, as in a child that was forked: they are the parent's."""
        self._reads: KeyedReads | None = None
        self._index_epoch = _NEVER
        self._notes: dict[int, KeyNotes] = {}

    def reads(self) -> KeyedReads | None:
        """Return reads that need no round trip; None when the engine of this connection shares no index."""
        return self._reads if self._index_epoch == self._client.epoch else None

    def renewal(self) -> Steps[None]:
        """Request the engine's index and use it; to be run by itself, when `is_due`."""
        epoch = self._client.epoch
        index = None
        if keyed_index.IS_BUILT and batch_plan.IS_BUILT:
            index = yield from opened_index(OpenKeyedIndex(), KeyedIndexReader)
        if self._client.epoch != epoch:  # it may be a lost engine's: the next read asks
            return
        steps = self._client.steps
        self._reads = (
            None
            if index is None
            else KeyedReads(index, steps.descriptors, steps.check, lambda: self._client.is_held(epoch))
        )
        self._index_epoch = epoch

    @property
    def is_due(self) -> bool:
        """True if the index is to be requested: once on each connection, and after the engine has replaced it."""
        if not self._client.steps.carries_descriptors:
            return False
        return self._index_epoch != self._client.epoch or (self._reads is not None and not self._reads.index.is_current)

    def note(self, space: int, keys: Sequence[bytes]) -> None:
        """Note keys of a space that were used without a request; tell the engine of them now and then."""
        notes = self._notes.get(space)
        if notes is None:
            if len(self._notes) >= _SPACES_NOTED:
                self._notes.clear()
            notes = self._notes[space] = KeyNotes()
        if notes.note(keys):
            self.tell(space)

    def tell(self, space: int) -> None:
        """Tell the engine of the keys noted by now.  Before a put: what that evicts depends on them."""
        notes = self._notes.get(space)
        if notes is not None and (keys := notes.take()):
            self._client.tell(NoteReads([], space, keys))
