"""New memory with a descriptor, whose pages are there from the beginning."""

from __future__ import annotations

import os

from lakefs.errors import LocalFileError


def new_memory(size_bytes: int) -> int:
    """A memfd of that size, its pages allocated.  Blocks.  LocalFileError when there is no memory.

    The kernel would try to find pages for any size, at the cost of every other process.
    """
    if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise LocalFileError(f"no memory of {size_bytes} bytes is to be had: the machine has less")
    try:
        descriptor = os.memfd_create("lake-pool", os.MFD_CLOEXEC)
    except OSError as error:
        raise _no_memory(size_bytes, error) from error
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise _no_memory(size_bytes, error) from error
    return descriptor


def _no_memory(size_bytes: int, error: OSError) -> LocalFileError:
    return LocalFileError(f"no memory of {size_bytes} bytes is to be had: {error.strerror}")
