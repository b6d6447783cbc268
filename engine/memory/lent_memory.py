"""Lent memory: memory of a client from which the engine reads payload and to which it writes payload.

The memory stays the client's: it may write to it, shrink it, or punch it at any moment, from any number of processes.

Rules kept here:
- The engine's user space never touches a mapping of lent memory: a client that shrinks it would end the engine
  (SIGBUS).  The mapping exists for the kernel to copy into (`preadv`, io_uring), which fails with EFAULT instead.
- Payload to be stored is first read into memory of the engine (`read_into`) and hashed there.
- Only memfds, and files on tmpfs and hugetlbfs, are accepted.  Other files may wait for a disk or another process.
- Descriptor and mapping live until the lending has ended and the last user has left.

`open`, `read_into` and `put_into` block, in any thread; all else runs on the loop.  `engine.sessions.lendings` keeps
which client lends which memory.
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
"""Most bytes that are unmapped on the loop: 20 ms.  A thread unmaps larger memory."""


class LentMemory:
    """One lending.  `size_bytes` is the lent length; the client's file may be longer, or shorter by now."""

    __slots__ = ("_mapped", "_users", "_without_users", "descriptor", "is_open", "size_bytes", "writable")

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self.is_open = False
        """True once the memory was checked, and mapped if it is writable."""
        self.size_bytes = size_bytes
        self.writable = writable
        self._mapped: memoryview | None = None
        self._users = 0
        self._without_users: trio.Event | None = None

    @property
    def cannot_shrink(self) -> bool:
        """True if the client has sealed the memory: then a mapping of it may be read and written like any memory."""
        try:
            return bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # it is none that can be sealed
            return False

    def has_range(self, offset: int, length: int) -> bool:
        """Return True if [offset, offset + length) is inside the lent memory."""
        return 0 <= offset <= offset + length <= self.size_bytes

    def check_range(self, offset: int, length: int) -> None:
        """Raise InvalidArgument unless [offset, offset + length) is inside the lent memory."""
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
        except (OSError, ValueError) as error:  # sealed, or shrunk since the check
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                raise exhausted(error) from error
            raise InvalidArgument(f"the memory cannot be mapped for writing: {error}") from error

    @property
    def mapping(self) -> memoryview:
        """The writable mapping, for system calls to copy into; reading or writing it here may end the engine."""
        assert self._mapped is not None, "only memory that was lent writable is mapped"
        return self._mapped

    def enter(self) -> None:
        """Count one more user of the memory."""
        self._users += 1

    def leave(self) -> None:
        """Count one user less; the last to leave closes a memory whose lending has ended."""
        assert self._users > 0, "each user leaves once"
        self._users -= 1
        if self._without_users is not None and not self._users:
            self._close(self._without_users)

    def end(self) -> trio.Event:
        """End the lending; returns an event that is set once the memory has no users and is closed."""
        if self._without_users is None:
            self._without_users = trio.Event()
            if not self._users:
                self._close(self._without_users)
        return self._without_users

    def _close(self, closed: trio.Event) -> None:
        assert not self._users, "memory in use is not closed"
        if not self.is_open:  # unchecked: it may be any kind of file
            close_later([self.descriptor])
            closed.set()
            return
        # The kernel unmaps it with the last slice, which a traceback may still hold.
        mapped, self._mapped = [self._mapped], None
        let_both_go = partial(_close_later, mapped, self.descriptor)
        if os.fstat(self.descriptor).st_blocks * _BLOCK_BYTES > LET_GO_AT_ONCE_BYTES:
            aside(let_both_go)
        else:
            let_both_go()
        closed.set()


def _close_later(mapped: list[memoryview | None], descriptor: int) -> None:
    """Unmap and close.  If the client has ended, this frees all pages, at 0.1 to 0.3 s for each GiB."""
    mapped.clear()
    os.close(descriptor)


def read_into(memory: LentMemory, offset: int, buffer: memoryview) -> bytes:
    """Fill memory of the engine from lent memory; returns the checksums of its granules.  Blocks, in any thread.

    SourceChanged when the lent memory was shrunk.
    """
    try:
        return read_granules(memory.descriptor, offset, buffer)
    except OSError as error:
        raise SourceChanged(f"the lent memory cannot be read: {error.strerror}") from error
    except EOFError as error:
        raise SourceChanged("the lent memory was shrunk while it was read; nothing was stored of it") from error


def copy_into(target: memoryview, descriptor: int, offset: int) -> None:
    """Have the kernel copy from a memfd of the engine to a part of the mapping of lent memory.

    SourceChanged when the lent memory was shrunk, or its file system is full.
    """
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise SourceChanged(f"the lent memory cannot be written: {error.strerror}") from error
        assert count, "the memfd is as long as the copied range"
        done += count


def put_into(target: memoryview, payload: Buffer) -> None:
    """Copy payload from memory of the engine to a part of the mapping.  EngineBusy when memory is short."""
    descriptor = memory_of_our_own("lake payload", 0)
    try:
        _write_all(descriptor, memoryview(payload))
        copy_into(target, descriptor, 0)
    finally:
        os.close(descriptor)


def memory_of_our_own(name: str, size_bytes: int) -> int:
    """Create a memfd of the engine.  EngineBusy when none can be had."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise exhausted(error) from error
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _write_all(descriptor: int, payload: memoryview) -> None:
    # By system calls: without memory a write fails, but the use of a mapping would end the engine.
    done = 0
    try:
        while done < len(payload):
            done += os.pwrite(descriptor, payload[done:], done)
    except OSError as error:
        raise exhausted(error) from error


def exhausted(error: OSError) -> EngineBusy:
    """Make the error of a request for which the machine has no memory, or the process no descriptor."""
    return EngineBusy(f"the engine's machine has no memory or no descriptor for that now: {error.strerror}")


def _check_memory(descriptor: int, size_bytes: int, *, writable: bool) -> None:
    """Raise InvalidArgument unless the descriptor is memory of that size, open in the needed mode."""
    if not is_memory(descriptor):  # first, so that no file system served by a process is called
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
