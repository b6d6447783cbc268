"""The checks of clients in Python: are bytes a chunk's, by its id, by the CRC32C of its granules, or unchecked?

Readers of whole chunks call `matches`.  Readers of ranges, and those that have the CRCs at hand, compare `granule_crcs`
of what they read with `crcs_of` or a checked vector themselves.  In C, `lakefs/granules` has these checks.

Each granule (64 KiB) of a payload has a CRC32C.  Record, grant and shared index hold one `crc` of a chunk: that of
its only granule; or, for a longer payload, that of its *vector*, the CRCs of all granules, 4 bytes each,
little-endian, stored behind the payload.  So the vector and a range's own granules are enough to check the range.

Rules kept here:
- Pure functions, without I/O.
- A payload or vector of another length does not match.
- A check returns a boolean.  Its caller raises `mismatch` (StaleGrant: locate again), or `damaged` if the place is
  current; a reader that has another way to the bytes takes that.

`engine.format.checksums` writes these checksums, and compares them with chunk records.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Final

from lakefs.errors import ChunkDamaged, InvalidArgument, StaleGrant
from lakefs.host.crc import crc32c
from lakefs.ids import Buffer, ChunkId, ChunkKind, data_chunk_id, id_text, manifest_chunk_id
from lakefs.limits import GRANULE_BYTES


class Check(Enum):
    """The check that a read makes; named wherever a figure says "verified"."""

    BLAKE3 = "blake3"
    """Hashes whole chunks and compares with their ids: the default, and the only check against a lying engine."""
    CRC32C = "crc32c"
    """Finds rot, torn and stale bytes.  A range of a chunk is always checked this way, and a manifest by BLAKE3."""
    NONE = "unverified"
    """Whole chunks are not checked: neither rot nor a place that the engine freed during the read is noticed."""


def check_named(name: str | Check) -> Check:
    """Return the check of that name, in small letters or capitals.  InvalidArgument, with the names."""
    if isinstance(name, Check):
        return name
    try:
        return Check[name.upper()]
    except KeyError:
        raise InvalidArgument(f"check is {name!r}; it is one of {', '.join(Check.__members__)}") from None


NO_VECTOR: Final = memoryview(bytearray())
"""Writable, so that code that fills a vector needs no special case for a chunk without one."""
_DATA: Final = int(ChunkKind.DATA)
# Reading a member of the enumeration costs as much as a call.
_CRC32C: Final = Check.CRC32C
_NONE: Final = Check.NONE


def matches(chunk: bytes, payload: Buffer, check: Check, crc: int, vector: Buffer = NO_VECTOR) -> bool:
    """Return True if a whole payload is the chunk's, as far as `check` looks; `vector` is `room_for_vector`'s,
    filled."""
    if check is _CRC32C:
        if vector:
            return crc32c(vector) == crc and granule_crcs(payload) == vector
        return 0 < len(payload) <= GRANULE_BYTES and crc32c(payload) == crc
    return check is _NONE or matches_id(chunk, payload)


def matches_id(chunk: bytes, payload: Buffer) -> bool:
    """Return True if a whole payload hashes to the chunk's id."""
    return (data_chunk_id if chunk[0] == _DATA else manifest_chunk_id)(payload) == chunk


def granule_crcs(payload: Buffer) -> bytes:
    """Return the CRC32C of every granule of `payload`, 4 bytes each, little-endian; the last granule may be short."""
    view = memoryview(payload)
    crcs = [crc32c(view[at : at + GRANULE_BYTES]) for at in range(0, len(view), GRANULE_BYTES)]
    return struct.pack(f"<{len(crcs)}I", *crcs)


def granule_crcs_around(lead: Buffer, payload: Buffer, trail: Buffer) -> bytes:
    """Return `granule_crcs` of the three put together; `lead` and `trail` are each shorter than a granule."""
    if not lead and not trail:
        return granule_crcs(payload)
    view = memoryview(payload)
    crcs: list[int] = []
    crc, room, at = crc32c(lead), GRANULE_BYTES - len(lead), 0
    while at < len(view):
        granule = view[at : at + room]
        crc = crc32c(granule, crc)
        at += len(granule)
        room -= len(granule)
        if not room:
            crcs.append(crc)
            crc, room = 0, GRANULE_BYTES
    if room < GRANULE_BYTES:
        crcs.append(crc32c(trail, crc))
    return struct.pack(f"<{len(crcs)}I", *crcs)


class GranuleCrcs:
    """The CRCs of a payload's granules, taken as its bytes arrive, from the first one on."""

    def __init__(self) -> None:
        self._crcs = bytearray()
        self._taken = 0
        """Bytes of the granules that were taken."""

    def take(self, payload: memoryview, arrived: int) -> None:
        """Take the granules of the payload that lie in its first `arrived` bytes, and were not taken before.

        Its last granule may be short, so it is taken when the whole payload is there.
        """
        end = len(payload) if arrived >= len(payload) else arrived - arrived % GRANULE_BYTES
        if end > self._taken:
            self._crcs += granule_crcs(payload[self._taken : end])
            self._taken = end

    def match(self, crc: int, vector: Buffer) -> bool:
        """Return True if a payload that was taken whole is the one of `crc` and `vector`, like `matches`."""
        if vector:
            return crc32c(vector) == crc and self._crcs == vector
        return len(self._crcs) == 4 and self._crcs == crc.to_bytes(4, "little")


def vector_bytes(stored_bytes: int) -> int:
    """Return the length of the vector behind a payload; 0 for a payload of one granule."""
    return 4 * -(-stored_bytes // GRANULE_BYTES) if stored_bytes > GRANULE_BYTES else 0


def room_for_vector(stored_bytes: int, check: Check = Check.CRC32C) -> memoryview:
    """Return memory to read the vector behind a payload into; empty if there is none, or `check` does not use it."""
    if check is not _CRC32C or stored_bytes <= GRANULE_BYTES:
        return NO_VECTOR
    return memoryview(bytearray(vector_bytes(stored_bytes)))


def crcs_of(chunk: ChunkId, vector: Buffer, crc: int) -> bytes:
    """Return the CRCs of a chunk's granules: its vector, checked, or its only CRC.  StaleGrant."""
    if not vector:
        return crc.to_bytes(4, "little")
    if crc32c(vector) != crc:
        raise StaleGrant(f"the checksums of chunk {id_text(chunk)} do not match", subject=id_text(chunk))
    return bytes(vector)


def granules_around(offset: int, length: int, chunk_bytes: int) -> tuple[int, int]:
    """Return begin and end, in the chunk, of the whole granules that contain its range [offset, offset + length)."""
    begin = offset - offset % GRANULE_BYTES
    return begin, min(-(-(offset + length) // GRANULE_BYTES) * GRANULE_BYTES, chunk_bytes)


def crcs_between(crcs: Buffer, begin: int, end: int) -> bytes:
    """Select, from the CRCs of all granules of a chunk, those of the granules in [begin, end)."""
    return bytes(crcs[begin // GRANULE_BYTES * 4 : -(-end // GRANULE_BYTES) * 4])


def mismatch(chunk: ChunkId, check: Check) -> StaleGrant:
    """Return the error for bytes that do not match: freed, moved, or damaged."""
    text = id_text(chunk)
    if check is _CRC32C:
        return StaleGrant(f"a granule read for chunk {text} does not match its CRC32C", subject=text)
    return StaleGrant(f"bytes read for chunk {text} do not hash to its id", subject=text)


def damaged(chunk: ChunkId, name: str, reason: str = "") -> ChunkDamaged:
    """Return the error for bytes that fail their check though their place is current; `reason` is the engine's."""
    why = f" ({reason})" if reason else ""
    return ChunkDamaged(
        f"{name} is damaged on disk and was not read: chunk {id_text(chunk)}{why}; other objects are served; "
        f"put it again with: lake put FILE {name}; see what else is damaged with: lake fsck --full",
        subject=name,
    )
