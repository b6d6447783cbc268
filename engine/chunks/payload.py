"""A payload on its way into the store: in memory, then hashed, then written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.format.extents import Place
from lakefs.ids import ChunkId, ChunkKind
from lakefs.limits import SMALL_PAYLOAD_BYTES

Fill = Callable[[memoryview, int], bytes | None]
"""`fill(memory, begin)` blocks and brings the payload's bytes from `begin` on into memory of the engine.  It may give
the checksums of the granules that are there then, as `checksums.vector_of` would."""


@dataclass
class Payload:
    """Bytes to store, in memory of the engine's own: `area` (65,536 bytes and more) or `small`.

    An area is page-aligned and has room for what is written behind the payload (`large_extent_bytes`).

    `fill`, when given, brings the bytes; it is called in threads, before they are hashed, once for each piece of the
    payload.
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
    """A payload on the medium, synced, or small and placed, and not yet recorded; in flight until settled."""

    hashed: Hashed
    place: Place


def is_small(length: int) -> bool:
    """Whether a payload is packed into a small segment."""
    return length < SMALL_PAYLOAD_BYTES
