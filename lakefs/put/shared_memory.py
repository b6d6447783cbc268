"""Memory of a client that it shares with the engine: payload is filled in here, and never passes the socket.

    with lake.shared_memory(64 << 20) as memory:
        slot = memory.allocate(1 << 20)
        numpy.frombuffer(slot.buffer, dtype="float32")[:] = values
        lake.put("models/values", slot)

The engine copies a slot before it hashes it, so a slot may be filled anew as soon as the put that it was given to has
returned.  Whoever writes to it before changes only what is stored under that name.

Rules kept here:
- The memory is sealed against shrinking and growing, and its pages are there from the beginning: filling it
  costs no page fault.
- Room that `allocate` gives out belongs to one slot until its `release`.  `slot` gives out nothing: who uses it knows
  what lies where.
- What the engine calls a memory is the business of each lake (`LentMemories`): one memory may be used with several.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import insort
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.host.forks import follow_forks
from lakefs.host.memory_advice import POPULATE_WRITE, advise
from lakefs.host.new_memory import check_lendable, new_memory
from lakefs.limits import PAGE_BYTES


class SharedMemory:
    """Memory of `size_bytes`, rounded up to pages.  Making it blocks.

    InvalidArgument (256 GiB are the most), LocalFileError (no memory).

    Used from any thread, and after a fork from both processes, which then share the bytes and not who has which room.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise InvalidArgument(f"shared memory has 1 byte and more, not {size_bytes}")
        check_lendable(size_bytes)
        self.size_bytes = _page_up(size_bytes)
        self._descriptor = new_memory(self.size_bytes, sealed=True)
        try:
            self._mapping = mmap.mmap(self._descriptor, self.size_bytes)
            _populate(self._mapping)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_memory(size_bytes, error) from error
        self._buffer = memoryview(self._mapping)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)]
        follow_forks(self)

    @property
    def buffer(self) -> memoryview:
        """All of it, writable; also what no slot was given of."""
        return self._buffer

    @property
    def descriptor(self) -> int:
        """The memfd; stays its own."""
        return self._descriptor

    def begin_anew(self) -> None:
        """See `lakefs.host.forks`: the bytes are shared on."""
        self._lock = threading.Lock()

    def slot(self, offset: int, length: int) -> Slot:
        """A range of the memory, whoever uses it besides.  InvalidArgument."""
        if not 0 <= offset <= offset + length <= self.size_bytes:
            raise InvalidArgument(f"{offset}+{length} is outside a shared memory of {self.size_bytes} bytes")
        return Slot(self, offset, length)

    def allocate(self, length: int) -> Slot:
        """A slot that no other has, from the start of a page; give it back by `release`.

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
        """Let the memory go; what still looks into it (an array, a view of a slot) keeps its pages until it goes, too.

        A second time does nothing.
        """
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._buffer.release()
        try:
            self._mapping.close()
        except BufferError:  # it is looked into, and is unmapped with the last view
            return

    def give_back(self, offset: int, room: int) -> None:
        """For `Slot.release`: the room is free again, in one piece with what is free beside it."""
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
        """Give allocated room back; no put of it is under way.  Nothing happens the second time."""
        room, self._room = self._room, 0
        if room:
            self.memory.give_back(self.offset, room)

    def __len__(self) -> int:
        return self.length

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LentMemories:
    """The numbers by which one lake's engine knows memories.  In the thread, or loop, that drives operations."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[SharedMemory, int] = WeakKeyDictionary()

    def number_of(self, memory: SharedMemory) -> int | None:
        """None when it is not lent, as far as is known."""
        return self._numbers.get(memory)

    def note(self, memory: SharedMemory, number: int) -> None:
        """It is lent by that number."""
        self._numbers[memory] = number

    def forget(self, memory: SharedMemory, number: int) -> None:
        """It is not lent by that number any more: the connection is another."""
        if self._numbers.get(memory) == number:
            del self._numbers[memory]

    def take(self, memory: SharedMemory) -> int | None:
        """Its number, which nobody uses from now on."""
        return self._numbers.pop(memory, None)


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _populate(mapping: mmap.mmap) -> None:
    """Take all pages.  OSError when there are not as many."""
    code = advise(mapping, POPULATE_WRITE)
    if code not in (0, errno.EINVAL):  # a kernel that does not know it: pages come when they are filled
        raise OSError(code, os.strerror(code))


def _no_memory(size_bytes: int, error: OSError) -> LocalFileError:
    return LocalFileError(f"no shared memory of {size_bytes} bytes is to be had: {error.strerror}")
