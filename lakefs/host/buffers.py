"""Pooled payload buffers: page-aligned memory for one chunk and the checksums behind it.

Rules kept here:
- At most `total_bytes // BUFFER_BYTES` buffers exist; a task that finds none waits, first come first served.
- A buffer's pages are touched by its first user and kept afterwards: a fresh 4 MiB mapping costs 1.5 ms to fill, a
  used one 0.3 ms.
- While a task waits no buffer is free: a released buffer is passed straight to the first waiter.
- The first few may lie on huge pages, which a write past the page cache hands to the disk with half to a quarter of
  the processor's time.  They are allocated together, at the first use, so that memory grows once, and used before
  others.

- The payload in a buffer may be sent to an engine as a `PooledPayload`: an engine in the same process then stores it
  from there, and the buffer is released only when the request has ended.

Contents are not cleared between users.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from pathlib import Path
from typing import Final, cast

import outcome
import trio

from lakefs.host.memory_advice import HUGE_BYTES, POPULATE_WRITE, advise
from lakefs.ids import Buffer
from lakefs.limits import CHUNK_BYTES, PAGE_BYTES

BUFFER_BYTES: Final = CHUNK_BYTES + PAGE_BYTES
"""One chunk, then its vector (256 bytes at most) and the zeros to the page's end."""
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class PooledBuffer:
    """One acquisition of a buffer.  `release` exactly once; `view` must not be touched afterwards."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, pool: BufferPool, memory: memoryview) -> None:
        self._pool = pool
        self._memory: memoryview | None = memory

    @property
    def view(self) -> memoryview:
        """The whole buffer: writable, page-aligned, BUFFER_BYTES long."""
        assert self._memory is not None, "the buffer was released"
        return self._memory

    def release(self) -> None:
        """Return the memory to the pool."""
        memory, self._memory = self._memory, None
        assert memory is not None, "the buffer was released twice"
        self._pool._take_back(memory)


class PooledPayload(list[Buffer]):
    """The body of a request that stores one payload, which lies at the front of a pooled buffer.

    From the call until it has returned or raised, cancelled or not, the whole buffer is the engine's: one in this
    process hashes and writes the payload where it lies, and puts its checksums behind it.
    """

    def __init__(self, buffer: PooledBuffer, length: int) -> None:
        self.area = buffer.view
        super().__init__([self.area[:length]])


class BufferPool:
    """A bounded set of payload buffers, allocated when first needed."""

    def __init__(self, total_bytes: int, huge_buffers: int = 0, memory: memoryview | None = None) -> None:
        """Create a pool; `huge_buffers` of its buffers are on huge pages, if the machine provides them on request.

        `memory`: page-aligned, of at least `total_bytes`; the buffers lie there.
        """
        self._count_max = total_bytes // BUFFER_BYTES
        assert self._count_max > 0, "a pool holds at least one buffer"
        self._huge_wanted = min(huge_buffers, self._count_max)
        self._huge: mmap.mmap | None = None
        self._memory = memory
        self._made = 0
        self._free: list[memoryview] = []
        self._waiting: OrderedDict[trio.lowlevel.Task, None] = OrderedDict()

    @property
    def in_use(self) -> int:
        """Buffers acquired and not yet released."""
        return self._made - len(self._free)

    @property
    def made(self) -> int:
        """Buffers that were acquired, now or earlier: those that take memory."""
        return self._made

    @property
    def capacity(self) -> int:
        """Buffers that can be in use at once."""
        return self._count_max

    @property
    def waiting(self) -> int:
        """Tasks that are waiting for a buffer."""
        return len(self._waiting)

    def try_acquire(self) -> PooledBuffer | None:
        """Return a buffer, or None if all are in use."""
        if self._huge_wanted:
            self._make_huge()
        if self._free:
            assert not self._waiting
            return PooledBuffer(self, self._free.pop())
        if self._made < self._count_max:
            memory = self._new_buffer()
            self._made += 1
            return PooledBuffer(self, memory)
        return None

    async def acquire(self) -> PooledBuffer:
        """Return a buffer; waits in turn while all are in use.  Cancelled: nothing is taken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        buffer = self.try_acquire()
        if buffer is not None:
            return buffer
        task = trio.lowlevel.current_task()
        self._waiting[task] = None

        def leave(raise_cancel: object) -> trio.lowlevel.Abort:
            del self._waiting[task]
            return trio.lowlevel.Abort.SUCCEEDED

        return cast(PooledBuffer, await trio.lowlevel.wait_task_rescheduled(leave))

    def _take_back(self, memory: memoryview) -> None:
        if not self._waiting:
            self._free.insert(len(self._free) if memory.obj is self._huge else 0, memory)
            return
        task, _ = self._waiting.popitem(last=False)
        trio.lowlevel.reschedule(task, outcome.Value(PooledBuffer(self, memory)))

    def _new_buffer(self) -> memoryview:
        if self._memory is None:
            return memoryview(mmap.mmap(-1, BUFFER_BYTES))
        return self._memory[self._made * BUFFER_BYTES :][:BUFFER_BYTES]

    def _make_huge(self) -> None:
        """Allocate the buffers on huge pages: once, and none if the machine provides none."""
        count, self._huge_wanted = self._huge_wanted, 0
        self._huge = _huge_memory(count * BUFFER_BYTES)
        if self._huge is not None:
            view = memoryview(self._huge)
            self._free += [view[at * BUFFER_BYTES :][:BUFFER_BYTES] for at in range(count)]
            self._made += count


def _huge_memory(size_bytes: int) -> mmap.mmap | None:
    """Return private memory whose huge pages are allocated; None if the kernel provides none on request."""
    try:
        if "[never]" in _HUGE_PAGES.read_text():
            return None
        whole = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        return None
    if advise(memory, mmap.MADV_HUGEPAGE):
        memory.close()
        return None
    advise(memory, POPULATE_WRITE)  # an older kernel allocates them when they are touched
    return memory
