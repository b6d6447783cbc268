"""Filling a large payload into the engine's memory, piece by piece, by whichever thread needs a piece first.

One thread writes a payload while another hashes it.  Both go through its pieces in order; who comes to one first fills
it and computes its checksums.  The writer waits for a piece that the other is at; the other goes on to the next.  So
the first piece is on its way to the disk while the second is filled, and each is filled once.

Rules kept here:
- Nobody waits for a piece that nobody is at: threads may come in any order, one behind the other included.
- The last piece is there when all are, and what lies behind the payload (vector, zeros) with it.
- A fill that failed leaves its piece as it was: whoever comes next tries, and gets an error of his own.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

from engine.chunks.payload import Hashed, Payload
from engine.format.checksums import seal_with, vector_of
from engine.format.extents import large_extent_bytes
from lakefs.ids import chunk_id_of
from lakefs.limits import WRITE_RUN_BYTES

PIECE_BYTES: Final = WRITE_RUN_BYTES
"""Whole granules, and whole pages."""


class Filling:
    """One payload with an area.  All methods but the constructor block, in any thread."""

    def __init__(self, payload: Payload) -> None:
        assert payload.area is not None, "small payloads come whole"
        self.extent = payload.area[: large_extent_bytes(payload.length)]
        self.payload_bytes = payload.length
        self._payload = payload
        count = max(1, payload.length // PIECE_BYTES)
        self._ends = [PIECE_BYTES * (index + 1) for index in range(count - 1)] + [payload.length]
        self._locks = [Lock() for _ in self._ends]
        self._vectors: list[bytes | None] = [None] * count
        self._crc = 0

    def __len__(self) -> int:
        """Pieces."""
        return len(self._ends)

    def bring(self, piece: int) -> int:
        """The piece is there on return; how many bytes of the extent may be written then.  What the fill raises."""
        last = piece == len(self._ends) - 1
        with self._locks[piece]:
            if self._vectors[piece] is None:
                vector = self._fill(piece)
                if last:
                    self._seal([*(self._brought(index) for index in range(piece)), vector])
                self._vectors[piece] = vector
        return len(self.extent) if last else self._ends[piece]

    def is_there(self, piece: int) -> bool:
        """Whether the piece has been brought; does not wait."""
        return self._vectors[piece] is not None

    def bring_all(self) -> None:
        """All of it is there on return."""
        for piece, lock in enumerate(self._locks):
            if not lock.locked():
                self.bring(piece)
        for piece in range(len(self._ends)):
            self.bring(piece)

    def hash(self) -> Hashed:
        """The payload's id and checksum, when all of it is there."""
        self.bring_all()
        payload = self._payload
        return Hashed(payload, chunk_id_of(payload.kind, self.extent[: payload.length]), self._crc)

    def _brought(self, piece: int) -> bytes:
        self.bring(piece)
        vector = self._vectors[piece]
        assert vector is not None
        return vector

    def _fill(self, piece: int) -> bytes:
        """Fill a piece; the checksums of its granules."""
        begin = self._ends[piece - 1] if piece else 0
        memory = self.extent[begin : self._ends[piece]]
        vector = None if self._payload.fill is None else self._payload.fill(memory, begin)
        return vector or vector_of(memory)

    def _seal(self, vectors: Sequence[bytes]) -> None:
        self._crc = seal_with(self.extent, self._payload.length, b"".join(vectors))
