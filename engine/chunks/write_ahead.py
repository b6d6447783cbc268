"""Writing ahead: runs of payloads are written by some threads while others hash them.

The place of a payload is decided by its length alone, so the write need not wait for the hash.  Two tasks write and two
hash, each going through the runs in order; `filling` has how their threads share the filling.  A write takes with it
what was brought while the one before was on its way: a disk that is slower than the filling gets long writes.

Rules kept here:
- A failed write ends the writing and not the hashing: it matters only when something is wanted that was not written.
- A failed hash, or fill, ends both.
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
"""Told that the payloads with these numbers are hashed; which of them are wanted."""


class AheadRun:
    """Some payloads that are written together, and what became of them."""

    def __init__(self, numbers: Sequence[int], fillings: Sequence[Filling]) -> None:
        self.numbers = numbers
        self.areas = [(filling.extent, filling.payload_bytes) for filling in fillings]
        self.error: LakeError | None = None
        """Why it was not written."""
        self.places: list[Place] = []
        self.hashed: Sequence[Hashed] = ()
        self.chosen: Sequence[Hashed] = ()
        self._fillings = fillings

    def coming(self) -> Iterator[int]:
        """For `write_large`: waits for the next piece, and gives with it those that others have brought by then."""
        begin = there = written = 0
        for filling in self._fillings:
            for piece in range(len(filling)):
                if there > written and not filling.is_there(piece):
                    yield there
                    written = there
                there = begin + filling.bring(piece)
            begin += len(filling.extent)
        yield there

    def hash_all(self) -> list[Hashed]:
        """Ids and checksums, in order; blocks."""
        return [filling.hash() for filling in self._fillings]

    def take_chosen(self) -> list[Written]:
        """What is wanted and was written: the caller's from now on.  The error that kept something from it."""
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
        """Places that nobody took, to be given up."""
        places, self.places = self.places, []
        return places


async def write_beside_hash(
    runs: Sequence[AheadRun], segments: Segments, offload: Offload, note: Note
) -> None:
    """Write and hash all runs; what failed to be written has its error.  What hashes and fills raise.

    Places are in the runs, also when this raises or is cancelled.
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


async def _called(call: Callable[[], Awaitable[None]]) -> None:
    await call()
