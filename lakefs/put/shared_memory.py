"""Memory that a client shares with the engine: it writes payload here, and the payload never passes the socket.

    with lake.shared_memory(64 << 20) as memory:
        slot = memory.allocate(1 << 20)
        numpy.frombuffer(slot.buffer, dtype="float32")[:] = values
        lake.put("models/values", slot)

The engine copies a slot before it hashes it, so a slot may be filled anew as soon as its put has returned.  A write
to the slot before that changes only the content stored under that name.

With `descriptor` it is the shared region of another program (a memfd, or a file on tmpfs or hugetlbfs) instead.

Rules kept here:
- New memory is sealed against shrinking and growing, and its pages are allocated at the beginning: filling it costs
  no page fault.  Existing memory stays as it is; the caller may close its own descriptor.
- Room from `allocate` belongs to one slot until its `release`.  `slot` allocates nothing: its caller manages the
  memory itself.
- Each lake has its own number for a memory (`LentMemories`): one memory may be used with several lakes.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import insort
from typing import Self
from weakref import WeakKeyDictionary

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.host.forks import follow_forks
from lakefs.host.memory_advice import POPULATE_WRITE, advise
from lakefs.host.new_memory import check_lendable, duplicate, new_memory
from lakefs.limits import PAGE_BYTES


class SharedMemory:
    """Memory of `size_bytes`, rounded up to pages; or the first `size_bytes` of a descriptor.  Making it blocks.

    InvalidArgument (above 256 GiB, or the descriptor is not open), LocalFileError (no memory, or fewer bytes).

    Used from any thread, and after a fork from both processes, which then share the bytes but not the record of
    allocated room.
    """

    def __init__(self, size_bytes: int, *, descriptor: int | None = None) -> None:
        if size_bytes <= 0:
            raise InvalidArgument(f"shared memory has 1 byte and more, not {size_bytes}")
        check_lendable(size_bytes)
        if descriptor is None:
            self.size_bytes = _page_up(size_bytes)
            self._descriptor = new_memory(self.size_bytes, sealed=True)
        else:
            self.size_bytes = size_bytes
            self._descriptor = duplicate(descriptor)
        try:
            self._mapping = mmap.mmap(self._descriptor, self.size_bytes)
            if descriptor is None:
                _populate(self._mapping)
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise _no_memory(size_bytes, error) from error
        self._buffer = memoryview(self._mapping)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)]
        follow_forks(self)

    @property
    def buffer(self) -> memoryview:
        """The whole memory, writable; also the room that belongs to no slot."""
        return self._buffer

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory; the object keeps owning it."""
        return self._descriptor

    def begin_anew(self) -> None:
        """Make a new lock in a forked child (see `lakefs.host.forks`); the bytes stay shared."""
        self._lock = threading.Lock()

    def slot(self, offset: int, length: int) -> Slot:
        """Return a range of the memory, without allocating it: other slots may overlap it.  InvalidArgument."""
        if not 0 <= offset <= offset + length <= self.size_bytes:
            raise InvalidArgument(f"{offset}+{length} is outside a shared memory of {self.size_bytes} bytes")
        return Slot(self, offset, length)

    def allocate(self, length: int) -> Slot:
        """Return a slot that overlaps no other allocated one and begins a page; `release` frees it.

        InvalidArgument when there is no room in one piece.
        """
        room = max(_page_up(length), PAGE_BYTES)
        with self._lock:
            for index, (offset, free) in enumerate(self._free):
                if free >= room:
                    self._free[index : index + 1] = [(offset + room, free - room)] if free > room else []
                    return Slot(self, offset, length, room)
        raise InvalidArgument(
            f"no {length} bytes in one piece are free in a shared memory of {self.size_bytes}; release slots"
        )

    def close(self) -> None:
        """Close the memory; its pages stay while an array or a view of a slot uses them.  Idempotent."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._buffer.release()
        try:
            self._mapping.close()
        except BufferError:  # views exist; the memory is unmapped with the last of them
            return

    def give_back(self, offset: int, room: int) -> None:
        """Free room, for `Slot.release`; it is merged with free room beside it."""
        with self._lock:
            insort(self._free, (offset, room))
            merged: list[tuple[int, int]] = []
            for begin, length in self._free:
                if merged and sum(merged[-1]) == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((begin, length))
            self._free = merged


class Slot:
    """A range of a shared memory, to be filled and put.  `with memory.allocate(n) as slot:` releases it at the end."""

    __slots__ = ("_room", "length", "memory", "offset")

    def __init__(self, memory: SharedMemory, offset: int, length: int, room: int = 0) -> None:
        self.memory = memory
        self.offset = offset
        self.length = length
        self._room = room

    @property
    def buffer(self) -> memoryview:
        """The slot's bytes, writable; for `numpy.frombuffer` and `torch.frombuffer`."""
        return self.memory.buffer[self.offset : self.offset + self.length]

    def release(self) -> None:
        """Free the allocated room; no put of the slot may be under way.  Idempotent."""
        room, self._room = self._room, 0
        if room:
            self.memory.give_back(self.offset, room)

    def __len__(self) -> int:
        return self.length

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


LentMemories = WeakKeyDictionary[SharedMemory, int]
"""The numbers that one lake's engine gave to lent memories.  Used only in the thread that drives operations."""


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _populate(mapping: mmap.mmap) -> None:
    """Allocate all pages.  OSError when there are too few."""
    code = advise(mapping, POPULATE_WRITE)
    if code not in (0, errno.EINVAL):  # EINVAL: an older kernel, which allocates pages when they are first written
        raise OSError(code, os.strerror(code))


def _no_memory(size_bytes: int, error: OSError | ValueError) -> LocalFileError:
    reason = error.strerror if isinstance(error, OSError) else error
    return LocalFileError(f"no shared memory of {size_bytes} bytes is to be had: {reason}")
