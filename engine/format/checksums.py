"""CRC32C of payloads: computed when an extent is written, compared with its record when the engine reads it.

`lakefs.content.verify` describes the kinds of checksums, and compares them for clients.

CRCs find rot and torn writes; only the chunk's BLAKE3 finds a hostile writer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from crc32c import crc32c

from engine.format._granules import granule_crcs
from engine.format.extents import large_extent_bytes
from engine.format.layouts import ChunkRecord
from lakefs.content.verify import vector_bytes
from lakefs.ids import Buffer

vector_of: Final[Callable[[Buffer], bytes]] = granule_crcs
"""Returns the CRC32C of each granule of a payload, 4 bytes each, little-endian; the last granule may be short.

Takes 0.2 ms for 4 MiB: call it where the payload is hashed, while it is in the processor's cache.
"""


def seal_payload(view: memoryview, stored_bytes: int, crcs: bytes) -> int:
    """Write vector and zeros behind the payload at the start of `view`; returns the CRC for the chunk record.

    `crcs`: those of all granules, as `vector_of` returns them.
    """
    extent = large_extent_bytes(stored_bytes)
    assert 0 < stored_bytes <= extent <= len(view)
    vector = crcs if vector_bytes(stored_bytes) else b""
    crc = crc32c(vector) if vector else int.from_bytes(crcs, "little")
    end = stored_bytes + len(vector)
    view[stored_bytes:end] = vector
    view[end:extent] = bytes(extent - end)
    return crc


def check_payload(record: ChunkRecord, payload: Buffer, vector: Buffer = b"") -> bool:
    """Return True if a whole payload, with its vector if it has one, matches the record."""
    if len(payload) != record.stored_bytes:
        return False
    if not record.vector_bytes:
        return crc32c(payload) == record.crc
    return check_vector(record, vector) and vector_of(payload) == vector


def check_vector(record: ChunkRecord, vector: Buffer) -> bool:
    """Return True if the bytes behind a payload are the vector of the record."""
    return len(vector) == record.vector_bytes and crc32c(vector) == record.crc
