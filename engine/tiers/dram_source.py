"""Where the DRAM tier's chunks come from, and when they must go: an engine's own segments here.

A head's are those of the members of its lake (`engine.head.tier_source`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from engine.chunks.chunk_store import ChunkFreed, find_chunk
from engine.chunks.quarantine import ChunkQuarantined, Quarantine
from engine.format.layouts import ChunkRecord
from engine.metadata.metadata_store import Metadata
from engine.segments.segment_store import Segments
from lakefs.ids import ChunkId, Sequence


class DramSource(Protocol):
    """The chunks behind a DRAM tier.  Used on the loop."""

    def find(self, chunk: ChunkId) -> ChunkRecord | None:
        """Return the record of a chunk that is there and not known to be damaged; else None.  Does not wait."""
        ...

    async def read(self, chunk: ChunkId, record: ChunkRecord, memory: memoryview) -> int:
        """Read payload and vector of a chunk, checked, into memory of `record.extent_bytes`; return its checksum.

        The checksum is as in a chunk's record; a source that learns it here has none in what `find` returns.
        Raises the errors of reading.  Once cancelled, nothing is written any more on return.
        """
        ...

    def on_gone(self, forget: Callable[[ChunkId], None]) -> None:
        """Call `forget` in the step in which a chunk is removed or found to be damaged, from now on."""
        ...


class SegmentSource:
    """The chunks of one engine."""

    def __init__(self, metadata: Metadata, segments: Segments, quarantine: Quarantine) -> None:
        self._metadata: Final = metadata
        self._segments: Final = segments
        self._quarantine: Final = quarantine

    def find(self, chunk: ChunkId) -> ChunkRecord | None:
        """See `DramSource.find`."""
        if chunk in self._quarantine:
            return None
        with self._metadata.view() as view:
            return find_chunk(view, chunk)

    async def read(self, chunk: ChunkId, record: ChunkRecord, memory: memoryview) -> int:
        """See `DramSource.read`."""
        await self._segments.reader.read_chunk(record, memory)
        return record.crc

    def on_gone(self, forget: Callable[[ChunkId], None]) -> None:
        """See `DramSource.on_gone`."""

        def joined(_: Sequence, notes: list[object]) -> None:
            for note in notes:
                if isinstance(note, ChunkFreed | ChunkQuarantined):
                    forget(note.chunk)

        self._metadata.on_joined(joined, [ChunkFreed, ChunkQuarantined])
