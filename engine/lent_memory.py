"""Memory that clients lend to the engine, to read payload from and to have payload written to.

The memory stays the client's: it may write to it, shrink it, or punch it at any moment, from any number of processes.

Rules kept here:
- User space of the engine never touches a mapping of lent memory: memory that was shrunk would end the engine
  (SIGBUS).  The mapping is there for the kernel to copy into (`preadv`, io_uring), which fails with EFAULT instead.
- What is stored is first read into memory of the engine (`read_into`) and hashed there.
- Only memory is taken: memfds, and files on tmpfs and hugetlbfs.  Anything else may wait for a disk or another process.
- Descriptor and mapping live until the lending has ended and the last user has left.

`open` and `read_into` block, in any thread; all else runs on the loop.  Who lends what is kept in `engine.lendings`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Final

import trio

from engine.sources import file_system
from lakefs.errors import InvalidArgument, SourceChanged
from lakefs.ids import Buffer

_TMPFS: Final = 0x01021994
_HUGETLBFS: Final = 0x958458F6


class LentMemory:
    """One lending.  `size_bytes` is what was asked for; the client's file may be longer, or shorter by now."""

    __slots__ = ("_mapped", "_users", "_without_users", "descriptor", "size_bytes", "writable")

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.writable = writable
        self._mapped: memoryview | None = None
        self._users = 0
        self._without_users: trio.Event | None = None

    def has_range(self, offset: int, length: int) -> bool:
        """Whether [offset, offset + length) is inside what was lent."""
        return 0 <= offset <= offset + length <= self.size_bytes

    def check_range(self, offset: int, length: int) -> None:
        """InvalidArgument unless [offset, offset + length) is inside what was lent."""
        if not self.has_range(offset, length):
            raise InvalidArgument(f"{offset}+{length} is outside a lent memory of {self.size_bytes} bytes")

    def open(self) -> None:
        """Check the memory and map it, if it is writable.  InvalidArgument.  Blocks briefly."""
        _check_memory(self.descriptor, self.size_bytes, writable=self.writable)
        if not self.writable:
            return
        try:
            mapped = mmap.mmap(self.descriptor, self.size_bytes)
        except (OSError, ValueError) as error:  # sealed, shrunk meanwhile, no address space
            raise InvalidArgument(f"the memory cannot be mapped for writing: {error}") from error
        self._mapped = memoryview(mapped)

    @property
    def mapping(self) -> memoryview:
        """The writable mapping, for system calls to copy into; reading or writing it here may end the engine."""
        assert self._mapped is not None, "only memory that was lent writable is mapped"
        return self._mapped

    def enter(self) -> None:
        """One more uses the memory."""
        self._users += 1

    def leave(self) -> None:
        """One has finished; the last one to leave closes a memory whose lending has ended."""
        self._users -= 1
        if self._without_users is not None and not self._users:
            self._close(self._without_users)

    def end(self) -> trio.Event:
        """The lending is over; set once nobody uses the memory any more."""
        if self._without_users is None:
            self._without_users = trio.Event()
            if not self._users:
                self._close(self._without_users)
        return self._without_users

    def _close(self, closed: trio.Event) -> None:
        # Unmapped with the last slice of it, which may be in a traceback still.
        self._mapped = None
        os.close(self.descriptor)
        closed.set()


def read_into(memory: LentMemory, offset: int, buffer: memoryview) -> None:
    """Fill memory of the engine from lent memory.  SourceChanged when that was shrunk.  Blocks, in any thread."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(memory.descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise SourceChanged(f"the lent memory cannot be read: {error.strerror}") from error
        if count == 0:
            raise SourceChanged("the lent memory was shrunk while it was read; nothing was stored of it")
        done += count


def copy_into(target: memoryview, descriptor: int, offset: int) -> None:
    """Have the kernel copy from a memfd of the engine to a part of the mapping of lent memory.

    SourceChanged when that was shrunk, or its file system is full.
    """
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise SourceChanged(f"the lent memory cannot be written: {error.strerror}") from error
        assert count, "the memfd has what is copied"
        done += count


def put_into(target: memoryview, payload: Buffer) -> None:
    """The same from memory of the engine."""
    descriptor = os.memfd_create("lake payload", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, len(payload))
        with mmap.mmap(descriptor, len(payload)) as pages:
            pages[:] = payload
        copy_into(target, descriptor, 0)
    finally:
        os.close(descriptor)


def _check_memory(descriptor: int, size_bytes: int, *, writable: bool) -> None:
    """InvalidArgument unless the descriptor is memory of that size, open as it has to be."""
    found = os.fstat(descriptor)
    kind = file_system(descriptor)
    if not stat.S_ISREG(found.st_mode) or kind not in (_TMPFS, _HUGETLBFS):
        raise InvalidArgument("lent memory is a memfd, or a regular file on tmpfs or hugetlbfs")
    if size_bytes > found.st_size:
        raise InvalidArgument(f"the memory has {found.st_size} bytes, not {size_bytes}")
    if kind == _HUGETLBFS and size_bytes % found.st_blksize:
        raise InvalidArgument(f"memory of huge pages is lent in multiples of {found.st_blksize} bytes")
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    access = flags & os.O_ACCMODE
    if flags & os.O_PATH or access not in ((os.O_RDWR,) if writable else (os.O_RDWR, os.O_RDONLY)):
        wanted = "reading and writing" if writable else "reading"
        raise InvalidArgument(f"the descriptor of the memory is not open for {wanted}")
