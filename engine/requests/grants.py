"""Grants of chunks, made from their records."""

from __future__ import annotations

from engine.format.layouts import ChunkRecord
from engine.tiers.shared_index import NO_GRANT
from lakefs.wire import messages as m
from lakefs.wire.grants import MEDIUM_INLINE, MEDIUM_SEGMENT


def grant_of(record: ChunkRecord | None) -> m.Grant:
    """Return the read grant for a chunk's record; one of MEDIUM_NONE when there is no record."""
    if record is None:
        return NO_GRANT
    return m.Grant(
        MEDIUM_SEGMENT,
        record.segment,
        record.offset,
        record.stored_bytes,
        record.logical_bytes,
        0,
        record.crc,
        record.birth,
    )


def inline_grant(record: ChunkRecord, offset: int, length: int) -> m.Grant:
    """Return the grant for a payload in the reply's body, `length` bytes from `offset`."""
    return m.Grant(MEDIUM_INLINE, 0, offset, length, length, 0, record.crc, 0)
