"""Writes ahead: some threads write runs of large payloads while others fill and hash them.

A payload's place depends on its length alone, so the write need not wait for the hash.  Two tasks write and two hash,
each taking the runs in order.  Their threads share the filling (`Filling`): both take a payload's pieces in order, and
the first to reach a piece fills it and computes its checksums.  The writer waits for a piece that the hasher is
filling; the hasher continues with the next.  So the first piece is being written while the second is filled, and each
is filled once.  A write includes all pieces that became ready during the previous write: a disk that is slower than the
filling gets long writes.

Rules kept here:
- A thread waits for a piece only while another thread fills it.  Threads may run in any order, even one after another.
- The last piece is ready only when all are, together with the bytes behind the payload (vector, zeros).
- A failed fill leaves its piece unfilled: the next thread tries again, and gets its own error.
- A failed write ends the writing but not the hashing: it matters only if a payload is wanted that was not written.
- A failed hash or fill ends both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Final

from engine.chunks.payload import Hashed, Payload, Written
from engine.format.checksums import seal_payload, vector_of
from engine.format.extents import Place, large_extent_bytes
from engine.host.tasks import run_all
from engine.segments.segment_store import Segments
from lakefs.errors import LakeError
from lakefs.ids import chunk_id_of
from lakefs.limits import WRITE_RUN_BYTES, WRITE_RUNS_AT_ONCE
from lakefs.ports import Offload

PIECE_BYTES: Final = WRITE_RUN_BYTES
"""Bytes of a piece: whole granules, and whole pages."""
Note = Callable[[Sequence[int], Sequence[Hashed]], Sequence[Hashed]]
"""Called with the numbers of payloads and their hashes; returns the wanted ones."""


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
                    vectors = [*(self._vector_of(index) for index in range(piece)), vector]
                    self._crc = seal_payload(self.extent, self.payload_bytes, b"".join(vectors))
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


class AheadRun:
    """Payloads that are written together, with their places, hashes and error."""

    def __init__(self, numbers: Sequence[int], fillings: Sequence[Filling]) -> None:
        self.numbers = numbers
        self.areas = [(filling.extent, filling.payload_bytes) for filling in fillings]
        self.error: LakeError | None = None
        """The error that kept it from being written."""
        self.places: list[Place] = []
        """Places that were written and not taken; they are given up in the end."""
        self.hashed: Sequence[Hashed] = ()
        self.chosen: Sequence[Hashed] = ()
        self._fillings = fillings

    def coming(self) -> Iterator[int]:
        """Wait for pieces, for `LargeWriter.write`; yields how many leading bytes of the run are ready."""
        begin = ready = written = 0
        for filling in self._fillings:
            for piece in range(len(filling)):
                if ready > written and not filling.is_there(piece):
                    yield ready
                    written = ready
                ready = begin + filling.bring(piece)
            begin += len(filling.extent)
        yield ready

    def hash_all(self) -> list[Hashed]:
        """Return ids and checksums, in order; blocks."""
        return [filling.hash() for filling in self._fillings]

    def take_chosen(self) -> list[Written]:
        """Hand over the written places of the wanted payloads; the caller now owns them.

        Raises the write's error if a wanted payload was not written.
        """
        if self.chosen and not self.places:
            assert self.error is not None, "a run that is wanted was written, or failed"
            raise self.error
        wanted = {id(item) for item in self.chosen}
        places, self.places = self.places, []
        taken: list[Written] = []
        for item, place in zip(self.hashed, places, strict=True) if places else ():
            if id(item) in wanted:
                taken.append(Written(item, place))
            else:
                self.places.append(place)
        return taken


async def write_beside_hash(runs: Sequence[AheadRun], segments: Segments, offload: Offload, note: Note) -> None:
    """Write and hash all runs; sets the error of a run that was not written.  Raises errors of hashes and fills.

    The runs have their places, even when this raises or is cancelled.
    """
    to_write, to_hash = deque(runs), deque(runs)
    unwritten = len(runs)

    def is_last() -> bool:
        return unwritten == 1

    async def write() -> None:
        nonlocal unwritten
        while to_write:
            run = to_write.popleft()
            try:
                run.places = await segments.large.write(run.areas, run.coming, is_last)
                unwritten -= 1
            except LakeError as error:
                for missed in (run, *to_write):
                    missed.error = error
                to_write.clear()

    async def hash_() -> None:
        while to_hash:
            run = to_hash.popleft()
            try:
                run.hashed = await offload.run(run.hash_all)
                run.chosen = note(run.numbers, run.hashed)
            except BaseException:
                to_hash.clear()
                to_write.clear()
                raise

    each = min(len(runs), WRITE_RUNS_AT_ONCE // 2)
    await run_all(lambda task: task(), [write] * each + [hash_] * each)
    assert all(run.places or run.error for run in runs), "each run was written, or has its error"
