"""The part of a lake that is about reading, as steps; `lakefs.getting` has how it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lakefs.errors import InvalidArgument, LakeError
from lakefs.fetching import BufferSink, fetch_pieces
from lakefs.getting import close_object, get_many, open_object, read_range, read_whole
from lakefs.lake_uploads import Progress
from lakefs.names import parse_object_name
from lakefs.opened import Access, Opened
from lakefs.steps import Steps


class ReadSteps(ABC):
    """Whole contents, and ranges of opened objects."""

    @abstractmethod
    def access(self, progress: Progress | None) -> Access:
        """How this client reads."""

    def get(self, name: str, *, progress: Progress | None = None) -> Steps[bytes]:
        """The whole content, checked.  KeyNotFound, IsAFolder, ChunkDamaged."""
        access = self.access(progress)
        opened = yield from open_object(access, parse_object_name(name))
        try:
            return (yield from read_whole(access, opened))
        finally:
            yield from close_object(opened)

    def get_into(self, name: str, buffer: bytearray | memoryview) -> Steps[int]:
        """The whole content into a writable buffer at least as long; the number of bytes."""
        access = self.access(None)
        opened = yield from open_object(access, parse_object_name(name))
        try:
            size = opened.stat.size_bytes
            target = memoryview(buffer).cast("B")
            if len(target) < size:
                raise InvalidArgument(f"{name} has {size} bytes, the buffer only {len(target)}", subject=name)
            yield from fetch_pieces(access, opened, opened.pieces, BufferSink(target[:size]))
            return size
        finally:
            yield from close_object(opened)

    def get_many(self, names: Sequence[str]) -> Steps[list[bytes]]:
        """Whole contents, in order; small objects share round trips.  The first failure is raised."""
        contents = yield from get_many(self.access(None), [parse_object_name(name) for name in names])
        good: list[bytes] = []
        for content in contents:
            if isinstance(content, LakeError):
                raise content
            good.append(content)
        return good

    def open(self, name: str) -> Steps[Opened]:
        """Open an object: its content stays readable, whole, until `close`, whatever happens to the name."""
        return open_object(self.access(None), parse_object_name(name))

    def read(self, opened: Opened, offset: int, length: int) -> Steps[bytes]:
        """A range of an opened object, cut at its end, checked."""
        return read_range(self.access(None), opened, offset, length)

    def close(self, opened: Opened) -> Steps[None]:
        """Close an opened object."""
        return close_object(opened)
