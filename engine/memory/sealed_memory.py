"""Sealed memory: a memfd that this process writes through its mapping, and that others can only read.

Rules kept here:
- The seals (shrink, grow, future writing, and sealing itself) are set before a descriptor leaves.  A process that gets
  one cannot write, truncate or punch, however it opens it again, and no mapping of it can become writable.
- All pages are allocated when the memory is made: a missing page is an error then, never a SIGBUS later.
- No process, the engine included, can punch sealed memory: its pages are freed with the last mapping and descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

from lakefs.errors import EngineBusy
from lakefs.grants.dram_slabs import SEALS
from lakefs.host.aligned_mapping import HUGE_BYTES, map_aligned
from lakefs.host.memory_advice import COLLAPSE, POPULATE_WRITE, advise

_MFD_HUGE_2MB: Final = 21 << 26


class SealedMemory:
    """Zeroed memory of `size_bytes`.  The constructor blocks, about 20 ms for 64 MiB; EngineBusy: memory is short."""

    def __init__(self, name: str, size_bytes: int, *, huge: bool = True) -> None:
        """With `huge`, use reserved huge pages if there are enough; else pages as the kernel chooses them."""
        made = _reserved_huge(name, size_bytes) if huge and size_bytes % HUGE_BYTES == 0 else None
        self.on_huge_pages: Final = made is not None
        """True if the memory is on reserved huge pages."""
        self._size_bytes = size_bytes
        descriptor, self._mapping, self._begin = made or _plain(name, size_bytes)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._descriptor = _reopened(descriptor)
        except OSError as error:  # no descriptor is left
            self._mapping.close()
            raise _none(name, size_bytes, error) from error
        finally:
            os.close(descriptor)

    @property
    def view(self) -> memoryview:
        """The memory: writable, page-aligned."""
        return memoryview(self._mapping)[self._begin : self._begin + self._size_bytes]

    @property
    def descriptor(self) -> int:
        """A read-only descriptor to send to clients; `close` closes it."""
        return self._descriptor

    def gather(self, offset: int, size_bytes: int) -> bool:
        """Have the kernel collapse this range to huge pages; returns True if it did.  Blocks: about 1 ms for each page.

        They are mapped as huge pages here, and by clients that map the memory at a multiple of their size.  The content
        stays, and may be read and written during the call.
        """
        if self.on_huge_pages:
            return True
        length = min(size_bytes, self._size_bytes - offset) // HUGE_BYTES * HUGE_BYTES
        return length > 0 and advise(self._mapping, COLLAPSE, self._begin + offset, length) == 0

    def close(self) -> None:
        """Release the memory; if views of it are left, it is freed with the last one."""
        os.close(self._descriptor)
        try:
            self._mapping.close()
        except BufferError:  # a copy or a send still uses it
            return


def _reserved_huge(name: str, size_bytes: int) -> tuple[int, mmap.mmap, int] | None:
    """Make memory on huge pages that the machine has set aside, or None: most machines have none."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | _MFD_HUGE_2MB)
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size_bytes)
        mapping = mmap.mmap(descriptor, size_bytes)
    except (OSError, ValueError):
        os.close(descriptor)
        return None
    if advise(mapping, POPULATE_WRITE):
        mapping.close()
        os.close(descriptor)
        return None
    return descriptor, mapping, 0


def _plain(name: str, size_bytes: int) -> tuple[int, mmap.mmap, int]:
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _none(name, size_bytes, error) from error
    try:
        os.ftruncate(descriptor, size_bytes)
        mapping, begin = map_aligned(descriptor, size_bytes, protection=mmap.PROT_READ | mmap.PROT_WRITE)
        if size_bytes >= HUGE_BYTES:
            # Where the kernel has none it refuses, and the pages stay small.
            advise(mapping, mmap.MADV_HUGEPAGE, begin, size_bytes)
        failed = advise(mapping, POPULATE_WRITE, begin, size_bytes)
        if failed == errno.EINVAL:  # an older kernel
            os.posix_fallocate(descriptor, 0, size_bytes)
        elif failed:
            raise OSError(failed, os.strerror(failed))
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise _none(name, size_bytes, error) from error
    return descriptor, mapping, begin


def _reopened(descriptor: int) -> int:
    """Open a read-only descriptor of the same memory through /proc; without /proc, duplicates the given one."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(descriptor)


def _none(name: str, size_bytes: int, error: Exception) -> EngineBusy:
    return EngineBusy(f"{size_bytes >> 20} MiB of memory for {name} cannot be had: {error}")
