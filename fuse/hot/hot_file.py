"""One hot file: the checked content of one blob in memory, which the kernel gives to readers without the mount.

While the kernel uses it (a handle that passes through to it, or a mapping that has outlived its handle) every change of
the file's content must show in it.  Writes of this mount are written to staging and here, in this order; room is
reserved before, so that the second cannot fail for want of it.  A mapping may write here unseen: `differing` and
`take_over` find what it wrote and stage it.

`_sums` has the CRC32C of each granule of the content that the mount knows.  A granule that has another was written
through a mapping; or, where nothing may write, is damaged.

Rules kept here:
- A granule without a sum is all zeros: a hole.  So a file is as cheap as what was written to it, however long it is.
- A sum is computed from bytes that were checked or taken over, and never read back for it after a write: what a
  mapping writes beside that write still differs, and is found later.

All calls block for as long as copying memory takes, and are made in one task at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from fuse.hot.memory_files import is_used, is_writable_elsewhere, reopened, reserve, used_bytes
from lakefs.host.crc import crc32c
from lakefs.ids import Buffer
from lakefs.limits import GRANULE_BYTES

Take = Callable[[int, Buffer], object]
"""Stages bytes at an offset."""
_ZEROS: Final = bytes(GRANULE_BYTES)


class HotFile:
    """One file in memory.  Takes the descriptor over, which reads and writes; it is filled by `add`."""

    def __init__(self, blob: bytes, descriptor: int) -> None:
        self.blob = blob
        self.size = 0
        self.backing = 0
        """The kernel's id for it; 0: none, the kernel does not use it."""
        self.handles = 0
        """Handles that pass through to it."""
        self.writers = 0
        """Handles of those that may write."""
        self.is_written = False
        """True if it was written to: its content is not the blob's any more."""
        self.may_be_mapped = False
        """True if a mapping may have written what is not taken over: a handle was opened that reads and writes."""
        self.is_let_go = False
        """True if what mappings wrote could not be stored: granules may differ, and it is given to no other file."""
        self.is_damaged = False
        self.holds = 0
        """Checks under way, which read it in a thread."""
        self._writing = descriptor
        try:
            self.descriptor = reopened(descriptor, os.O_RDONLY)
        except OSError:
            os.close(descriptor)
            raise
        """Reads only; the one that the kernel is given."""
        self._sums: dict[int, int] = {}

    # --- filling -------------------------------------------------------------------------------------

    def begin_filling(self, size: int) -> None:
        """Set the file's length to what it will have: the kernel then chooses pages as large as that allows."""
        os.ftruncate(self._writing, size)

    def add(self, piece: bytes) -> None:
        """Append checked content; all but the last piece are whole granules.  OSError ENOSPC when memory is full."""
        _write_all(self._writing, piece, self.size)
        for at in range(0, len(piece), GRANULE_BYTES):
            granule = memoryview(piece)[at : at + GRANULE_BYTES]
            self._sums[(self.size + at) // GRANULE_BYTES] = crc32c(granule)
        self.size += len(piece)

    def end_filling(self) -> None:
        """Close it for writing, until the next write: only then the kernel can tell who else writes to it."""
        self._end_writing()

    def close(self) -> None:
        """Close the descriptors; handles and mappings that are left keep the file."""
        self._end_writing()
        os.close(self.descriptor)

    def _end_writing(self) -> None:
        writing, self._writing = self._writing, -1
        if writing >= 0:
            os.close(writing)

    # --- use by the kernel ---------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Memory that it takes."""
        return used_bytes(self.descriptor)

    @property
    def is_changed(self) -> bool:
        """True if its content may not be the blob's: it belongs to one open inode, and to none after that."""
        return self.is_written or self.may_be_mapped or self.is_let_go

    @property
    def is_followed(self) -> bool:
        """True if its content is what the mount put there: something may be put behind it."""
        return not (self.may_be_mapped or self.is_let_go or self.is_damaged)

    def is_in_use(self) -> bool:
        """Return True if a handle passes through to it, or a mapping is left."""
        return self.handles > 0 or self._asked(is_used)

    def is_mapped_for_writing(self) -> bool:
        """Return True if a mapping may still write to it, or a handle that can be mapped is open."""
        return self.may_be_mapped and (self.writers > 0 or self._asked(is_writable_elsewhere))

    def _asked(self, question: Callable[[int], bool]) -> bool:
        self._end_writing()
        return question(self.descriptor)

    # --- content -------------------------------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes as every reader sees them now, fewer at the end."""
        return os.pread(self.descriptor, length, offset)

    def write(self, offset: int, data: Buffer, stage: Take) -> None:
        """Stage bytes, and write them here.  What a mapping wrote beside them is staged first.

        OSError ENOSPC when memory is full, and the errors of `stage`: then nothing was written here.
        """
        view = memoryview(data)
        end = offset + len(view)
        reserve(self._descriptor_to_write(), offset, len(view))
        granules = {number: self._taken_over(number, stage) for number in _granules(offset, end)}
        stage(offset, data)
        self._grow(max(self.size, end))
        for number, granule in granules.items():
            begin = number * GRANULE_BYTES
            granule.extend(bytes(self._length(number) - len(granule)))
            first, last = max(offset - begin, 0), min(end - begin, len(granule))
            granule[first:last] = view[begin + first - offset : begin + last - offset]
            self._sums[number] = crc32c(granule)
        self.is_written = True
        _write_all(self._descriptor_to_write(), view, offset)

    def append(self, data: Buffer) -> bool:
        """Write at the end what the store has there; False, changing nothing, if memory is full or damaged."""
        try:
            if data:
                self.write(self.size, data, lambda offset, part: None)
        except OSError:
            return False
        return True

    def replace_end(self, begin: int, parts: Sequence[Buffer]) -> bool:
        """Write these parts from `begin` on, over an end that is not longer; False, changing nothing, if memory is full
        or damaged."""
        try:
            reserve(self._descriptor_to_write(), begin, max(1, sum(map(len, parts))))
            for part in parts:
                self.write(begin, part, lambda offset, taken: None)
                begin += len(part)
        except OSError:
            return False
        return True

    def truncate(self, size: int, stage: Take, set_size: Callable[[int], object]) -> None:
        """Change the length by `set_size`, and here.  What a mapping wrote in the last granule is staged first."""
        number = size // GRANULE_BYTES
        kept = self._taken_over(number, stage)[: size % GRANULE_BYTES] if size < self.size else bytearray()
        set_size(size)
        if size < self.size:
            self._sums = {other: crc for other, crc in self._sums.items() if other < number}
            self.size = size
            if kept:
                self._sums[number] = crc32c(kept)
        else:
            self._grow(size)
        self.is_written = True
        os.ftruncate(self._descriptor_to_write(), size)

    def differing(self) -> list[int]:
        """Return the numbers of the granules with other bytes than the mount put there.  Callable in a thread."""
        numbers = set(self._sums)  # holes of the file need no look, unless they should be none
        for begin, end in _extents(self.descriptor, self.size):
            numbers.update(_granules(begin, end))
        return [number for number in sorted(numbers) if crc32c(self._granule(number)) != self._sum(number)]

    def take_over(self, numbers: Iterable[int], stage: Take) -> None:
        """Stage what mappings wrote in these granules; those that are as known are left out."""
        for number in numbers:
            self._taken_over(number, stage)

    def _taken_over(self, number: int, stage: Take) -> bytearray:
        """Return a granule as it is now; it is staged and its sum kept, if it is not as known.

        OSError EIO if it is not as known and no mapping may have written it: then it is damaged, and nothing is staged.
        """
        granule = self._granule(number)
        crc = crc32c(granule)
        if crc != self._sum(number):
            if not (self.may_be_mapped or self.is_let_go):
                self.is_damaged = True
                raise OSError(errno.EIO, "its content in memory is damaged")
            stage(number * GRANULE_BYTES, bytes(granule))
            self._sums[number] = crc
            self.is_written = True
        return granule

    def _granule(self, number: int) -> bytearray:
        """Return the bytes of a granule below the known length; zeros where the file is shorter."""
        granule = bytearray(self._length(number))
        os.preadv(self.descriptor, [granule], number * GRANULE_BYTES)
        return granule

    def _length(self, number: int) -> int:
        return max(0, min(GRANULE_BYTES, self.size - number * GRANULE_BYTES))

    def _sum(self, number: int) -> int:
        known = self._sums.get(number)
        return crc32c(memoryview(_ZEROS)[: self._length(number)]) if known is None else known

    def _grow(self, size: int) -> None:
        """Note a greater length: the last granule continues with zeros."""
        number, filled = divmod(self.size, GRANULE_BYTES)
        if size > self.size and filled and number in self._sums:
            more = min(size - number * GRANULE_BYTES, GRANULE_BYTES) - filled
            self._sums[number] = crc32c(memoryview(_ZEROS)[:more], self._sums[number])
        self.size = size

    def _descriptor_to_write(self) -> int:
        if self._writing < 0:
            self._writing = reopened(self.descriptor, os.O_RDWR)
        return self._writing


def _granules(begin: int, end: int) -> range:
    """Return the numbers of the granules that have bytes of [begin, end)."""
    return range(begin // GRANULE_BYTES, -(-end // GRANULE_BYTES) if end > begin else begin // GRANULE_BYTES)


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges below `size` that are not holes."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no data behind it
            return
        if begin >= size:
            return
        at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        yield begin, at


def _write_all(descriptor: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
