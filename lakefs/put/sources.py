"""Sources: the bytes of a put.

A source of known length can be read at any offset from any thread (a file, a buffer); a stream is read once, in
order.  A file source remembers size and modification time from when it was opened: `verify_unchanged` after the last
read raises SourceChanged if the stored bytes may be no state that the file really had.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from lakefs.errors import InvalidArgument, LocalFileError, SourceChanged
from lakefs.host.file_systems import LOCAL_FILE_SYSTEMS, file_system_of
from lakefs.host.plain_bytes import bytes_to_put
from lakefs.host.writable_memory import ReadableBuffer
from lakefs.put.shared_memory import Slot

_OTHERS: Final = ", a slot, a pathlib.Path or a binary file"
"""Beside memory, the data that a put takes."""


class Source(Protocol):
    """Bytes of known length, readable at any offset."""

    @property
    def size_bytes(self) -> int:
        """Length in bytes when the source was opened."""
        ...

    @property
    def descriptor(self) -> int | None:
        """A descriptor that the engine may read from itself, when there is one."""
        ...

    @property
    def in_memory(self) -> bool:
        """True if `read_at` only slices memory, which needs no thread."""
        ...

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return exactly `length` bytes; SourceChanged when there are fewer.  Blocks."""
        ...

    def verify_unchanged(self) -> None:
        """Raise SourceChanged if the source has changed since it was opened."""
        ...

    def close(self) -> None:
        """Release it."""
        ...


class BufferSource:
    """A buffer, array or tensor in memory, which the caller does not change until the put has ended.

    InvalidArgument if it is no plain memory.
    """

    descriptor: int | None = None
    in_memory = True

    def __init__(self, buffer: ReadableBuffer) -> None:
        self._view = memoryview(buffer) if isinstance(buffer, bytes) else bytes_to_put(buffer, others=_OTHERS)
        self.size_bytes = len(self._view)

    def read_at(self, offset: int, length: int) -> memoryview:
        return self._view[offset : offset + length]

    def verify_unchanged(self) -> None:
        return None

    def close(self) -> None:
        return None


class SlotSource(BufferSource):
    """A slot as a source; where its memory cannot be lent, its bytes are read like a buffer's."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.buffer)
        self.slot = slot


def memory_source(data: ReadableBuffer | Slot) -> BufferSource:
    """Return a source of bytes in memory, shared or not.  InvalidArgument."""
    return SlotSource(data) if isinstance(data, Slot) else BufferSource(data)


class FileSource:
    """A regular file.  LocalFileError when it cannot be opened or is not regular."""

    in_memory = False

    def __init__(self, path: str | Path, *, follow_symlinks: bool = True, folder: int | None = None) -> None:
        """Open the file.  `folder`: the descriptor of a folder in which the last name of the path is opened."""
        self.path = os.fspath(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
        try:
            name = self.path if folder is None else os.path.basename(self.path)
            self._descriptor = os.open(name, flags, dir_fd=folder)
        except OSError as error:
            raise LocalFileError(f"{self.path}: {error.strerror}", subject=self.path) from error
        self._stat = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._stat.st_mode):
            os.close(self._descriptor)
            kind = "a folder; use -r" if stat.S_ISDIR(self._stat.st_mode) else "not a regular file"
            raise LocalFileError(f"{self.path}: is {kind}", subject=self.path)
        self._is_local = file_system_of(self._descriptor) in LOCAL_FILE_SYSTEMS

    @property
    def size_bytes(self) -> int:
        return self._stat.st_size

    @property
    def descriptor(self) -> int | None:
        """The file's descriptor; None on a file system that the engine refuses, such as NFS or FUSE."""
        return self._descriptor if self._is_local else None

    def fileno(self) -> int:
        """Return the descriptor, for use in this process."""
        return self._descriptor

    @property
    def mode(self) -> int:
        """Permission bits."""
        return stat.S_IMODE(self._stat.st_mode)

    @property
    def mtime_ns(self) -> int:
        """Modification time; 1 ns for a file of the time 0, which would mean now where it is stored."""
        return self._stat.st_mtime_ns or 1

    def read_at(self, offset: int, length: int) -> memoryview:
        target = memoryview(bytearray(length))
        done = 0
        while done < length:
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise LocalFileError(f"{self.path}: {error.strerror}", subject=self.path) from error
            if count == 0:
                raise SourceChanged(
                    f"{self.path} shrank while it was read; nothing was stored under its name", subject=self.path
                )
            done += count
        return target

    def verify_unchanged(self) -> None:
        if not self.size_bytes and os.pread(self._descriptor, 1, 0):
            # Files of /proc have a length of 0; the number of their bytes is known only after a read.
            raise SourceChanged(
                f"{self.path} holds more than its length says; give its content to stdin instead: lake put -",
                subject=self.path,
            )
        now = os.fstat(self._descriptor)
        then = self._stat
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise SourceChanged(
                f"{self.path} changed while it was read; nothing was stored under its name", subject=self.path
            )

    def close(self) -> None:
        os.close(self._descriptor)


def read_stream(stream: BinaryIO, length: int) -> bytes:
    """Return `length` bytes of a stream, fewer only at its end.  Blocks.  LocalFileError, InvalidArgument."""
    pieces: list[bytes | bytearray] = []
    missing = length
    while missing:
        try:
            piece: object = stream.read(missing)
        except OSError as error:
            raise LocalFileError(f"the stream cannot be read: {error}") from error
        if not isinstance(piece, (bytes, bytearray)) or len(piece) > missing:
            kind = type(piece).__name__
            raise InvalidArgument(f"a stream gave {kind}; put a binary stream, of which reading waits for bytes")
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
