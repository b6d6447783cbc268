"""Fills a large payload into the engine's memory, piece by piece, in the thread that needs a piece first.

One thread writes a payload while another hashes it.  Both take its pieces in order; the first to reach a piece fills it
and computes its checksums.  The writer waits for a piece that the hasher is filling; the hasher continues with the
next.  So the first piece is being written while the second is filled, and each is filled once.

Rules kept here:
- A thread waits for a piece only while another thread fills it.  Threads may run in any order, even one after another.
- The last piece is ready only when all are, together with the bytes behind the payload (vector, zeros).
- A failed fill leaves its piece unfilled: the next thread tries again, and gets its own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

from engine.chunks.payload import Hashed, Payload
from engine.format.checksums import seal_payload, vector_of
from engine.format.extents import large_extent_bytes
from lakefs.ids import chunk_id_of
from lakefs.limits import WRITE_RUN_BYTES

PIECE_BYTES: Final = WRITE_RUN_BYTES
"""Bytes of a piece: whole granules, and whole pages."""


class Filling:
    """One payload with an area.  All methods but the constructor block, in any thread."""

    def __init__(self, payload: Payload) -> None:
        assert payload.area is not None, "small payloads are filled whole"
        self.extent = payload.area[: large_extent_bytes(payload.length)]
        self.payload_bytes = payload.length
        self._payload = payload
        count = max(1, payload.length // PIECE_BYTES)
        self._ends = [PIECE_BYTES * (index + 1) for index in range(count - 1)] + [payload.length]
        self._locks = [Lock() for _ in self._ends]
        self._vectors: list[bytes | None] = [None] * count
        self._crc = 0

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self._ends)

    def bring(self, piece: int) -> int:
        """Make the piece ready; returns how many leading bytes of the extent may be written.  Raises fill errors."""
        last = piece == len(self._ends) - 1
        with self._locks[piece]:
            if self._vectors[piece] is None:
                vector = self._fill(piece)
                if last:
                    self._seal([*(self._vector_of(index) for index in range(piece)), vector])
                self._vectors[piece] = vector
        return len(self.extent) if last else self._ends[piece]

    def is_there(self, piece: int) -> bool:
        """Return True if the piece is ready; does not wait."""
        return self._vectors[piece] is not None

    def bring_all(self) -> None:
        """Make all pieces ready."""
        for piece, lock in enumerate(self._locks):
            if not lock.locked():
                self.bring(piece)
        for piece in range(len(self._ends)):
            self.bring(piece)

    def hash(self) -> Hashed:
        """Return the payload's id and checksum, once all pieces are ready."""
        self.bring_all()
        payload = self._payload
        return Hashed(payload, chunk_id_of(payload.kind, self.extent[: payload.length]), self._crc)

    def _vector_of(self, piece: int) -> bytes:
        self.bring(piece)
        vector = self._vectors[piece]
        assert vector is not None
        return vector

    def _fill(self, piece: int) -> bytes:
        """Fill a piece; returns the checksums of its granules."""
        begin = self._ends[piece - 1] if piece else 0
        memory = self.extent[begin : self._ends[piece]]
        vector = None if self._payload.fill is None else self._payload.fill(memory, begin)
        return vector or vector_of(memory)

    def _seal(self, vectors: Sequence[bytes]) -> None:
        self._crc = seal_payload(self.extent, self._payload.length, b"".join(vectors))
