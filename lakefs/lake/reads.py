"""The part of a lake that is about reading, as steps; `lakefs.get.objects` has how it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from lakefs.content.verify import Check
from lakefs.errors import InvalidArgument
from lakefs.get.chunks import get_chunks, get_chunks_into
from lakefs.get.load import load_many, return_pool
from lakefs.get.mapping import MappedObject, map_object
from lakefs.get.objects import close_object, get_many, get_many_into, get_whole, open_object, read_range
from lakefs.get.opened import Access, Opened
from lakefs.get.pools import Pool
from lakefs.get.prefetch import look_ahead
from lakefs.host.writable_memory import WritableBuffer, chunk_memories, writable_memory
from lakefs.ids import ChunkId
from lakefs.lake.uploads import Progress
from lakefs.names import parse_object_name
from lakefs.steps.steps import Steps


class ReadSteps(ABC):
    """Whole contents, and ranges of opened objects."""

    @abstractmethod
    def access(self, progress: Progress | None) -> Access:
        """How this client reads."""

    def get(self, name: str, *, progress: Progress | None = None) -> Steps[bytes]:
        """The whole content, checked.  KeyNotFound, IsAFolder, ChunkDamaged."""
        return get_whole(self.access(progress), parse_object_name(name))

    def get_into(self, name: str, buffer: WritableBuffer) -> Steps[int]:
        """The whole content into a buffer, array or tensor at least as long; the number of bytes.

        As `get_many_into`.
        """
        sizes = yield from self.get_many_into([name], [buffer])
        return sizes[0]

    def get_many_into(self, names: Sequence[str], buffers: Sequence[WritableBuffer]) -> Steps[list[int]]:
        """Whole contents of objects, each into a buffer at least as long; their lengths in bytes, in order.

        Bytes go from the page cache straight into the buffers, and are checked there, as the client's `check` says.  A
        buffer is a bytearray, memoryview, numpy array, or a torch tensor on the CPU: contiguous and writable, and no
        two of them share memory.  Errors name the object: those of `get`, and InvalidArgument for a buffer that is too
        short, not contiguous or read-only.  After an error, or a cancellation, any of the buffers may hold anything,
        bytes that failed their check too.  Bytes behind an object's end are left alone.
        """
        if len(names) != len(buffers):
            raise InvalidArgument(f"{len(names)} names and {len(buffers)} buffers do not go together")
        targets = [writable_memory(buffer, name) for name, buffer in zip(names, buffers, strict=True)]
        return (
            yield from get_many_into(self.access(None), [parse_object_name(name) for name in names], targets)
        )

    def load_many(
        self,
        wanted: Sequence[bytes | str],
        pool: Pool,
        offsets: Sequence[int],
        rooms: Sequence[int] = (),
    ) -> Steps[list[int]]:
        """Have the engine bring chunks (by id) and objects (by name) to offsets of a pool; their lengths in bytes.

        What arrives is checked in the pool, as the client's `check` says, and the rest loaded meanwhile.  `rooms`, when
        given, are as many: the most bytes that each may take; places do not overlap.  Bytes go from the engine's page
        cache or disk straight to the pool; where memory cannot be lent (over TCP) they are streamed there.
        ChunkNotFound, ChunkDamaged, InvalidArgument for what does not fit, SourceChanged when the memory was shrunk;
        for names the errors of `get`.  After an error, or a cancellation, the places may hold anything.
        """
        chunks = [item if isinstance(item, str) else ChunkId(item) for item in wanted]
        return load_many(self.access(None), pool, chunks, offsets, rooms)

    def return_pool(self, pool: Pool) -> Steps[None]:
        """End the lending of a pool; the engine touches its memory no more on return."""
        return return_pool(pool)

    def get_many(self, names: Sequence[str]) -> Steps[list[bytes]]:
        """Whole contents, in order; small objects share round trips.  The first failure is raised."""
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
        """Chunks by their ids, checked.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
        return get_chunks(self.access(None), [ChunkId(chunk) for chunk in chunks])

    def get_chunks_into(self, chunks: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> Steps[list[int]]:
        """Chunks by their ids, each into a buffer at least as long; their lengths.  As `get_many_into`."""
        targets = chunk_memories(chunks, buffers)
        return get_chunks_into(self.access(None), [ChunkId(chunk) for chunk in chunks], targets)

    def open(self, name: str) -> Steps[Opened]:
        """Open an object: its content stays readable, whole, until `close`, whatever happens to the name."""
        return open_object(self.access(None), parse_object_name(name))

    def read(self, opened: Opened, offset: int, length: int) -> Steps[bytes]:
        """A range of an opened object, cut at its end, checked.  What its reader reads next is brought in meanwhile."""
        access = self.access(None)
        yield from look_ahead(access, opened, offset, length)
        return (yield from read_range(access, opened, offset, length))

    def close(self, opened: Opened) -> Steps[None]:
        """Close an opened object."""
        return close_object(opened)
