"""The reading operations of a lake, as steps; `lakefs.get` carries them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from lakefs.content.verify import Check
from lakefs.errors import InvalidArgument, LakeError
from lakefs.get.chunks import get_chunks, get_chunks_into
from lakefs.get.load import load_many
from lakefs.get.mapping import MappedObject, map_object
from lakefs.get.objects import (
    close_object,
    get_many,
    get_many_into,
    get_whole,
    open_object,
    read_range,
    read_range_into,
)
from lakefs.get.opened import Access, Opened
from lakefs.get.pool_lending import return_pool
from lakefs.get.pools import Pool
from lakefs.get.prefetch import bring_in, look_ahead
from lakefs.get.ranges import Range, get_ranges
from lakefs.host.writable_memory import WritableBuffer, chunk_memories, writable_memory
from lakefs.ids import ChunkId
from lakefs.lake.uploads import Progress
from lakefs.names import check_text, parse_object_name
from lakefs.steps.steps import Steps


class ReadSteps(ABC):
    """Reads of whole objects, of chunks, and of ranges of opened objects."""

    @abstractmethod
    def access(self, progress: Progress | None) -> Access:
        """Return the settings of this client's reads."""

    def get(self, name: str, *, progress: Progress | None = None) -> Steps[bytes]:
        """Return the whole content, checked.  KeyNotFound, IsAFolder, ChunkDamaged."""
        return get_whole(self.access(progress), parse_object_name(name))

    def get_into(self, name: str, buffer: WritableBuffer) -> Steps[int]:
        """Read the whole content into a buffer, array or tensor at least as long; return its length in bytes.

        The rules of `get_many_into` hold.
        """
        sizes = yield from self.get_many_into([name], [buffer])
        return sizes[0]

    def get_many_into(self, names: Sequence[str], buffers: Sequence[WritableBuffer]) -> Steps[list[int]]:
        """Read whole contents, each into a buffer at least as long; return their lengths in bytes, in order.

        Bytes are copied from the page cache straight into the buffers and checked there, as the client's `check` says.
        A buffer is a bytearray, a memoryview, a numpy array, or a torch tensor on the CPU.  It is contiguous and
        writable; no two buffers share memory.  Errors name the object: those of `get`, and InvalidArgument for a
        buffer that is too short, not contiguous or read-only.  After an error or a cancellation the buffers may hold
        anything, also bytes that failed their check.  Bytes of a buffer behind the object's end are left alone.
        """
        if len(names) != len(buffers):
            raise InvalidArgument(f"{len(names)} names and {len(buffers)} buffers do not go together")
        targets = [writable_memory(buffer, name) for name, buffer in zip(names, buffers, strict=True)]
        return (yield from get_many_into(self.access(None), [parse_object_name(name) for name in names], targets))

    def load_many(
        self, wanted: Sequence[bytes | str], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
    ) -> Steps[list[int]]:
        """Load chunks (by id) and objects (by name) to offsets of a pool; return their lengths in bytes, in order.

        The engine writes the bytes from its page cache or disk straight to the pool, over a network by RDMA; where it
        cannot, they are streamed there.  Bytes that have arrived are checked in the pool, as the client's `check` says,
        while others are loaded.  `rooms`, if given, has for each the most bytes that it may take; places do not
        overlap.  ChunkNotFound, ChunkDamaged, InvalidArgument if something does not fit, SourceChanged if the memory
        was shrunk; for names the errors of `get`.  After an error or a cancellation the places may hold anything.
        """
        chunks = [ChunkId(item) if isinstance(item, bytes) else check_text(item) for item in wanted]
        return load_many(self.access(None), pool, chunks, offsets, rooms)

    def return_pool(self, pool: Pool) -> Steps[None]:
        """End the lending of a pool; on return the engine no longer touches its memory."""
        return return_pool(pool)

    def get_many(self, names: Sequence[str]) -> Steps[list[bytes]]:
        """Return whole contents, checked, in order; small objects share round trips.  The first failure is raised."""
        return get_many(self.access(None), [parse_object_name(name) for name in names])

    def map(
        self, name: str, offset: int = 0, length: int | None = None, check: Check | None = None
    ) -> Steps[MappedObject]:
        """Map an object, or a range of it, pinned until `unpin`; see `MappedObject`, and `map_object` for errors."""
        access = self.access(None)
        return map_object(
            access if check is None else replace(access, check=check), parse_object_name(name), offset, length
        )

    def get_chunks(self, chunks: Sequence[bytes]) -> Steps[list[bytes]]:
        """Return chunks by their ids, checked.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
        return get_chunks(self.access(None), [ChunkId(chunk) for chunk in chunks])

    def get_chunks_into(self, chunks: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> Steps[list[int]]:
        """Read chunks by their ids, each into a buffer at least as long; return their lengths.  See `get_many_into`."""
        targets = chunk_memories(chunks, buffers)
        return get_chunks_into(self.access(None), [ChunkId(chunk) for chunk in chunks], targets)

    def open(self, name: str) -> Steps[Opened]:
        """Open an object: its whole content stays readable until `close`, whatever happens to the name."""
        return open_object(self.access(None), parse_object_name(name))

    def read(self, opened: Opened, offset: int, length: int) -> Steps[bytes]:
        """Return a range of an opened object, cut at its end, checked; first start to read ahead of its reader."""
        access = self.access(None)
        yield from look_ahead(access, opened, offset, length)
        return (yield from read_range(access, opened, offset, length))

    def read_into(self, opened: Opened, offset: int, view: memoryview) -> Steps[None]:
        """Like `read`, into memory for bytes that are all in the object.  After an error it may hold anything."""
        access = self.access(None)
        yield from look_ahead(access, opened, offset, len(view))
        yield from read_range_into(access, opened, offset, view)

    def bring_in(self, opened: Opened, offset: int, length: int) -> Steps[None]:
        """Start to bring in bytes predicted for the reader of an opened object; see `lakefs.get.prefetch`."""
        return bring_in(self.access(None), opened, offset, length)

    def get_ranges(self, ranges: Sequence[Range], at_once_bytes: int = 0) -> Steps[list[bytes | LakeError]]:
        """Return ranges of objects in order, checked, in few requests; see `lakefs.get.ranges`.

        `at_once_bytes`: at least so many cached bytes are read in the driver's own thread.
        """
        access = self.access(None)
        return get_ranges(replace(access, at_once_bytes=max(at_once_bytes, access.at_once_bytes)), ranges)

    def close(self, opened: Opened) -> Steps[None]:
        """Close an opened object."""
        return close_object(opened)
