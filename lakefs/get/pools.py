"""Memory of a client that the engine loads chunks into, many with one request: `lake.pool(...)`.

    with lake.pool(size_bytes=64 << 20) as pool:
        lengths = lake.load_many(chunks, pool, offsets)
        pool.buffer[offsets[0] : offsets[0] + lengths[0]]

A pool is memory of its own, or memory that is there: with `descriptor` the shared region of another program (a memfd,
or a file on tmpfs or hugetlbfs), which is then filled in place.

Rules kept here:
- A pool is of one lake.  It is lent to the engine when it is first used, and again when the connection is another.
- The descriptor is duplicated: whoever gave it may close it.  Nothing here changes the length of the file.
- It is of one process: a child that was forked has the same pages, and the two would load over each other.

Memory that another program shrinks makes loads fail; but this process maps it too, and who reads what is gone gets
SIGBUS.  Programs that cannot trust each other seal it against shrinking (F_SEAL_SHRINK).
"""

from __future__ import annotations

import mmap
import os

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.host.new_memory import check_lendable, new_memory


class Pool:
    """Memory that is lent to the engine, writable.  Made by `lake.pool`.

    InvalidArgument when neither a size nor a descriptor is given, or it is more than can be lent (256 GiB);
    LocalFileError when there is no memory, it has fewer bytes, or it cannot be mapped.
    """

    def __init__(self, *, size_bytes: int = 0, descriptor: int | None = None) -> None:
        if size_bytes <= 0 and descriptor is None:
            raise InvalidArgument(
                "a pool has a size of 1 byte and more, or the descriptor of memory that is there"
            )
        self.number: int | None = None
        """What the engine calls it; None while it is not lent."""
        self.is_refused = False
        """Whether the engine does not take memory from this client: bytes are sent instead."""
        check_lendable(size_bytes)
        self._descriptor = new_memory(size_bytes) if descriptor is None else _duplicate(descriptor)
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
        self.buffer = memoryview(mapping)
        """All of it, writable."""

    @property
    def descriptor(self) -> int:
        """Of the memory; stays the pool's."""
        return self._descriptor

    @property
    def is_own(self) -> bool:
        """Whether this process made it."""
        return os.getpid() == self._process

    def check_own(self) -> None:
        """InvalidArgument in another process than the one that made it."""
        if not self.is_own:
            raise InvalidArgument(
                "this pool is another process's, which loads into the same memory; make one here"
            )

    def note_lent(self, number: int) -> bool:
        """The engine knows it by that number; False when it is known by another one already."""
        if self.number is None:
            self.number = number
        return self.number == number

    def forget(self, number: int) -> None:
        """The engine does not know it by that number any more."""
        if self.number == number:
            self.number = None

    def slot(self, offset: int, length: int) -> memoryview:
        """A part of the memory.  InvalidArgument when it is outside."""
        if not 0 <= offset <= offset + length <= self.size_bytes:
            raise InvalidArgument(f"{offset}+{length} is outside a pool of {self.size_bytes} bytes")
        return self.buffer[offset : offset + length]

    def close(self) -> None:
        """Let the memory go; what looks into it (an array, a slice) keeps its pages.  A second time does nothing."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self.buffer.release()
        try:
            self._mapping.close()
        except BufferError:  # it is looked into, and is unmapped with the last view
            return


def _duplicate(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError as error:
        raise InvalidArgument(f"descriptor {descriptor} is not open: {error.strerror}") from error
