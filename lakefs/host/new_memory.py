"""Creates memory with a descriptor (a memfd) whose pages are all allocated, duplicates that of existing memory,
and checks the limit of memory to lend.

More memory than the machine has is refused first: the kernel would look for its pages at the cost of every other
process.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.limits import GIB, LENT_MEMORY_BYTES_MAX

_ADD_SEALS: Final = 1033  # F_ADD_SEALS of linux/fcntl.h; Python names it from 3.13 on
_SEAL_WRITE: Final = 0x0008
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing


def new_memory(size_bytes: int, *, sealed: bool = False) -> int:
    """Create a memfd of that size, its pages allocated.  Blocks.  LocalFileError if there is not enough memory.

    `sealed`: its size is fixed.

    A size above the machine's memory is refused first: the kernel would try to find the pages, at the cost of every
    other process.
    """
    if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise LocalFileError(f"no memory of {size_bytes} bytes is to be had: the machine has less")
    try:
        descriptor = os.memfd_create("lake-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _no_memory(size_bytes, error) from error
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        if sealed:
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise _no_memory(size_bytes, error) from error
    return descriptor


def can_be_sealed(descriptor: int) -> bool:
    """Seal memory of `new_memory` against writes; return False if a process maps it for writing, or a device writes."""
    try:
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_WRITE)
    except OSError:  # EBUSY
        return False
    return True


def duplicate(descriptor: int) -> int:
    """Return another descriptor of existing memory.  InvalidArgument if the given one is not open."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        raise InvalidArgument(f"descriptor {descriptor} is not open: {error.strerror}") from error


def check_lendable(size_bytes: int) -> None:
    """Raise InvalidArgument if no engine accepts that much, even with no other memory lent."""
    if size_bytes > LENT_MEMORY_BYTES_MAX:
        raise InvalidArgument(
            f"memory of {size_bytes} bytes can never be lent to an engine, which takes at most "
            f"{LENT_MEMORY_BYTES_MAX // GIB} GiB of all its clients together; use less, or lend a part of it"
        )


def _no_memory(size_bytes: int, error: OSError) -> LocalFileError:
    return LocalFileError(f"no memory of {size_bytes} bytes is to be had: {error.strerror}")
