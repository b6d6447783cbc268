"""A DAX character device (persistent memory, CXL memory) that keeps the content of a memory over a restart.

    0          magic, length of the content (0: none), CRC32C of both; the rest of the page is zeros
    2 MiB      the content

Rules kept here:
- A device takes no read(2), write(2) or msync(2): it is mapped.  But no code of this process loads from the mapping or
  stores to it: damaged memory would be SIGBUS.  The kernel copies, and fails with EFAULT.
- What was copied to the device is durable when its cache lines are written back; the header follows the content.
- A device with another content than this one's or zeros at its begin is refused and left as it is.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from lakefs.errors import ConfigError, DiskFailed
from lakefs.host.crc import crc32c

write_back: Callable[[memoryview], None] | None = None
with suppress(ImportError):  # it is built for x86-64 alone
    from engine.memory import _cache_lines

    write_back = _cache_lines.write_back if _cache_lines.CAN_WRITE_BACK else None

MAGIC: Final = b"LAKEDAXC"
_HEADER: Final = struct.Struct("<8sQI")
CONTENT_OFFSET: Final = 2 << 20
_PAGE_BYTES: Final = 4096
_COPY_BYTES: Final = 8 << 20


def is_dax_device(path: Path) -> bool:
    """Return True if the path names a DAX character device.  Blocks."""
    return _attributes(path) is not None


def _attributes(path: Path) -> Path | None:
    """Return the device's folder in sysfs."""
    with suppress(OSError, ValueError):
        found = os.stat(path)
        if stat.S_ISCHR(found.st_mode):
            folder = Path(f"/sys/dev/char/{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}")
            if (folder / "subsystem").resolve().name == "dax":
                return folder
    return None


class DaxDevice:
    """The content kept in a device.  `close` unmaps it; the descriptor stays the caller's."""

    kind: Final = "DAX device"

    def __init__(self, path: Path, descriptor: int, size_bytes: int) -> None:
        """`size_bytes`: what must have room.  ConfigError: too small, another's, or not to be written back here."""
        if write_back is None:
            raise ConfigError(f"hot_index: {path}: cache lines cannot be written back here", subject=str(path))
        folder = _attributes(path)
        assert folder is not None, "the caller has seen that it is one"
        room = int((folder / "size").read_text())
        if room < CONTENT_OFFSET + size_bytes:
            raise ConfigError(
                f"hot_index: {path} has {room} bytes, and {CONTENT_OFFSET + size_bytes} are needed", subject=str(path)
            )
        self._write_back = write_back
        self._mapping = mmap.mmap(descriptor, room, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._mapping)
        self._scratch = os.memfd_create("dax", os.MFD_CLOEXEC)
        try:
            self.length = self._length(path)
        except BaseException:
            self.close()
            raise

    def _length(self, path: Path) -> int:
        """Return the length of the content, 0 for none."""
        page = self._copied(0, _PAGE_BYTES)
        if page is None:
            raise ConfigError(f"hot_index: {path}: the begin of the device cannot be read", subject=str(path))
        magic, length, check = _HEADER.unpack_from(page)
        if any(page) and magic != MAGIC:
            raise ConfigError(
                f"hot_index: {path} is a device that something else uses; erase its first page to give it to this",
                subject=str(path),
            )
        is_whole = magic == MAGIC and check == crc32c(page[: _HEADER.size - 4])
        return length if is_whole and length <= len(self._view) - CONTENT_OFFSET else 0

    def _copied(self, offset: int, length: int) -> bytes | None:
        """Return bytes of the device, copied by the kernel; None if it could not read them."""
        try:
            if os.pwrite(self._scratch, self._view[offset : offset + length], 0) != length:
                return None
            return os.pread(self._scratch, length, 0)
        except OSError:
            return None

    def read_into(self, memory: memoryview) -> bool:
        """Copy the content into memory; returns True if there is one, it fits, and it was read whole.  Blocks."""
        if not 0 < self.length <= len(memory):
            return False
        for begin in range(0, self.length, _COPY_BYTES):
            piece = memory[begin : min(self.length, begin + _COPY_BYTES)]
            copied = self._copied(CONTENT_OFFSET + begin, len(piece))
            if copied is None:
                return False
            piece[:] = copied
        return True

    def save(self, descriptor: int, length: int) -> None:
        """Copy `length` bytes of a file in memory to the device; durable on return.  Blocks.  OSError, DiskFailed."""
        end = CONTENT_OFFSET + length
        if end > len(self._view):
            raise DiskFailed("the shared index has outgrown its device")
        position = 0
        while position < length:
            piece = self._view[CONTENT_OFFSET + position : CONTENT_OFFSET + min(length, position + _COPY_BYTES)]
            count = os.preadv(descriptor, [piece], position)
            if not count:
                raise DiskFailed("the shared index ended before its length")
            position += count
        self._write_back(self._view[CONTENT_OFFSET:end])
        self._write_header(length)

    def mark_in_use(self) -> None:
        """Note durably that there is no content.  Blocks."""
        self._write_header(0)

    def _write_header(self, length: int) -> None:
        begin = MAGIC + struct.pack("<Q", length)
        page = (begin + struct.pack("<I", crc32c(begin))).ljust(_PAGE_BYTES, b"\0")
        os.pwrite(self._scratch, page, 0)
        if os.preadv(self._scratch, [self._view[:_PAGE_BYTES]], 0) != _PAGE_BYTES:
            raise DiskFailed("the begin of the shared index's device cannot be written")
        self._write_back(self._view[:_PAGE_BYTES])

    def close(self) -> None:
        """Unmap the device."""
        self._view.release()
        self._mapping.close()
        os.close(self._scratch)
