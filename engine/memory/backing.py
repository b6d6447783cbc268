"""The memory that holds the shared index: anonymous, or anonymous and kept over a clean stop.

The setting chooses:

    memory   sealed memory, on reserved huge pages if the machine has any; lost with the process
    a file, or a DAX device   the same, read from there at the start and written there at a clean stop

Rules kept here:
- Only sealed memory is mapped, which cannot be cut under the mapping, and never a file: an error of its disk would be
  SIGBUS in the engine and in every reader.
- File and device are locked while they are used; another engine that names them is refused.
- While the engine uses a kept table there is none at its place (`mark_in_use`): the start after a crash finds nothing.
- A file that is not a shared index is refused and left as it is.
- A device that is no DAX device is refused unopened.  No file is created in /dev.
- The caller bounds the size by a share of the memory of machine and control group (`capacity_allowed`).
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.memory.dax_device import DaxDevice, is_dax_device
from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import ConfigError, DiskFailed, StoreLocked
from lakefs.host.aligned_mapping import HUGE_BYTES
from lakefs.shared_index.table_format import MAGIC

_FILE_MODE: Final = 0o600
_COPY_BYTES: Final = 8 << 20
_DEVICES: Final = Path("/dev")


class Backing:
    """Memory of a table.  `memory` is writable; `descriptor` is read-only, to send to clients."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate at least as many bytes, in whole huge pages.  EngineBusy: memory is short."""
        self._sealed = SealedMemory("hot-index", -(-size_bytes // HUGE_BYTES) * HUGE_BYTES)
        self.memory = self._sealed.view
        self.descriptor = self._sealed.descriptor
        self.on_huge_pages = self._sealed.on_huge_pages
        """True if all of the memory is known to be on huge pages."""
        self.kind = "huge pages" if self.on_huge_pages else "memory"
        """For people: `memory`, `huge pages`, `file`, `DAX device`."""
        self.note = "" if self.on_huge_pages else "no huge pages are set aside (sysctl vm.nr_hugepages)"
        """A hint for people: a wished-for feature that the machine lacks."""
        self.file: int | None = None
        """Descriptor of the locked file or device, if the memory is kept in one."""
        self.device: DaxDevice | None = None
        """The device, if it is one."""
        self.is_old = False
        """True if the memory holds the content that was kept, which may be a usable table."""

    def erase(self) -> None:
        """Fill the memory with zeros.  Blocks."""
        nothing = bytes(_COPY_BYTES)
        for begin in range(0, len(self.memory), _COPY_BYTES):
            piece = self.memory[begin : begin + _COPY_BYTES]
            piece[:] = nothing[: len(piece)]

    def gather(self, offset: int, size_bytes: int) -> bool:
        """Call `SealedMemory.gather`.  Blocks."""
        return self._sealed.gather(offset, size_bytes)

    @property
    def is_kept(self) -> bool:
        """True if the memory is kept over a restart."""
        return self.file is not None

    def save(self) -> None:
        """Write the memory to where it is kept, if anywhere; durable on return.  Blocks.  DiskFailed."""
        if self.file is None:
            return
        try:
            if self.device is not None:
                self.device.save(self.descriptor, len(self.memory))
                return
            os.ftruncate(self.file, len(self.memory))
            position = 0
            while position < len(self.memory):
                piece = self.memory[position : position + _COPY_BYTES]
                position += os.pwrite(self.file, piece, position)
            assert position == len(self.memory), "all of the memory is in the file"
            os.fsync(self.file)
        except OSError as error:
            raise DiskFailed(f"the shared index cannot be written to where it is kept: {error.strerror}") from error

    def mark_in_use(self) -> None:
        """Empty the file or device, durably, so that the start after a crash does not use it.  Blocks.  DiskFailed."""
        assert self.file is not None, "only a kept table is marked"
        try:
            if self.device is not None:
                self.device.mark_in_use()
                return
            os.ftruncate(self.file, 0)
            os.fsync(self.file)
        except OSError as error:
            raise DiskFailed(f"the place where the shared index is kept: {error.strerror}") from error

    def close(self) -> None:
        """Release memory, descriptors and lock."""
        with suppress(BufferError):
            self.memory.release()
        self._sealed.close()
        if self.device is not None:
            self.device.close()
            self.device = None
        if self.file is not None:
            os.close(self.file)
            self.file = None


def open_backing(setting: str, size_bytes: int) -> Backing:
    """Open memory for a table by its setting: `auto` or `memory`, or a path.  Blocks.

    ConfigError: the path cannot be used.  StoreLocked: another engine uses it.  EngineBusy: memory is short.
    """
    if setting in ("auto", "memory"):
        return Backing(size_bytes)
    file = _opened(Path(setting))
    try:
        on = _on_device if is_dax_device(Path(setting)) else _on_file
        return on(Path(setting), file, size_bytes)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError):
            raise _unusable(setting, error) from error
        raise


def _opened(path: Path) -> int:
    """Open and lock the file; creates it unless it would be in /dev."""
    _refuse_device(path)
    made = 0 if path.parent == _DEVICES else os.O_CREAT
    try:
        file = os.open(path, os.O_RDWR | made | os.O_CLOEXEC | os.O_NOCTTY, _FILE_MODE)
    except (OSError, ValueError) as error:
        raise _unusable(str(path), error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise StoreLocked(
            f"{path} is the shared index of another engine that runs; give each engine its own", subject=str(path)
        ) from error
    return file


def _refuse_device(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening it reports the error
        return
    if (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and not is_dax_device(path):
        raise ConfigError(
            f"hot_index: {path} is a device, and of devices only a DAX device keeps a shared index: "
            "name a file on a file system, or set it to memory",
            subject=str(path),
        )


def _unusable(setting: str, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(f"hot_index: {setting}: {reason}", subject=setting)


def _on_file(path: Path, file: int, size_bytes: int) -> Backing:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"hot_index: {path} is no file", subject=str(path))
    if not _may_be_ours(os.pread(file, len(MAGIC), 0)):
        raise ConfigError(
            f"hot_index: {path} is a file of something else; name a new one, or remove it", subject=str(path)
        )
    os.pwrite(file, b"", 0)  # hugetlbfs refuses even that; else only the clean stop would find out
    inside = Backing(max(size_bytes, min(found.st_size, 2 * size_bytes)))
    inside.kind, inside.file = "file", file
    inside.is_old = _read_into(inside.memory, file, found.st_size)
    if not inside.is_old and found.st_size:
        inside.erase()  # a part of the file may have been read
    return inside


def _on_device(path: Path, file: int, size_bytes: int) -> Backing:
    device = DaxDevice(path, file, size_bytes)
    try:
        inside = Backing(max(size_bytes, min(device.length, 2 * size_bytes)))
    except BaseException:
        device.close()
        raise
    inside.kind, inside.file, inside.device = device.kind, file, device
    inside.is_old = device.read_into(inside.memory)
    if not inside.is_old and device.length:
        inside.erase()  # a part of the content may have been read
    return inside


def _may_be_ours(beginning: bytes) -> bool:
    """Return True if a file that begins so may be a shared index, perhaps damaged: most of the magic, or zeros."""
    same = sum(ours == there for ours, there in zip(MAGIC, beginning, strict=False))
    return same > len(MAGIC) // 2 or not any(beginning)


def _read_into(memory: memoryview, file: int, length: int) -> bool:
    """Read the file into memory; returns True if it is not empty, fits, and was read whole."""
    if not 0 < length <= len(memory):
        return False
    position = 0
    while position < length:
        try:
            count = os.preadv(file, [memory[position : min(length, position + _COPY_BYTES)]], position)
        except OSError:
            return False
        if not count:
            return False
        position += count
    return True
