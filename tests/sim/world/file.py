"""An open file of the simulated disk: aligned where O_DIRECT wants it, failing where a failure is planted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crc32c import crc32c

from lakefs.errors import DiskFailed, StoreFull
from lakefs.ids import Buffer
from tests.sim.world.medium import PAGE, SECTOR, Allocate, Inode, Punch, Truncate, Write

if TYPE_CHECKING:
    from tests.sim.world.disk import SimDisk


class SimFile:
    """An open file of a `SimDisk` (`lakefs.ports.DiskFile`)."""

    def __init__(
        self, disk: SimDisk, inode: Inode, path: str, *, direct: bool = False, read_only: bool = False
    ) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._direct = direct
        self._read_only = read_only
        self._closed = False
        self._was_cached = False
        disk.opened(inode)

    @property
    def direct(self) -> bool:
        """True when the rules of O_DIRECT are enforced."""
        return self._direct

    @property
    def in_memory(self) -> bool:
        """False: it is never in memory."""
        return False

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; short only at the end."""
        self._check("pread_into")
        if self._direct:
            self._check_aligned(buffer, offset)
        payload = self._inode.seen.read(offset, len(buffer))
        buffer[: len(payload)] = payload
        return len(payload)

    def preadv_cached_into(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """Like `pread_into`, one buffer after the other, every other time; else as if nothing of it were cached."""
        self._was_cached = not self._was_cached
        if self._direct or not self._was_cached:
            return False
        for buffer in buffers:
            if self.pread_into(buffer, offset) < len(buffer):
                return False
            offset += len(buffer)
        return True

    def pwrite(self, payload: Buffer, offset: int) -> None:
        """Write all of `payload`; unsynced."""
        if self._direct:
            self._check_aligned(payload, offset)
        self._write(bytes(payload), offset)

    def pwritev(self, payloads: Sequence[Buffer], offset: int) -> None:
        """Write the payloads as one write; unsynced."""
        if self._direct:
            position = offset
            for payload in payloads:
                self._check_aligned(payload, position)
                position += len(payload)
        self._write(b"".join(payloads), offset)

    def sync_data(self) -> None:
        """Make content and length durable."""
        self._check_writable("sync_data")
        try:
            with self._disk.changing("sync_data", self._path) as completes:
                if completes and self._disk.syncs():
                    self._inode.sync()
        except DiskFailed:
            self._inode.sync_failed()
            raise

    def allocate(self, offset: int, length: int) -> None:
        """Take room ahead; unsynced."""
        self._check_writable("allocate")
        with self._disk.changing("allocate", self._path, f"{offset} {length}"):
            self._check_room(self._inode.seen.lacking_bytes(offset, length))
            self._inode.change(Allocate(offset, length))

    def punch(self, offset: int, length: int) -> None:
        """Free whole pages; unsynced."""
        self._check_writable("punch")
        with self._disk.changing("punch", self._path, f"{offset} {length}"):
            self._inode.change(Punch(offset, length))

    def truncate(self, size: int) -> None:
        """Set the length; unsynced."""
        self._check_writable("truncate")
        with self._disk.changing("truncate", self._path, f"{size}"):
            self._inode.change(Truncate(size))

    def size(self) -> int:
        """Return the length in bytes."""
        self._check("size")
        return self._inode.seen.size

    def allocated_bytes(self) -> int:
        """Return the room taken."""
        self._check("allocated_bytes")
        return self._inode.seen.allocated_bytes

    def fileno(self) -> int:
        """Raise: there is no descriptor."""
        raise DiskFailed(f"{self._path} is simulated and has no descriptor", subject=self._path)

    def close(self) -> None:
        """End the handle; it may be closed again, and after a crash."""
        if not self._closed:
            self._closed = True
            self._disk.closed(self._inode, self._path)

    def _write(self, payload: bytes, offset: int) -> None:
        self._check_writable("pwrite")
        try:
            with self._disk.changing("pwrite", self._path, f"{offset} {len(payload)} {crc32c(payload)}"):
                self._check_room(self._inode.seen.lacking_bytes(offset, len(payload)))
                self._inode.change(Write(offset, payload))
        except (DiskFailed, StoreFull):
            part = self._disk.rng.randrange(len(payload) // SECTOR + 1) * SECTOR
            if self._inode.seen.lacking_bytes(offset, part) == 0:
                self._inode.change(Write(offset, payload[:part]))
            raise

    def _check(self, operation: str) -> None:
        self._disk.raise_fault(operation, self._path)
        if self._closed:
            raise DiskFailed(f"{self._path} is closed", subject=self._path)

    def _check_writable(self, operation: str) -> None:
        self._disk.check_alive()
        if self._closed or self._read_only:
            raise DiskFailed(f"{operation} of {self._path}: closed or read-only", subject=self._path)

    def _check_room(self, lacking: int) -> None:
        if lacking > self._disk.free_bytes():
            raise StoreFull(f"no room for {lacking} bytes of {self._path}", subject=self._path)

    def _check_aligned(self, payload: Buffer, offset: int) -> None:
        """Raise EINVAL like O_DIRECT, which needs offset, length and memory at page boundaries."""
        view = memoryview(payload)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if not view.readonly else 0
        if (offset | len(view) | address) % PAGE or (view.readonly and isinstance(payload, bytes)):
            raise DiskFailed(f"unaligned access to {self._path} opened with O_DIRECT", subject=self._path)
