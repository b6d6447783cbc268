"""Reads of many places at once: through io_uring, awaited in trio, or through the `Offload` port.

io_uring: the reads of one call are one batch and one system call.  An eventfd signals completions, and a caller is
woken when its whole batch has ended.  Bytes in the page cache are copied during the submission and cost no wake-up.

Rules kept here:
- The queue is chosen once, when a store is opened: io_uring if it is wanted and the kernel allows it, else threads.
  Its `kind` and `reason` report the choice.
- Both give the same answers (`lakefs.ports.IoQueue`); only the cost differs.
- Only the loop's thread touches the ring.
- At most RING_ENTRIES reads are with the kernel.  The others wait in the order of their calls; each belongs to a
  waiting task, so their number is bounded by that of tasks.
- `RingQueue.read_many` repeats a failed or short read through the other queue (`spare`): that tells the file's end from
  a fault, raises errors as every read does, and retries a read that failed once.  `read_packed` only reports it.
- When the kernel accepts no more reads, the spare queue serves for good, and that is logged once.
- A caller gets its memory back only when the kernel has finished with it, even if it was cancelled.

Files and buffers are not registered with the kernel: the gain was within noise for such reads, and it would pin the
memory and cost a call for each segment opened.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio

from engine.host.tasks import plain_errors
from lakefs.errors import LakeError
from lakefs.limits import RING_ENTRIES
from lakefs.ports import FilePlace, FileRead, IoQueue, Offload

try:
    from engine.host import _io_uring as _ring
except ImportError:  # there was no compiler
    _RING_IS_BUILT = False
else:
    _RING_IS_BUILT = True

if TYPE_CHECKING:
    from engine.host._io_uring import Batch, Ring

SWITCHED_OFF: Final = "switched off by io_uring = off"
_EVENT_BYTES: Final = 8
_LOOK_S: Final = 1.0
_log: Final = structlog.get_logger(__name__)


@asynccontextmanager
async def open_io_queue(offload: Offload, *, wanted: bool = True) -> AsyncIterator[IoQueue]:
    """Open the queue that this machine allows; it is not used after the block ends."""
    threads = OffloadQueue(offload)
    opened = opened_ring() if wanted else SWITCHED_OFF
    if isinstance(opened, str):
        threads.reason = opened
        yield threads
        return
    async with running_ring_queue(opened, threads) as queue:
        yield queue


class OffloadQueue:
    """Does all reads of a call one after the other in one thread of the pool (`lakefs.ports.IoQueue`).

    A call to the pool for each would cost more than most reads take; many callers still keep many threads busy.
    """

    kind: Final = "threads"

    def __init__(self, offload: Offload, reason: str = "") -> None:
        self._offload = offload
        self.reason = reason

    async def read_many(self, reads: Sequence[FileRead]) -> list[int | LakeError]:
        """Return for each read the count of bytes or its error; always a checkpoint."""
        return await self._offload.run(_read_each, reads)

    async def read_packed(self, places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
        """Return for each place True if all of it was read; always a checkpoint."""
        return await self._offload.run(_read_packed, places, buffer)


def _read_each(reads: Sequence[FileRead]) -> list[int | LakeError]:
    return [_read_one(read) for read in reads]


def _read_one(read: FileRead) -> int | LakeError:
    try:
        return read.file.pread_into(read.buffer, read.offset)
    except LakeError as error:
        return error


def _read_packed(places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
    """Fill `buffer` with the places, one behind the other; returns for each True if it was read whole."""
    whole: list[bool] = []
    at = 0
    for file, offset, length in places:
        whole.append(_read_one(FileRead(file, buffer[at : at + length], offset)) == length)
        at += length
    return whole


def opened_ring(entries: int = RING_ENTRIES) -> Ring | str:
    """Open a ring and try one operation on it; returns the ring, or why this machine has none."""
    if not _RING_IS_BUILT:
        return "the native module engine.host._io_uring is not built: install a C compiler and run the setup again"
    try:
        ring = _ring.Ring(entries)
    except OSError as error:
        return _refusal_text(error)
    try:
        batch = _ring.Batch(1)
        batch.add(_ring.NOP, -1, None, 0)
        ring.submit(batch)
        ring.wait(1)
        ring.reap()
    except OSError as error:
        ring.close()
        return _refusal_text(error)
    return ring


def _refusal_text(error: OSError) -> str:
    return (
        f"the kernel refuses io_uring: {error.strerror}; see the sysctl kernel.io_uring_disabled, "
        "the filter of system calls (seccomp), and LimitMEMLOCK"
    )


class RingQueue:
    """Reads through one ring (`lakefs.ports.IoQueue`).  `run` is running while it is used."""

    def __init__(self, ring: Ring, spare: IoQueue) -> None:
        self._ring = ring
        self._spare = spare
        self._waiting: deque[Batch] = deque()
        self._used = trio.Event()
        self.reason = ""
        """Why the spare queue serves; empty while the ring does."""

    @property
    def kind(self) -> str:
        """The queue that serves: `io_uring`, or the kind of the spare."""
        return self._spare.kind if self.reason else "io_uring"

    async def read_many(self, reads: Sequence[FileRead]) -> list[int | LakeError]:
        """Return for each read the count of bytes or its error; no checkpoint when all of them were in memory."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.reason:
            return await self._spare.read_many(reads)
        batch = _ring.Batch(len(reads))
        for file, buffer, offset in reads:
            batch.add(_ring.READ, file.fileno(), buffer, offset)
        await self._do(batch)
        return await self._completed(reads, batch)

    async def read_packed(self, places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
        """Return for each place True if all of it was read; no checkpoint when all of them were in memory."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.reason:
            return await self._spare.read_packed(places, buffer)
        batch = _ring.Batch(len(places))
        batch.add_reads(places, buffer)
        await self._do(batch)
        return batch.are_whole()

    async def _do(self, batch: Batch) -> None:
        """Submit the batch; returns when all of it has ended or was given up.  Not interruptible."""
        if batch.pending:
            self._waiting.append(batch)
            self._advance()
        if batch.pending:
            self._used.set()
            batch.task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_not_interruptible)

    async def run(self) -> None:
        """Take completions until cancelled."""
        event = self._ring.eventfd()
        while True:
            await trio.lowlevel.wait_readable(event)
            with suppress(BlockingIOError):
                os.read(event, _EVENT_BYTES)
            self._advance()

    async def look_now_and_then(self) -> None:
        """Take completions that no event signalled, until cancelled.

        Events are off during a submission.  No memory order is guaranteed between turning them on again and a
        completion that another core posts at that moment.  Such a completion, should it ever occur, is late, not lost.
        """
        while True:
            if not self._waiting and not self._ring.in_flight:  # nothing can be late
                self._used = trio.Event()
                await self._used.wait()
            await trio.sleep(_LOOK_S)
            self._advance()

    def _advance(self) -> None:
        """Take completions and submit waiting reads, as long as either makes progress."""
        while True:
            self._take_completions()
            if not self._waiting:
                return
            in_flight = self._ring.in_flight
            if not self._submit():
                self._take_completions()  # no event signals completions during the attempt
                if self._ring.in_flight == in_flight:
                    return

    def _take_completions(self) -> None:
        for batch in self._ring.reap():
            _wake(batch)

    def _submit(self) -> bool:
        """Submit the waiting reads that the ring has room for; returns True if any were."""
        any_taken = False
        while self._waiting:
            batch = self._waiting[0]
            try:
                any_taken = self._ring.submit(batch) > 0 or any_taken
            except OSError as error:
                self._give_up(_refusal_text(error))
                return any_taken
            if batch.submitted < batch.count:
                return any_taken
            self._waiting.popleft()
        return any_taken

    def _give_up(self, reason: str) -> None:
        """Leave waiting and later reads to the spare queue, as the kernel accepts none."""
        self.reason = reason
        _log.warning("io_uring is not used any more; reads go through threads", reason=reason)
        while self._waiting:
            batch = self._waiting.popleft()
            if batch.give_up():
                _wake(batch)

    async def _completed(self, reads: Sequence[FileRead], batch: Batch) -> list[int | LakeError]:
        """Return the results; repeats failed and short reads through the spare queue.  Not interruptible."""
        results: list[int | LakeError] = [*batch.results()]
        missing = [index for index, is_whole in enumerate(batch.are_whole()) if not is_whole]
        if missing:
            with trio.CancelScope(shield=True):
                told = await self._spare.read_many([reads[index] for index in missing])
            for index, result in zip(missing, told, strict=True):
                results[index] = result
        return results


@asynccontextmanager
async def running_ring_queue(ring: Ring, spare: IoQueue) -> AsyncIterator[RingQueue]:
    """Run a queue on the ring, and close the ring.  No read may be under way when the block ends."""
    queue = RingQueue(ring, spare)
    taking = trio.CancelScope(shield=True)  # readers that are cancelled wait for their completions

    async def take() -> None:
        with taking:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(queue.look_now_and_then)
                await queue.run()

    try:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take)
                try:
                    yield queue
                finally:
                    taking.cancel()
    finally:
        ring.close()  # blocks while the kernel still uses memory of a caller; `run` has ended


def _wake(batch: Batch) -> None:
    """Resume the task that waits for the ended batch, if one does yet."""
    if batch.task is not None:
        trio.lowlevel.reschedule(batch.task)


def _not_interruptible(raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
