"""The table of chunk places in Python: the same bytes of the same calls as `lakefs.shared_index.table.SharedTable`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Final

import msgspec

from lakefs.host.crc import crc32c
from lakefs.ids import ID_BYTES, is_well_formed
from lakefs.limits import HOT_INDEX_ATTEMPTS
from lakefs.shared_index.table_format import (
    DEAD,
    ENTRIES_OFFSET,
    ENTRY,
    ENTRY_BYTES,
    PLACE,
    PROBE_SLOTS,
    SHIFT_SLOTS,
    STRIPE_COUNT,
    STRIPES_OFFSET,
    VACANT,
    Found,
    entries_max,
    is_capacity,
    stripe_shift,
    table_bytes,
    unpack_place,
)
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT

Memory = mmap | memoryview | bytearray

_pack: Final = msgspec.msgpack.Encoder().encode
_U32: Final = struct.Struct("<I")
_UNPLACED: Final = (0, 0, 0, 0)
_NO_DIGEST: Final = bytes(32)


CHECKED_BYTES: Final = ENTRY.offset_of("check")


@dataclass(frozen=True)
class Entry:
    """One slot, unpacked."""

    version: int
    kind: int
    tier: int
    distance: int
    digest: bytes
    segment: int
    offset: int
    stored_bytes: int
    crc: int
    check: int

    @property
    def chunk(self) -> bytes:
        """The chunk's id; meaningless if `kind` is VACANT or DEAD."""
        return bytes([self.kind]) + self.digest

    @property
    def found(self) -> Found:
        """The chunk's place, as `find` returns it."""
        return self.tier, self.segment, self.offset, self.stored_bytes, self.crc


def home_of(digest: bytes, capacity: int) -> int:
    """Return the slot at which a lookup of a chunk begins."""
    return int.from_bytes(digest[:8], "little") >> (65 - capacity.bit_length())


def pack_entry(
    version: int, kind: int, tier: int, distance: int, digest: bytes, place: tuple[int, int, int, int]
) -> bytes:
    """Return the 64 bytes of an entry that is not being written; `place` is (segment, offset, stored_bytes, crc)."""
    body = ENTRY.pack(version, kind, tier, distance, digest, *place, 0)[:CHECKED_BYTES]
    return body + _U32.pack(crc32c(body))


def unpack_entry(raw: bytes) -> Entry:
    """Unpack an entry's 64 bytes, unchecked."""
    return Entry(*ENTRY.unpack(raw))


class TwinTable:
    """A table in memory that the caller maps; read-only memory gives a table that only finds.

    ValueError for a capacity that is none, for memory that is too short, and for an id that is not well-formed;
    OverflowError for a place that does not fit.
    """

    def __init__(self, memory: Memory, capacity: int) -> None:
        if not is_capacity(capacity):
            raise ValueError(f"a table has no {capacity} slots")
        self._view = memoryview(memory).cast("B")
        if len(self._view) < table_bytes(capacity):
            raise ValueError(f"{len(self._view)} bytes are too few for a table of {capacity} slots")
        self.capacity: Final = capacity
        self.count = 0
        """Chunks that this writer put, or `audit` found."""
        self.dead = 0
        """Slots lost to marks."""
        self._limit = entries_max(capacity)
        self._shift = stripe_shift(capacity)

    # --- finding -----------------------------------------------------------------------------------

    def find(self, chunk: bytes) -> Found | None:
        """Return the chunk's place; None when it is not known here."""
        _check_id(chunk)
        home = home_of(chunk[1:], self.capacity)
        for _ in range(HOT_INDEX_ATTEMPTS):
            before = self._stripes_at(home)
            is_known, entry = self._look(chunk, home)
            if entry is not None:
                return entry.found
            if is_known and before == self._stripes_at(home) and not (before[0] | before[1]) & 1:
                return None
        return None

    def find_many(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """Return the same for each chunk, in order."""
        return [self.find(chunk) for chunk in chunks]

    def find_packed(self, chunks: Sequence[bytes], into: bytearray | memoryview) -> int:
        """Write a `PLACE` for each chunk into `into`; return how many were found.  Tier 0: not known."""
        if len(into) < len(chunks) * PLACE.size:
            raise ValueError("there is no room for so many places")
        found = self.find_many(chunks)
        for index, place in enumerate(found):
            tier, *where = place or (0, 0, 0, 0, 0)
            PLACE.pack_into(into, index * PLACE.size, *where, tier)
        return len(found) - found.count(None)

    def pack_grants(
        self, chunks: Sequence[bytes], instead: Sequence[Found | None] | None = None
    ) -> tuple[bytes, int] | None:
        """Return the grants of chunks (`lakefs.wire.grants.Grant`) in msgpack, as in an answer, and the least length.

        Returns None unless all chunks are known to lie in segments or slabs.  The place that `instead` has for a chunk
        is used without a look into the table.
        """
        given = [None] * len(chunks) if instead is None else instead
        if len(given) != len(chunks):
            raise ValueError("as many chunks as places in their stead")
        packed, shortest = [_array_head(len(chunks))], 0xFFFF_FFFF
        for found, told in zip(self.find_many(chunks), given, strict=True):
            place = told or found
            if place is None or place[0] not in (MEDIUM_SEGMENT, MEDIUM_DRAM):
                return None
            tier, segment, offset, length, crc = place
            segment, epoch = unpack_place(segment) if tier == MEDIUM_DRAM else (segment, 0)
            packed.append(_pack((tier, segment, offset, length, length, 0, crc, epoch)))
            shortest = min(shortest, length)
        return b"".join(packed), shortest

    def _look(self, chunk: bytes, home: int) -> tuple[bool, Entry | None]:
        """Return whether every slot that was looked at was whole, and the entry that was found."""
        for distance in range(PROBE_SLOTS):
            raw = self._raw(home + distance)
            version = _U32.unpack_from(raw)[0]
            if version & 1 or version != self._version(home + distance):
                return False, None
            entry = unpack_entry(raw)
            if entry.kind == VACANT or entry.distance < distance:
                return True, None
            if entry.kind == chunk[0] and entry.digest == chunk[1:]:
                is_whole = crc32c(raw[:CHECKED_BYTES]) == entry.check
                return is_whole, entry if is_whole else None
        return True, None

    # --- writing -----------------------------------------------------------------------------------

    def put(self, chunk: bytes, tier: int, segment: int, offset: int, stored_bytes: int, crc: int) -> bool:
        """Enter the chunk's place.  Returns False when the table has no room: the chunk is then not found any more."""
        _check_id(chunk)
        if not (0 <= tier < 1 << 8 and 0 <= segment < 1 << 64):
            raise OverflowError("tier or segment does not fit an entry")
        if not all(0 <= number < 1 << 32 for number in (offset, stored_bytes, crc)):
            raise OverflowError("offset, length or checksum does not fit an entry")
        home = home_of(chunk[1:], self.capacity)
        place = (segment, offset, stored_bytes, crc)
        slot, is_there = self._search(chunk, home)
        if is_there:
            self._write(slot, chunk[0], tier, slot - home, chunk[1:], place)
            return True
        if slot - home == PROBE_SLOTS or self.count + self.dead >= self._limit:
            return False
        end = self._run_end(slot)
        if end is None:
            return False
        for target in range(end, slot, -1):
            self._move(target - 1, target)
        self._write(slot, chunk[0], tier, slot - home, chunk[1:], place)
        self.count += 1
        return True

    def remove(self, chunk: bytes) -> bool:
        """Remove the chunk; return whether it was there."""
        _check_id(chunk)
        home = home_of(chunk[1:], self.capacity)
        slot, is_there = self._search(chunk, home)
        if not is_there:
            return False
        self.count -= 1
        end = slot + 1
        while (entry := self._entry(end)).kind != VACANT and entry.distance:
            end += 1
            if end - slot > SHIFT_SLOTS:
                self._write(slot, DEAD, 0, slot - home, chunk[1:], _UNPLACED)
                self.dead += 1
                return True
        self._turn_stripes(slot, end - 1)
        for target in range(slot, end - 1):
            self._move(target + 1, target)
        self._vacate(end - 1)
        self._turn_stripes(slot, end - 1)
        return True

    def clear(self) -> None:
        """Remove all entries."""
        last = self.capacity + PROBE_SLOTS - 1
        self._turn_stripes(0, last)
        for slot in range(last + 1):
            if self._entry(slot).kind != VACANT:
                self._vacate(slot)
        self._turn_stripes(0, last)
        self.count = self.dead = 0

    def audit(self) -> bool:
        """Return whether every entry is whole and where it belongs; set `count` and `dead`.  Reads the whole table."""
        count = dead = 0
        before = -1
        for slot in range(self.capacity + PROBE_SLOTS):
            raw = self._raw(slot)
            entry = unpack_entry(raw)
            if entry.version & 1:
                return False
            if entry.kind == VACANT:
                before = -1
                continue
            home = home_of(entry.digest, self.capacity)
            is_in_order = entry.distance <= before + 1 and entry.distance < PROBE_SLOTS
            if crc32c(raw[:CHECKED_BYTES]) != entry.check or slot - home != entry.distance or not is_in_order:
                return False
            if entry.kind == DEAD:
                dead += 1
            elif is_well_formed(entry.chunk):
                count += 1
            else:
                return False
            before = entry.distance
        self.count, self.dead = count, dead
        return True

    # --- slots -------------------------------------------------------------------------------------

    def _search(self, chunk: bytes, home: int) -> tuple[int, bool]:
        """Return the chunk's slot, or the one where it would be (`home` + PROBE_SLOTS: none), and whether it exists."""
        for distance in range(PROBE_SLOTS):
            entry = self._entry(home + distance)
            if entry.kind == VACANT or entry.distance < distance:
                return home + distance, False
            if entry.kind == chunk[0] and entry.digest == chunk[1:]:
                return home + distance, True
        return home + PROBE_SLOTS, False

    def _run_end(self, slot: int) -> int | None:
        """Return the empty slot after a run; None when an entry would get too far from home or too many move."""
        for end in range(slot, slot + SHIFT_SLOTS):
            entry = self._entry(end)
            if entry.kind == VACANT:
                return end
            if entry.distance + 1 >= PROBE_SLOTS:
                return None
        return None

    def _move(self, source: int, target: int) -> None:
        entry = self._entry(source)
        place = (entry.segment, entry.offset, entry.stored_bytes, entry.crc)
        distance = entry.distance + target - source
        self._write(target, entry.kind, entry.tier, distance, entry.digest, place)

    def _vacate(self, slot: int) -> None:
        version = self._begin(slot)
        begin = ENTRIES_OFFSET + slot * ENTRY_BYTES
        self._view[begin + _U32.size : begin + ENTRY_BYTES] = bytes(ENTRY_BYTES - _U32.size)
        _U32.pack_into(self._view, begin, version)

    def _write(
        self, slot: int, kind: int, tier: int, distance: int, digest: bytes, place: tuple[int, int, int, int]
    ) -> None:
        begin = ENTRIES_OFFSET + slot * ENTRY_BYTES
        version = (self._version(slot) + 2) & 0xFFFF_FFFF
        raw = pack_entry(version, kind, tier, distance, digest, place)
        self._begin(slot)
        self._view[begin + _U32.size : begin + ENTRY_BYTES] = raw[_U32.size :]
        _U32.pack_into(self._view, begin, version)

    def _begin(self, slot: int) -> int:
        """Make the version odd; return the version that the slot gets afterwards."""
        version = self._version(slot)
        _U32.pack_into(self._view, ENTRIES_OFFSET + slot * ENTRY_BYTES, version | 1)
        return (version + 2) & 0xFFFF_FFFF

    def _entry(self, slot: int) -> Entry:
        return unpack_entry(self._raw(slot))

    def _raw(self, slot: int) -> bytes:
        begin = ENTRIES_OFFSET + slot * ENTRY_BYTES
        return bytes(self._view[begin : begin + ENTRY_BYTES])

    def _version(self, slot: int) -> int:
        version: int = _U32.unpack_from(self._view, ENTRIES_OFFSET + slot * ENTRY_BYTES)[0]
        return version

    # --- stripes -----------------------------------------------------------------------------------

    def _stripe(self, slot: int) -> int:
        return min(slot >> self._shift, STRIPE_COUNT - 1)

    def _stripes_at(self, home: int) -> tuple[int, int]:
        first, last = self._stripe(home), self._stripe(home + PROBE_SLOTS - 1)
        at = STRIPES_OFFSET
        return (
            _U32.unpack_from(self._view, at + first * _U32.size)[0],
            _U32.unpack_from(self._view, at + last * _U32.size)[0],
        )

    def _turn_stripes(self, first_slot: int, last_slot: int) -> None:
        """Make the versions of the stripes odd before entries move, and even again afterwards."""
        for stripe in range(self._stripe(first_slot), self._stripe(last_slot) + 1):
            at = STRIPES_OFFSET + stripe * _U32.size
            _U32.pack_into(self._view, at, (_U32.unpack_from(self._view, at)[0] + 1) & 0xFFFF_FFFF)


def _array_head(length: int) -> bytes:
    """Return the first bytes of a msgpack array of that length."""
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2) if length < 1 << 16 else b"\xdd" + length.to_bytes(4)


def _check_id(chunk: bytes) -> None:
    if not is_well_formed(chunk):
        raise ValueError(f"an id has {ID_BYTES} bytes and a kind that is known")
