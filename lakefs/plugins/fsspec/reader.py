"""`LakeReader`: an object opened for reading, as fsspec's files are.

It is Python's own buffered reader over an opened object of the lake.  So its content is that of one version, whatever
happens to the name; every byte was checked; the client reads ahead of its reader.  fsspec's block caches are not used:
`cache_type`, `cache_options` and `block_size` of `open` change nothing.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from lakefs.errors import LakeError
from lakefs.host.plain_bytes import plain_bytes
from lakefs.limits import MIB
from lakefs.plugins.fsspec.entries import Entry, entry_of
from lakefs.plugins.fsspec.os_errors import os_error

if TYPE_CHECKING:
    from lakefs.client.blocking.object_reader import ObjectReader
    from lakefs.plugins.fsspec.look_ups import LookUps

BUFFER_BYTES: Final = 1 * MIB
"""Most bytes that a short read brings in, of a reader in order; reads of at least as many pass the buffer."""


class _RawReader(io.RawIOBase):
    """The opened object, with errors of the lake raised as OSError."""

    def __init__(self, source: ObjectReader) -> None:
        self.source = source

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.source.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.source.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        try:
            return self.source.readinto(buffer)
        except LakeError as error:
            raise os_error(error) from error

    def readall(self) -> bytes:
        return self.read_next(max(0, self.source.stat.size_bytes - self.tell()))

    def read_next(self, length: int) -> bytes:
        """Return the next bytes, fewer only at the end, in memory of their own."""
        try:
            return self.source.read_next(length)
        except LakeError as error:
            raise os_error(error) from error

    def close(self) -> None:
        if not self.closed:
            try:
                self.source.close()
            except LakeError as error:
                raise os_error(error) from error
            finally:
                super().close()


class LakeReader(io.BufferedIOBase):
    """An object opened by `LakeFileSystem.open(path, "rb")`.  Pickled, it is opened anew at its position."""

    mode = "rb"
    autocommit = True

    def __init__(self, fs: LookUps, path: str, source: ObjectReader) -> None:
        self._source = _RawReader(source)
        self._buffered = io.BufferedReader(self._source, BUFFER_BYTES)
        self.fs = fs
        self.path = path
        self._stat = source.stat
        self.size = self._stat.size_bytes
        """Length of the content in bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._buffered.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._buffered.seek(offset, whence)

    def read1(self, size: int = -1, /) -> bytes:
        return self._buffered.read1(size)

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, in part only at the end; long ones are not filled through the reader's own."""
        view = plain_bytes(buffer)
        if len(view) < BUFFER_BYTES:
            return self._buffered.readinto(view)
        position = begin = self.tell()
        self._source.seek(position)
        try:
            while view and (count := self._source.readinto(view)):
                view = view[count:]
                position += count
        except BaseException:
            self._go_to(begin)
            raise
        self._go_to(position)
        return position - begin

    def _go_to(self, position: int) -> None:
        """Continue at a position with an empty buffer, which has not seen where its source was moved.

        Only a seek from the end is passed on whatever the buffer holds.
        """
        self._buffered.seek(position - self.size, io.SEEK_END)

    def readinto1(self, buffer: Any, /) -> int:
        return self._buffered.readinto1(plain_bytes(buffer))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._buffered.readline(size)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the lines, as the buffer itself finds them."""
        return iter(self._buffered)

    def close(self) -> None:
        """Give up the object's lease.  Does nothing the second time."""
        if not self.closed:
            try:
                self._buffered.close()
            finally:
                super().close()

    @property
    def details(self) -> Entry:
        """The entry of the object when it was opened; see `lakefs.plugins.fsspec.entries`."""
        return entry_of(self.path, self._stat)

    def info(self) -> Entry:
        """Return `details`."""
        return self.details

    @property
    def full_name(self) -> str:
        """The path with `lake://`."""
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def blocksize(self) -> int:
        """Bytes that a short read brings in."""
        return BUFFER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, at most `size`; long ones are not copied through the buffer."""
        if size is None or size < 0 or size >= BUFFER_BYTES:
            position = self.tell()
            rest = max(0, self.size - position)
            length = rest if size is None or size < 0 else min(size, rest)
            if length >= BUFFER_BYTES:
                self._source.seek(position)
                try:
                    content = self._source.read_next(length)
                except BaseException:
                    self._go_to(position)
                    raise
                self._go_to(position + len(content))
                return content
        return self._buffered.read(size)

    def __reduce__(self) -> tuple[Callable[..., LakeReader], tuple[Any, ...]]:
        return _reopened, (self.fs, self.path, self._stat.blob, self.tell())


def _reopened(fs: LookUps, path: str, blob: bytes, position: int) -> LakeReader:
    """Open an object that another process had open.  OSError if its content is another one now."""
    reader: LakeReader = fs.open(path, "rb")
    if reader.details["blob"] != blob.hex():
        reader.close()
        raise OSError(errno.ESTALE, "was replaced since it was opened", path)
    reader.seek(position)
    return reader
