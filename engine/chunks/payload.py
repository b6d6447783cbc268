"""The stages of a payload being stored: in memory, hashed, written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.format.extents import Place
from lakefs.ids import ChunkId, ChunkKind
from lakefs.limits import SMALL_PAYLOAD_BYTES

Fill = Callable[[memoryview, int], bytes | None]
"""`fill(memory, begin)` blocks and copies the payload's bytes from `begin` into the engine's memory.  It may return the
checksums of the granules copied, as `checksums.vector_of` would."""


@dataclass
class Payload:
    """Bytes to store, in memory of the engine's own: `area` (65,536 bytes and more) or `small`.

    An area is page-aligned and has room for the vector and padding behind the payload (`large_extent_bytes`).

    `fill`, if given, copies the bytes in; threads call it, before hashing, once for each piece of the payload.
    """

    kind: ChunkKind
    length: int
    area: memoryview | None = None
    small: memoryview | None = None
    fill: Fill | None = None


@dataclass(frozen=True)
class Hashed:
    """A payload with the id and record checksum that the engine computed."""

    payload: Payload
    chunk: ChunkId
    crc: int


@dataclass(frozen=True)
class Written:
    """A payload that is synced, or small and placed, and not yet recorded; in flight until settled."""

    hashed: Hashed
    place: Place


def is_small(length: int) -> bool:
    """Return True if a payload of this length is packed into a small segment."""
    return length < SMALL_PAYLOAD_BYTES
