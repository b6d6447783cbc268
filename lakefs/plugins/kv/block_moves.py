"""Blocks between a host's memory and a space: loads and stores as jobs of the movers, and what has ended since.

The memory is divided in rows of one length, a block each; a job has a key and a row for each block.  Nothing here
belongs to one host.

    copied  the client reads each value into its row, and sends rows to be stored
    lent    the engine writes values to rows of the memory, and copies rows that are to be stored out of it

Memory is lent when the host has a descriptor of it; both ways move the same bytes.

Rules kept here:
- Submitting and collecting never wait.  Each submitted job ends once.
- A load ends with the keys that were loaded whole; a row of any other key may hold anything.
- Rows are checked before a job is queued: a job with a row outside the memory fails.
- After the movers' end nothing touches the memory; `close` lets go of the mappings of lent memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lakefs.client.blocking.spaces import Space
from lakefs.errors import InvalidArgument, LakeError, LocalFileError
from lakefs.get.pools import Pool
from lakefs.limits import KEYED_VALUE_BYTES_MAX
from lakefs.plugins.kv.movers import Movers
from lakefs.put.keyed import Outcome
from lakefs.put.shared_memory import SharedMemory, Slot


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its keys that were moved, in order, and those that were not; seconds and bytes."""

    number: int
    is_load: bool
    moved: list[bytes]
    failed: list[bytes]
    seconds: float
    moved_bytes: int
    reason: str = ""
    """Text of the first error, if there was one."""


class _Lent:
    """The host's memory as lent to the engine: a pool of the reading thread, shared memory of the writing one."""

    def __init__(self, size_bytes: int, descriptor: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pool = Pool(size_bytes=size_bytes, descriptor=descriptor)
        try:
            self._memory = SharedMemory(size_bytes, descriptor=descriptor)
        except BaseException:
            self._pool.close()
            raise

    def load(self, space: Space, keys: Sequence[bytes], rows: Sequence[int]) -> list[int]:
        """Load values into rows; returns their lengths, 0 for a miss."""
        size = self._block_bytes
        return space.load(keys, self._pool, [row * size for row in rows], [size] * len(rows))

    def slots(self, rows: Sequence[int]) -> list[Slot]:
        """Return the rows as slots to be stored."""
        size = self._block_bytes
        return [self._memory.slot(row * size, size) for row in rows]

    def close(self) -> None:
        """Unmap both."""
        self._pool.close()
        self._memory.close()


class BlockMoves:
    """Jobs over one memory.  Used from any thread, by one at a time."""

    def __init__(self, movers: Movers, memory: memoryview, block_bytes: int, descriptor: int | None = None) -> None:
        """Jobs over memory that is contiguous and writable; a block has 1 byte to 256 MiB.  InvalidArgument.

        `descriptor`: of the file that `memory` maps from its first byte on, to be lent; it is duplicated.  Without it,
        or where the file cannot be mapped once more, blocks are copied.
        """
        if not 1 <= block_bytes <= KEYED_VALUE_BYTES_MAX:
            raise InvalidArgument(f"a block has {block_bytes} bytes; the lake keeps 1 to {KEYED_VALUE_BYTES_MAX}")
        self._movers = movers
        self._memory = memory.cast("B")
        self._block_bytes = block_bytes
        self._lent: _Lent | None = None
        if descriptor is not None:
            with suppress(LocalFileError):
                self._lent = _Lent(self._memory.nbytes, descriptor, block_bytes)
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._running = 0

    @property
    def is_lent(self) -> bool:
        """True if the engine is lent the memory; else blocks are copied."""
        return self._lent is not None

    @property
    def is_busy(self) -> bool:
        """True while a job has not ended, or its end was not collected."""
        with self._lock:
            return bool(self._running or self._ended)

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begin to load the blocks of these keys into rows."""
        wanted = list(keys)
        blocks = self._begin(number, wanted, rows, is_load=True)
        if blocks is None:
            return

        lent, places = self._lent, list(rows)

        def run(space: Space) -> tuple[list[bool], str]:
            if lent is not None:
                lengths = lent.load(space, wanted, places)
            else:
                lengths = space.get_many_into(wanted, blocks)
            return [length == self._block_bytes for length in lengths], ""

        began = time.monotonic()
        self._movers.reader.submit(run, lambda result: self._end(number, wanted, result, began, is_load=True))

    def store(self, number: int, keys: Sequence[bytes], rows: Sequence[int], depths: Sequence[int]) -> None:
        """Begin to store the blocks in rows under these keys.

        A key that has a value of a block's length counts as stored; a value of another length is replaced.
        """
        wanted, deep = list(keys), list(depths)
        blocks = self._begin(number, wanted, rows, is_load=False)
        if blocks is None:
            return
        values = blocks if self._lent is None else self._lent.slots(rows)

        def run(space: Space) -> tuple[list[bool], str]:
            done = space.put_many(wanted, values, depths=deep, resize=True)
            reason = next((error.message for error in done.failures.values()), "")
            return [outcome is not Outcome.FAILED for outcome in done.outcomes], reason

        began = time.monotonic()
        self._movers.writer.submit(run, lambda result: self._end(number, wanted, result, began, is_load=False))

    def collect(self) -> list[Ended]:
        """Return the jobs that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Let go of lent memory, after the movers have ended.  Idempotent."""
        if self._lent is not None:
            self._lent.close()

    def _begin(self, number: int, keys: list[bytes], rows: Sequence[int], *, is_load: bool) -> list[memoryview] | None:
        """Count a job as running and return its rows; or end it, if it is not sound."""
        with self._lock:
            self._running += 1
        size = self._block_bytes
        count = len(self._memory) // size
        if len(keys) != len(rows) or not all(0 <= row < count for row in rows):
            error = InvalidArgument(f"{len(keys)} keys and rows {list(rows)!r:.60} of {count} do not go together")
            self._end(number, keys, error, time.monotonic(), is_load=is_load)
            return None
        return [self._memory[row * size : (row + 1) * size] for row in rows]

    def _end(
        self, number: int, keys: list[bytes], result: tuple[list[bool], str] | LakeError, began: float, *, is_load: bool
    ) -> None:
        flags, reason = ([False] * len(keys), result.message) if isinstance(result, LakeError) else result
        moved = [key for key, is_moved in zip(keys, flags, strict=True) if is_moved]
        failed = [key for key, is_moved in zip(keys, flags, strict=True) if not is_moved]
        seconds = time.monotonic() - began
        ended = Ended(number, is_load, moved, failed, seconds, len(moved) * self._block_bytes, reason)
        with self._lock:
            self._ended.append(ended)
            self._running -= 1
