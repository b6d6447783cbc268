"""Direct reads of many chunks: like `DirectReads`, with one system call for each run of neighbouring chunks.

    find all, as numbers  ->  a plan of runs  ->  tasks that read and check  ->  lengths

Rules kept here:
- A hit is a hint, as in `lakefs.direct.chunk_reads`; a chunk that cannot be read here is requested from the engine.
- With `Check.CRC32C`, chunks in segments are read and checked natively, by one task; a helper thread may take part.
- With `Check.NONE`, places are looked up once more after all reads.  A chunk whose place has changed, or whose engine
  is no longer connected, counts as not read.
- Several threads may do the tasks; the caller ends the batch after all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from lakefs.content.verify import Check, matches
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.grants.batch_plan import Arrived, Descriptor, HelperThread, ReadPlan, are_bytes
from lakefs.grants.descriptors import Held
from lakefs.host.writable_memory import WritableBuffer, chunk_memories
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import GRANULE_BYTES, KIB
from lakefs.shared_index.table_format import PLACE, Found
from lakefs.wire.media import IN_FILES, IN_SLABS

PART_BYTES: Final = 512 * KIB
"""Most bytes of one task: one thread reads them, then checks them while the processor's cache still has them."""
_ANY_LENGTH: Final = (1 << 32) - 1
Task = Callable[[], None]
"""Part of a batch's work: any thread may do it, and all tasks are done before the batch ends."""


class DirectBatch:
    """The chunks of one call.  A context manager: `lengths` are final after the block, NOT_READ for chunks not read.

    `targets` are writable, and stay locked until the batch is freed.  `places`: the place at which the caller wants
    each chunk read, packed or not; without it all places are looked up.  `helper`: a thread that may take a part.
    `asks`: for memory that other programs may make shorter.  Only what the page cache is known to have is read, so that
    no read makes the kernel fetch a page, and the kernel copies from slabs too: it reports missing memory, where a
    copy here would raise a signal.
    """

    def __init__(
        self,
        reads: DirectReads,
        chunks: Sequence[bytes],
        targets: list[memoryview],
        places: Sequence[Found] | bytearray | None = None,
        *,
        helper: HelperThread | None = None,
        asks: bool = False,
    ) -> None:
        self.lengths = [NOT_READ] * len(chunks)
        self._reads = reads
        self._chunks = chunks if isinstance(chunks, list) else list(chunks)
        self._targets = targets
        self._places = self._look_up() if places is None else _packed(places)
        self._helper = helper
        self._asks = asks
        self._is_checked = reads.check is Check.CRC32C
        # Longer chunks have a vector of granule CRCs behind them: those in slabs are copied alone, with their vector.
        longest = GRANULE_BYTES if self._is_checked else _ANY_LENGTH
        self._plan = ReadPlan(self._chunks, targets, self._places, longest, self._is_checked, asks)
        self._held: list[Held | None] = []

    def _look_up(self) -> bytearray:
        places = bytearray(len(self._chunks) * PLACE.size)
        try:
            self._reads.index.find_packed(self._chunks, places)
        except ValueError:  # an id is not well formed: no place is known, and the engine reports the error
            return bytearray(len(places))
        return places

    def __enter__(self) -> Self:
        self._held = [self._reads.descriptors.enter(SegmentId(segment)) for segment in self._plan.segments]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, []
        for one in held:
            if one is not None:
                self._reads.descriptors.leave(one)
        if error is None and self._reads.check is Check.NONE and self._plan.runs:
            self._look_again()

    def tasks(self, *, is_shared: bool) -> list[Task]:
        """Return the reads and checks to do, in parts for several threads, or for one."""
        plan = self._plan
        if self._is_checked:
            tasks: list[Task] = [self._read_checked] if plan.runs else []
        elif self._reads.check is Check.NONE and not is_shared:
            tasks = [partial(self._read_part, 0, plan.runs)]  # parts would gain nothing
        else:
            tasks = [partial(self._read_part, *part) for part in plan.parts(PART_BYTES)]
        if plan.slots:
            tasks += [partial(self._copy_part, *part) for part in self._pieces(is_shared=is_shared)]
        others = [number for number in plan.others if not (self._asks and self._place(number)[0] in IN_SLABS)]
        tasks += [partial(self._read_alone, number) for number in others]
        return tasks

    def _descriptors(self) -> list[Descriptor | None]:
        return [None if held is None else (held.descriptor, held.nowait) for held in self._held]

    def _read_checked(self) -> None:
        """Read and check all runs of the plan."""
        self._plan.read_checked(self._descriptors(), self.lengths, self._helper)

    def _read_part(self, first: int, stop: int) -> None:
        """Read and check runs of the plan."""
        descriptors = self._descriptors()
        if self._reads.check is Check.NONE:
            self._plan.read_lengths(first, stop, descriptors, self.lengths)
        else:
            self._check(self._plan.read(first, stop, descriptors))

    def _pieces(self, *, is_shared: bool) -> list[tuple[int, int]]:
        """Return the chunks in pieces of about `PART_BYTES`: first index and end of each piece."""
        count = len(self._chunks)
        if self._reads.check is Check.NONE and not is_shared:
            return [(0, count)]
        step = max(1, count * PART_BYTES // max(1, sum(map(len, self._targets))))
        return [(first, min(first + step, count)) for first in range(0, count, step)]

    def _copy_part(self, first: int, stop: int) -> None:
        """Copy chunks from slabs, and check them."""
        arena = self._reads.descriptors.slabs.arena
        if arena is not None:
            slabs = arena.generations, arena.slabs, arena.slab_bytes
            self._check(self._plan.copy(first, stop, *slabs, self._asks))

    def _check(self, arrived: list[Arrived]) -> None:
        """Check arrived chunks, and set the lengths of those that are right."""
        lengths, chunks, targets, check = self.lengths, self._chunks, self._targets, self._reads.check
        is_unchecked = check is Check.NONE
        for number, length, crc in arrived:
            target = targets[number]
            content = target if len(target) == length else target[:length]
            if is_unchecked or matches(chunks[number], content, check, crc):
                lengths[number] = length

    def _read_alone(self, number: int) -> None:
        """Read and check a chunk that is not in the plan: one in a slab, or one with a vector of granule CRCs."""
        found = self._place(number)
        target = self._targets[number]
        if found[3] <= len(target):
            chunk = ChunkId(self._chunks[number])
            self.lengths[number] = self._reads.read_found(chunk, found, target[: found[3]])

    def _place(self, number: int) -> Found:
        segment, offset, length, crc, tier = PLACE.unpack_from(self._places, number * PLACE.size)
        return tier, segment, offset, length, crc

    def _look_again(self) -> None:
        """Set NOT_READ for chunks that are not, or not certainly, at the place where they were read."""
        again = self._look_up()
        is_kept = self._reads.is_kept()
        if is_kept and again == self._places:
            return
        pairs = zip(PLACE.iter_unpack(again), PLACE.iter_unpack(self._places), strict=True)
        for number, (now, before) in enumerate(pairs):
            if before[4] in IN_FILES and not (is_kept and now == before):
                self.lengths[number] = NOT_READ


def _packed(places: Sequence[Found] | bytearray) -> bytearray:
    if isinstance(places, bytearray):
        return places
    return bytearray().join(PLACE.pack(*where, tier) for tier, *where in places)


def memories_of(chunks: Sequence[bytes], lent: Sequence[WritableBuffer]) -> list[memoryview]:
    """Return the memory of each chunk, like `writable_memory.chunk_memories`; faster if all are plain byte views."""
    if isinstance(lent, list) and len(lent) == len(chunks) and are_bytes(lent):
        return lent
    return chunk_memories(chunks, lent)
