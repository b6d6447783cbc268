"""Memory that clients lend to the engine, to read payload from and to have payload written to.

The memory stays the client's: it may write to it, shrink it, or punch it at any moment, from any number of processes.

Rules kept here:
- User space of the engine never touches a mapping of lent memory: memory that was shrunk would end the engine
  (SIGBUS).  The mapping is there for the kernel to copy into (`preadv`, io_uring), which fails with EFAULT instead.
- What is stored is first read into memory of the engine (`read_into`) and hashed there.
- Only memory is taken: memfds, and files on tmpfs and hugetlbfs.  Anything else may wait for a disk or another process.
- Descriptor and mapping live until the lending has ended and the last user has left.

`open` and `read_into` block, in any thread; all else runs on the loop.  Who lends what is kept in
`engine.sessions.lendings`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from functools import partial
from typing import Final

import trio

from engine.format._granules import read_granules
from engine.host.client_files import file_system
from lakefs.errors import EngineBusy, InvalidArgument, SourceChanged
from lakefs.host.descriptors import aside, close_later, is_memory
from lakefs.ids import Buffer
from lakefs.limits import MIB

_TMPFS: Final = 0x01021994
_HUGETLBFS: Final = 0x958458F6
_BLOCK_BYTES: Final = 512  # of st_blocks
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
LET_GO_AT_ONCE_BYTES: Final = 64 * MIB
"""Memory is let go on the loop up to here: 20 ms; what is more is the business of a thread."""


class LentMemory:
    """One lending.  `size_bytes` is what was asked for; the client's file may be longer, or shorter by now."""

    __slots__ = ("_mapped", "_users", "_without_users", "descriptor", "is_open", "size_bytes", "writable")

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self.is_open = False
        """Whether it was checked, and is mapped where that was asked for."""
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
        """Check the memory and map it, if it is writable.  InvalidArgument, EngineBusy.  Blocks briefly."""
        _check_memory(self.descriptor, self.size_bytes, writable=self.writable)
        if self.writable:
            self._mapped = memoryview(self._map())
        self.is_open = True

    def _map(self) -> mmap.mmap:
        try:
            return mmap.mmap(self.descriptor, self.size_bytes)
        except (OSError, ValueError) as error:  # sealed, shrunk meanwhile
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                raise exhausted(error) from error
            raise InvalidArgument(f"the memory cannot be mapped for writing: {error}") from error

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
        if not self.is_open:  # it may be anything
            close_later([self.descriptor])
            closed.set()
            return
        # Unmapped with the last slice of it, which may be in a traceback still.
        mapped, self._mapped = [self._mapped], None
        let_both_go = partial(_close_later, mapped, self.descriptor)
        if os.fstat(self.descriptor).st_blocks * _BLOCK_BYTES > LET_GO_AT_ONCE_BYTES:
            aside(let_both_go)
        else:
            let_both_go()
        closed.set()


def _close_later(mapped: list[memoryview | None], descriptor: int) -> None:
    """Unmap and close.  Of a client that has ended this frees all pages, at 0.1 to 0.3 s for each GiB."""
    mapped.clear()
    os.close(descriptor)


def read_into(memory: LentMemory, offset: int, buffer: memoryview) -> bytes:
    """Fill memory of the engine from lent memory; the checksums of its granules.  Blocks, in any thread.

    SourceChanged when the lent memory was shrunk.
    """
    try:
        return read_granules(memory.descriptor, offset, buffer)
    except OSError as error:
        raise SourceChanged(f"the lent memory cannot be read: {error.strerror}") from error
    except EOFError as error:
        raise SourceChanged(
            "the lent memory was shrunk while it was read; nothing was stored of it"
        ) from error


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
    """The same from memory of the engine.  EngineBusy when there is none for the way."""
    descriptor = memory_of_our_own("lake payload", 0)
    try:
        _write_all(descriptor, memoryview(payload))
        copy_into(target, descriptor, 0)
    finally:
        os.close(descriptor)


def memory_of_our_own(name: str, size_bytes: int) -> int:
    """A memfd of the engine.  EngineBusy when there is none to be had."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise exhausted(error) from error
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _write_all(descriptor: int, payload: memoryview) -> None:
    # By system calls: where there is no memory a write fails, and the use of a mapping would end the engine.
    done = 0
    try:
        while done < len(payload):
            done += os.pwrite(descriptor, payload[done:], done)
    except OSError as error:
        raise exhausted(error) from error


def exhausted(error: OSError) -> EngineBusy:
    """What a request is told for which the machine has no memory, or the process no descriptor."""
    return EngineBusy(f"the engine's machine has no memory or no descriptor for that now: {error.strerror}")


def _check_memory(descriptor: int, size_bytes: int, *, writable: bool) -> None:
    """InvalidArgument unless the descriptor is memory of that size, open as it has to be."""
    if not is_memory(descriptor):  # no file system of a process is asked
        raise InvalidArgument("lent memory is a memfd, or a regular file on tmpfs or hugetlbfs, open for use")
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
