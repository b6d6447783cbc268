"""Bytes of the shared index's table: its header, its stripe counters, its entries.

    header page   4,096 bytes: the maker's boot id, the store's id, the size
    stripes       4,096 counters of 4 bytes: odd while entries of that part of the table move towards their homes
    entries       capacity + 64 slots of 64 bytes, one cache line each

Rules kept here:
- A chunk's home is the top bits of the digest's first 8 bytes, read as a little-endian number: digests are uniform.
  A client that chooses its contents' digests can crowd a home, so a chunk lies at most `PROBE_SLOTS` - 1 slots behind
  its home, or is not in the table.
- Slots behind the last home hold entries pushed past the end: nothing wraps around.  The last slot is always empty.
- An entry's version is odd while it is written and grows by two with each write; its check covers all fields before it.
- A persistent table is used only if its header and every entry are valid (`docs/format.md`); else it is made anew.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from typing import Final

from lakefs.errors import StoreDamaged
from lakefs.host.crc import crc32c
from lakefs.layout import Layout
from lakefs.limits import HOT_INDEX_SLOTS_MAX, HOT_INDEX_SLOTS_MIN

MAGIC: Final = b"LAKEHOTI"
FORMAT_VERSION: Final = 1
HEADER_PAGE_BYTES: Final = 4096
STRIPE_COUNT: Final = 4096
STRIPES_OFFSET: Final = HEADER_PAGE_BYTES
ENTRIES_OFFSET: Final = STRIPES_OFFSET + 4 * STRIPE_COUNT
ENTRY_BYTES: Final = 64
PROBE_SLOTS: Final = 64
"""Most slots that a lookup reads.  At a load of 0.8 one chunk in 10^12 lies further away (M/D/1 queue: e^-0.43n)."""
SHIFT_SLOTS: Final = 1024
"""Most entries that one change moves; a longer run was made on purpose: its chunk is not put, or is marked dead."""
LOAD_PERCENT: Final = 80
"""Most percent of a table's homes that have entries."""
VACANT: Final = 0
"""Kind of an empty slot."""
DEAD: Final = 255
"""Kind of a removed entry whose removal would have moved too many others."""
SUPERSEDED: Final = bytes(len(MAGIC))
"""Magic of a replaced table: the engine has another table now, and empties this one."""
NOT_CLEAN: Final = (1 << 64) - 1
"""Clean sequence of a table in use."""

Found = tuple[int, int, int, int, int]
"""(tier, segment, offset, stored_bytes, crc): a chunk's place, as in a grant; tiers are a grant's media.

In tier `MEDIUM_DRAM`, `segment` is slab and generation in one number, see `pack_place`.
"""
PLACE_GENERATION_BITS: Final = 48
_PLACE_GENERATION_MASK: Final = (1 << PLACE_GENERATION_BITS) - 1
_PLACE_SLABS: Final = 1 << 64 - PLACE_GENERATION_BITS
"""Most slabs that a place can name: 4 TiB."""

HEADER: Final = Layout(
    "shared index header",
    76,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("entry_bytes", "I"),
        ("capacity", "Q"),
        ("store_id", "16s"),
        ("boot_id", "16s"),
        ("clean_sequence", "Q"),
        ("entry_count", "Q"),
        ("crc", "I"),
    ],
)
ENTRY: Final = Layout(
    "shared index entry",
    ENTRY_BYTES,
    [
        ("version", "I"),
        ("chunk_kind", "B"),
        ("tier", "B"),
        ("distance", "H"),
        ("digest", "32s"),
        ("segment", "Q"),
        ("offset", "I"),
        ("stored_bytes", "I"),
        ("crc", "I"),
        ("check", "I"),
    ],
)
PLACE: Final = struct.Struct("<QIIII")
"""Answer of `find_packed` for one chunk: segment, offset, stored_bytes, crc, tier; tier 0: not known."""
_CHECK: Final = struct.Struct("<I")
assert ENTRIES_OFFSET % ENTRY_BYTES == 0
assert HEADER.size <= HEADER_PAGE_BYTES


@dataclass(frozen=True)
class TableHeader:
    """The header page, in the layout's order.

    `boot_id` and `clean_sequence` are those of the store's last clean stop.
    """

    capacity: int
    store_id: bytes
    boot_id: bytes
    clean_sequence: int = NOT_CLEAN
    entry_count: int = 0

    def pack(self, magic: bytes = MAGIC) -> bytes:
        """Return the header's bytes, for offset 0; the rest of the page is zeros."""
        body = HEADER.pack(magic, FORMAT_VERSION, ENTRY_BYTES, *astuple(self), 0)[: -_CHECK.size]
        return body + _CHECK.pack(crc32c(body))


def unpack_header(page: bytes | memoryview, magic: bytes = MAGIC) -> TableHeader:
    """Parse a header; StoreDamaged when the bytes are no header of that magic, of another version, or damaged."""
    if len(page) < HEADER.size:
        raise StoreDamaged("the shared index is too short for its header", subject="shared index")
    raw = bytes(page[: HEADER.size])
    found, version, entry_bytes, capacity, store_id, boot_id, clean, count, crc = HEADER.unpack(raw)
    if found != magic:
        raise StoreDamaged("this is not a shared index: its magic is another", subject="shared index")
    if version != FORMAT_VERSION or entry_bytes != ENTRY_BYTES:
        raise StoreDamaged(f"shared index of version {version}: this release knows 1", subject="shared index")
    if crc != crc32c(raw[: -_CHECK.size]):
        raise StoreDamaged("the header of the shared index is damaged", subject="shared index")
    if not is_capacity(capacity):
        raise StoreDamaged(f"the shared index says that it has {capacity} slots", subject="shared index")
    return TableHeader(capacity, store_id, boot_id, clean, count)


def pack_place(slab: int, generation: int) -> int | None:
    """Pack slab and generation as the `segment` of an entry; None if they do not fit, as after 10^14 fills."""
    if slab >= _PLACE_SLABS or generation > _PLACE_GENERATION_MASK:
        return None
    return slab << PLACE_GENERATION_BITS | generation


def unpack_place(segment: int) -> tuple[int, int]:
    """Return (slab, generation) of an entry's `segment`."""
    return segment >> PLACE_GENERATION_BITS, segment & _PLACE_GENERATION_MASK


def unpacked(places: bytes | bytearray) -> list[Found]:
    """Return places that are packed one after the other, each as a `PLACE`."""
    return [(tier, *where) for *where, tier in PLACE.iter_unpack(places)]


def is_capacity(capacity: int) -> bool:
    """Return True if a table may have this many homes: a power of two within limits."""
    return HOT_INDEX_SLOTS_MIN <= capacity <= HOT_INDEX_SLOTS_MAX and capacity.bit_count() == 1


def table_bytes(capacity: int) -> int:
    """Return the length of the whole table in bytes."""
    return ENTRIES_OFFSET + (capacity + PROBE_SLOTS) * ENTRY_BYTES


def entries_max(capacity: int) -> int:
    """Return the most chunks that a table takes."""
    return capacity * LOAD_PERCENT // 100


def capacity_for(entry_count: int) -> int:
    """Return the capacity of the smallest table that takes this many chunks, within limits."""
    wanted = max(HOT_INDEX_SLOTS_MIN, -(-entry_count * 100 // LOAD_PERCENT))
    return min(HOT_INDEX_SLOTS_MAX, 1 << (wanted - 1).bit_length())


def stripe_shift(capacity: int) -> int:
    """Return log2 of a stripe's slots; they are at least `PROBE_SLOTS`, so that a lookup meets at most two stripes."""
    return max(PROBE_SLOTS.bit_length() - 1, (capacity // STRIPE_COUNT).bit_length() - 1)
