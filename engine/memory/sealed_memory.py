"""Sealed memory: a memfd that this process writes through its mapping, and that others can only read.

Rules kept here:
- The seals (shrink, grow, future writing, and sealing itself) are set before a descriptor leaves: nobody who gets one
  can write, truncate or punch, whatever way it is opened again, and no mapping of it can become writable.
- All pages are there when the memory is made: a page that cannot be had is an error then, never a SIGBUS later.
- Nobody, we included, can punch what is sealed: the pages go when the last mapping and descriptor of it are gone.
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
    """Memory of `size_bytes`, zeroed.  The constructor blocks: about 20 ms for 64 MiB.  EngineBusy: there is none."""

    def __init__(self, name: str, size_bytes: int, *, huge: bool = True) -> None:
        """`huge`: on reserved huge pages when there are any, else on those that the kernel gives by itself."""
        made = _reserved_huge(name, size_bytes) if huge and size_bytes % HUGE_BYTES == 0 else None
        self.on_huge_pages: Final = made is not None
        """Whether on reserved huge pages."""
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
        """A read-only descriptor to hand out; stays ours."""
        return self._descriptor

    def gather(self, offset: int, size_bytes: int) -> bool:
        """Have the kernel move whole huge pages of the memory together, so that they are mapped as such, here and by
        who else maps it at a multiple of their size; whether it did.  Blocks: about a millisecond for each.

        Nothing else changes: what is there stays, and may be read and written meanwhile.
        """
        if self.on_huge_pages:
            return True
        length = min(size_bytes, self._size_bytes - offset) // HUGE_BYTES * HUGE_BYTES
        return length > 0 and advise(self._mapping, COLLAPSE, self._begin + offset, length) == 0

    def close(self) -> None:
        """Give the memory back, when no view of it is left; else it goes with the last one."""
        os.close(self._descriptor)
        try:
            self._mapping.close()
        except BufferError:  # somebody still copies from it, or sends it
            return


def _reserved_huge(name: str, size_bytes: int) -> tuple[int, mmap.mmap, int] | None:
    """On huge pages that the machine has set aside, or None: most have none."""
    try:
        descriptor = os.memfd_create(
            name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | _MFD_HUGE_2MB
        )
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
            # Refused where there are none: then it stays as it is.
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
    """A descriptor of the same memory that is read-only by itself, where /proc is there to open it by."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(descriptor)


def _none(name: str, size_bytes: int, error: Exception) -> EngineBusy:
    return EngineBusy(f"{size_bytes >> 20} MiB of memory for {name} cannot be had: {error}")
