"""Writes ahead: some threads write runs of payloads while others hash them.

A payload's place depends on its length alone, so the write need not wait for the hash.  Two tasks write and two hash,
each taking the runs in order; `engine.chunks.filling` defines how their threads share the filling.  A write includes
all pieces that became ready during the previous write: a disk that is slower than the filling gets long writes.

Rules kept here:
- A failed write ends the writing but not the hashing: it matters only if a payload is wanted that was not written.
- A failed hash or fill ends both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

from engine.chunks.filling import Filling
from engine.chunks.payload import Hashed, Written
from engine.format.extents import Place
from engine.host.tasks import run_all
from engine.segments.segment_store import Segments
from lakefs.errors import LakeError
from lakefs.limits import WRITE_RUNS_AT_ONCE
from lakefs.ports import Offload

Note = Callable[[Sequence[int], Sequence[Hashed]], Sequence[Hashed]]
"""Called with the numbers of payloads and their hashes; returns the wanted ones."""


class AheadRun:
    """Payloads that are written together, with their places, hashes and error."""

    def __init__(self, numbers: Sequence[int], fillings: Sequence[Filling]) -> None:
        self.numbers = numbers
        self.areas = [(filling.extent, filling.payload_bytes) for filling in fillings]
        self.error: LakeError | None = None
        """The error that kept it from being written."""
        self.places: list[Place] = []
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

    def take_places(self) -> list[Place]:
        """Hand over the places that were not taken, to be given up."""
        places, self.places = self.places, []
        return places


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
    await run_all(_called, [write] * each + [hash_] * each)
    assert all(run.places or run.error for run in runs), "each run was written, or has its error"


async def _called(call: Callable[[], Awaitable[None]]) -> None:
    await call()
