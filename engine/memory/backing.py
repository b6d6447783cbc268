"""Where tables of fast memory live: anonymous memory, or that and a file which keeps it.

Which one serves follows from the setting and from what the machine has:

    memory   sealed memory, on reserved huge pages when there are any; gone with the process
    a file   the same, read from the file at the start and written to it at a clean stop

Rules kept here:
- A mapping is only ever of what nobody can cut under it, and never of a file: an error of its disk would be SIGBUS in
  the engine and in every reader.
- A kept backing is locked while it is used; another engine that wants it is refused.
- A file that somebody else wrote is refused and left as it is.
- A device is refused unopened.  To keep a table in a DAX device takes other calls than a file does: msync(2) of one
  fails with EINVAL.  No file is made where a device is not there.
- Memory is taken within a share of what machine and control group (cgroup v2) have, whatever is asked for.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import ConfigError, DiskFailed, StoreLocked
from lakefs.host.aligned_mapping import HUGE_BYTES
from lakefs.shared_index.table_format import MAGIC

_FILE_MODE: Final = 0o600
_COPY_BYTES: Final = 8 << 20
_DEVICES: Final = Path("/dev")


@dataclass
class Backing:
    """Memory of a tier.  `memory` is writable; `descriptor` is read-only, to hand out, None when it may not be."""

    kind: str
    """For people: `memory`, `huge pages`, `file`."""
    memory: memoryview
    descriptor: int | None
    note: str = ""
    """What was wished for and is not there."""
    file: int | None = None
    """The locked file behind it."""
    is_old: bool = False
    """Whether there was something in it before, which may be of use."""
    on_huge_pages: bool = False
    """Whether all of it is known to be."""
    _sealed: SealedMemory | None = None

    def erase(self) -> None:
        """All zeros; blocks."""
        nothing = bytes(_COPY_BYTES)
        for begin in range(0, len(self.memory), _COPY_BYTES):
            piece = self.memory[begin : begin + _COPY_BYTES]
            piece[:] = nothing[: len(piece)]

    def gather(self, offset: int, size_bytes: int) -> bool:
        """See `SealedMemory.gather`; False of what is no such memory.  Blocks."""
        return self._sealed is not None and self._sealed.gather(offset, size_bytes)

    @property
    def is_kept(self) -> bool:
        """Whether it is there after a restart."""
        return self.file is not None

    def save(self) -> None:
        """What is in memory is in the file, and durable, on return.  Blocks.  DiskFailed."""
        if self.file is None:
            return
        try:
            os.ftruncate(self.file, len(self.memory))
            position = 0
            while position < len(self.memory):
                piece = self.memory[position : position + _COPY_BYTES]
                position += os.pwrite(self.file, piece, position)
            os.fsync(self.file)
        except OSError as error:
            raise DiskFailed(f"the shared index cannot be written to its file: {error.strerror}") from error

    def mark_in_use(self) -> None:
        """What the first page says is in the file, durably: a crash from now on is seen.  Blocks.  DiskFailed."""
        assert self.file is not None
        try:
            os.ftruncate(self.file, 0)
            os.fsync(self.file)
        except OSError as error:
            raise DiskFailed(f"the file of the shared index: {error.strerror}") from error

    def close(self) -> None:
        """Let go of memory, descriptors and lock."""
        with suppress(BufferError):
            self.memory.release()
        if self._sealed is not None:
            self._sealed.close()
        elif self.descriptor is not None:
            os.close(self.descriptor)
        if self.file is not None:
            os.close(self.file)
            self.file = None


def open_backing(setting: str, size_bytes: int) -> Backing:
    """Memory for a tier, by its setting: `auto` or `memory`, or a path.  Blocks.

    ConfigError: the path cannot be used.  StoreLocked: another engine uses it.  EngineBusy: there is no memory.
    """
    if setting in ("auto", "memory"):
        return _in_memory(size_bytes)
    file = _opened(Path(setting))
    try:
        return _on_file(Path(setting), file, size_bytes)
    except OSError as error:
        os.close(file)
        raise _unusable(setting, error) from error
    except BaseException:
        os.close(file)
        raise


def _in_memory(size_bytes: int) -> Backing:
    whole = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
    sealed = SealedMemory("hot-index", whole)
    note = "" if sealed.on_huge_pages else "no huge pages are set aside (sysctl vm.nr_hugepages)"
    kind = "huge pages" if sealed.on_huge_pages else "memory"
    huge = sealed.on_huge_pages
    return Backing(kind, sealed.view, sealed.descriptor, note, on_huge_pages=huge, _sealed=sealed)


def _opened(path: Path) -> int:
    """The file, locked.  It is made where there is none, but for where devices are."""
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
            f"{path} is the shared index of another engine that runs; give each engine its own",
            subject=str(path),
        ) from error
    return file


def _refuse_device(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening says more of it
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise ConfigError(
            f"hot_index: {path} is a device, and a shared index is kept in no device, DAX and CXL memory neither: "
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
    os.pwrite(file, b"", 0)  # hugetlbfs refuses even that, which nobody would see before the stop
    inside = _in_memory(max(size_bytes, min(found.st_size, 2 * size_bytes)))
    inside.kind, inside.file = "file", file
    inside.is_old = _read_into(inside.memory, file, found.st_size)
    if not inside.is_old and found.st_size:
        inside.erase()  # a part of it may have been read
    return inside


def _may_be_ours(beginning: bytes) -> bool:
    """Whether a file that begins so may be a shared index, torn or rotten as it may be: most of the magic, or zeros."""
    same = sum(ours == there for ours, there in zip(MAGIC, beginning, strict=False))
    return same > len(MAGIC) // 2 or not any(beginning)


def _read_into(memory: memoryview, file: int, length: int) -> bool:
    """Read the file; whether it is there and fits."""
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
