"""Pools: memory of a client that the engine loads chunks into, many with one request.  Made by `lake.pool(...)`.

    with lake.pool(size_bytes=64 << 20) as pool:
        lengths = lake.load_many(chunks, pool, offsets)
        pool.buffer[offsets[0] : offsets[0] + lengths[0]]

A pool makes its own memory, or uses existing memory: with `descriptor` the shared region of another program (a memfd,
or a file on tmpfs or hugetlbfs), which is then filled in place.

Rules kept here:
- A pool belongs to one lake.  It is lent to the engine when it is first used, and again over a new connection.
- The descriptor is duplicated: the caller may close its own.  Nothing here changes the length of the file.
- A pool belongs to one process: a forked child has the same pages, and the two would load over each other.

If another program shrinks the memory, loads fail; but this process maps it too, and a read of the missing pages gets
SIGBUS.  Programs that cannot trust each other seal the memory against shrinking (F_SEAL_SHRINK).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.host.new_memory import check_lendable, duplicate, new_memory
from lakefs.host.replaced_pages import replace_pages
from lakefs.limits import PAGE_BYTES

if TYPE_CHECKING:
    from lakefs.transport.fabric import Region


class Pool:
    """Memory that is lent to the engine, writable.  Made by `lake.pool`.

    InvalidArgument when neither a size nor a descriptor is given, or the size is more than can be lent (256 GiB);
    LocalFileError when memory is short, the file has fewer bytes than `size_bytes`, or it cannot be mapped.
    """

    def __init__(self, *, size_bytes: int = 0, descriptor: int | None = None) -> None:
        if size_bytes <= 0 and descriptor is None:
            raise InvalidArgument("a pool needs a size of at least 1 byte, or the descriptor of existing memory")
        self.number: int | None = None
        """The engine's number for the pool; None while it is not lent."""
        self.is_refused = False
        """True if the engine accepts no memory from this client, or RDMA this memory: bytes are streamed instead."""
        self.region: Region | None = None
        """The pool's registration for RDMA; None while it is not registered."""
        check_lendable(size_bytes)
        self._is_made_here = descriptor is None
        self._descriptor = new_memory(size_bytes) if descriptor is None else duplicate(descriptor)
        try:
            self.size_bytes = size_bytes or os.fstat(self._descriptor).st_size
            check_lendable(self.size_bytes)
            mapping = mmap.mmap(self._descriptor, self.size_bytes)
        except InvalidArgument:
            os.close(self._descriptor)
            raise
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise LocalFileError(f"the memory of a pool cannot be mapped: {error}") from error
        self._mapping = mapping
        self._process = os.getpid()
        self._registering = threading.Lock()
        self.buffer = memoryview(mapping)
        """The whole memory, writable."""

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory; the pool keeps owning it."""
        return self._descriptor

    @property
    def is_own(self) -> bool:
        """True if this process made the pool."""
        return os.getpid() == self._process

    def check_own(self) -> None:
        """Raise InvalidArgument in a process other than the one that made the pool."""
        if not self.is_own:
            raise InvalidArgument(
                "this pool belongs to another process, which loads into the same memory; make one here"
            )

    def note_lent(self, number: int) -> bool:
        """Note the engine's number for the pool; return False if another number was noted already."""
        if self.number is None:
            self.number = number
        return self.number == number

    def forget(self, number: int) -> None:
        """Note that the engine no longer knows the pool by that number."""
        if self.number == number:
            self.number = None

    def note_registered(self, region: Region) -> bool:
        """Note the pool's registration; return False if it is registered already, or closed.  Any thread."""
        with self._registering:
            if self.region is None and self._descriptor >= 0:
                self.region = region
            return self.region is region

    def unregister(self, region: Region | None = None) -> None:
        """End the registration, or `region` and only that: on return no peer reaches the memory by it."""
        with self._registering:
            ended = region or self.region
            if self.region is ended:
                self.region = None
        if ended is not None:
            ended.close()

    def leave_behind(self, slots: Sequence[tuple[int, int]]) -> None:
        """Put other pages in the place of slots (offset, room) that an engine may still write to, and lend no more.

        Chunks and values are streamed from then on.  Memory of another program (`descriptor`) stays as it is, because
        that maps it too: the engine asks before each write if this client has left.  LocalFileError.
        """
        self.number = None
        if not self._is_made_here or self._descriptor < 0:
            return
        self.is_refused = True
        for begin, end in _joined(slots):
            replace_pages(self.buffer, begin, min(end, self.size_bytes))

    def slot(self, offset: int, length: int) -> memoryview:
        """Return a part of the memory.  InvalidArgument when it is outside."""
        if not 0 <= offset <= offset + length <= self.size_bytes:
            raise InvalidArgument(f"{offset}+{length} is outside a pool of {self.size_bytes} bytes")
        return self.buffer[offset : offset + length]

    def close(self) -> None:
        """Close the pool; arrays and slices of the memory keep its pages.  Idempotent."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        if self.is_own:  # else the registration is the parent's
            self.unregister()
        self.buffer.release()
        try:
            self._mapping.close()
        except BufferError:  # views exist; the memory is unmapped with the last of them
            return


def _joined(slots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of whole pages in which slots lie, as (begin, end), those that touch as one."""
    found: list[tuple[int, int]] = []
    for offset, room in sorted(slots):
        begin, end = offset // PAGE_BYTES * PAGE_BYTES, -(-(offset + room) // PAGE_BYTES) * PAGE_BYTES
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
