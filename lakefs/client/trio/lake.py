"""The trio client: the same operations as `lakefs.client.blocking.lake.Lake`, awaited, many at once.

`TrioLake` has the methods of `lakefs.lake.lake_steps.LakeSteps`; `trio_driver` drives them over any `EngineClient`: a
remote engine (`connect`), or one in the same process.  An object opened for reading is an `OpenedObject` of this
module; close it, or use it as a context manager.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cached_property, partial
from types import TracebackType
from typing import Any, cast

import trio

from lakefs.client.trio.chunks import TrioChunks
from lakefs.client.trio.driver import CLEANUP_S, TrioDriver
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.get.mapping import MAP_ATTEMPTS, MappedObject, unpin
from lakefs.get.opened import Opened, Piece
from lakefs.get.pools import Pool
from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer
from lakefs.lake.lake_steps import Progress, PutData
from lakefs.lake.multipart import ListedPart, UploadName
from lakefs.put.shared_memory import SharedMemory, Slot
from lakefs.put.upload import PutResult
from lakefs.wire.messages import (
    AccessKeyStat,
    BucketStat,
    ListEntry,
    ObjectAttributes,
    ObjectStat,
    PartStat,
    UploadEntry,
    WatchEvent,
)


class TrioLake(TrioDriver):
    """A lake over one engine client.  Safe for use by many tasks at once; see `LakeSteps` for the promises."""

    # --- writing -----------------------------------------------------------------------------------

    async def put(self, name: str, data: PutData, **options: Any) -> PutResult:
        """Store bytes, a slot of shared memory, a file (`pathlib.Path`) or a binary stream; durable on return."""
        return await self.run(self.steps.put(name, data, **options))

    async def put_many(
        self,
        objects: Sequence[tuple[str, Buffer | Slot]],
        *,
        create_bucket: bool = False,
        in_flight: int = 256,
    ) -> list[ObjectStat]:
        """Store many small objects (each at most 4 MiB) from buffers or slots of shared memory; durable on return."""
        return await self.run(self.steps.put_many(objects, create_bucket=create_bucket, in_flight=in_flight))

    @asynccontextmanager
    async def shared_memory(self, size_bytes: int) -> AsyncIterator[SharedMemory]:
        """Memory to fill and to put slots of, which the engine copies itself; see `lakefs.put.shared_memory`."""
        memory = await self._offload.run(SharedMemory, size_bytes)
        try:
            yield memory
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
                with suppress(LakeError):  # a lending ends with its connection
                    await self.run(self.steps.return_memory(memory))
            memory.close()

    # --- multipart uploads -------------------------------------------------------------------------

    async def create_upload(
        self,
        name: str,
        attributes: ObjectAttributes | None = None,
        *,
        details: Mapping[str, str] | None = None,
    ) -> UploadName:
        """Begin a multipart upload to a name, whose bucket must exist."""
        return await self.run(self.steps.create_upload(name, attributes, details=details))

    async def put_part(self, upload: UploadName, number: int, data: PutData, **options: Any) -> PartStat:
        """Store data as a part of an upload, in place of the one that had its number; durable on return."""
        return await self.run(self.steps.put_part(upload, number, data, **options))

    async def copy_part(self, upload: UploadName, number: int, source: str, **options: Any) -> PartStat:
        """Make a range of an object a part of an upload."""
        return await self.run(self.steps.copy_part(upload, number, source, **options))

    async def parts(self, upload: UploadName) -> AsyncIterator[PartStat]:
        """All parts of an upload, by number, read page by page."""
        after = 0
        while True:
            page = await self.run(self.steps.parts_page(upload, after=after))
            for part in page.parts:
                yield part
            after = page.next_after
            if not after:
                return

    async def uploads(self, name: str) -> AsyncIterator[UploadEntry]:
        """All unfinished uploads to keys that begin with the name's key, in byte order, read page by page."""
        after, after_upload = "", b""
        while True:
            page = await self.run(self.steps.uploads_page(name, after=after, after_upload=after_upload))
            for entry in page.entries:
                yield entry
            after, after_upload = page.next_after, page.next_upload
            if not after:
                return

    async def complete_upload(
        self, upload: UploadName, parts: Sequence[ListedPart | tuple[int, bytes]], **options: Any
    ) -> ObjectStat:
        """Make the listed parts (number, ETag) the object; no byte moves; durable on return."""
        return await self.run(self.steps.complete_upload(upload, parts, **options))

    async def abort_upload(self, upload: UploadName) -> None:
        """End an upload and drop its parts; what has the name stays."""
        await self.run(self.steps.abort_upload(upload))

    @cached_property
    def chunks(self) -> TrioChunks:
        """Chunks by their ids: `await lake.chunks.get(id)`, `get_into(id, buffer)`, `get_many_into(ids, buffers)`."""
        return TrioChunks(self)

    # --- reading -----------------------------------------------------------------------------------

    async def get(self, name: str, *, progress: Progress | None = None) -> bytes:
        """The whole content of an object, checked."""
        return await self.run(self.steps.get(name, progress=progress))

    async def get_into(self, name: str, buffer: WritableBuffer) -> int:
        """The whole content into a buffer, an array or a tensor; the number of bytes."""
        return await self.run(self.steps.get_into(name, buffer))

    async def get_many_into(self, names: Sequence[str], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Whole contents of many objects, each straight into a buffer, array or tensor; the numbers of bytes.

        After an error the buffers may hold anything.
        """
        return await self.run(self.steps.get_many_into(names, buffers))

    @asynccontextmanager
    async def pool(self, *, size_bytes: int = 0, descriptor: int | None = None) -> AsyncIterator[Pool]:
        """Memory for `load_many`: new memory, or the memory of a descriptor (whole, or its first bytes).

        InvalidArgument, LocalFileError.  The engine touches it no more when the block has ended.
        """
        pool = await self._offload.run(partial(Pool, size_bytes=size_bytes, descriptor=descriptor))
        try:
            yield pool
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
                with suppress(LakeError):  # a lending ends with its connection
                    await self.run(self.steps.return_pool(pool))
            pool.close()

    async def load_many(
        self,
        wanted: Sequence[bytes | str],
        pool: Pool,
        offsets: Sequence[int],
        rooms: Sequence[int] = (),
    ) -> list[int]:
        """Have the engine bring chunks (by id) and objects (by name) to offsets of a pool; their lengths, in order."""
        return await self.run(self.steps.load_many(wanted, pool, offsets, rooms))

    async def get_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole contents of many objects, in order, in few round trips."""
        return await self.run(self.steps.get_many(names))

    async def open(self, name: str) -> OpenedObject:
        """Open an object; it keeps the content it was opened on, whatever happens to the name."""
        return OpenedObject(self, await self.run(self.steps.open(name)))

    @asynccontextmanager
    async def map(
        self, name: str, offset: int = 0, length: int | None = None, *, check: Check | None = None
    ) -> AsyncIterator[MappedObject]:
        """An object, or a range of it, as read-only memory, without a copy; see `Lake.map`."""
        mapped = await self._mapped(name, offset, length, check)
        try:
            yield mapped
        except BaseException as error:
            try:
                mapped.close()
            except BufferError as held:  # by the frames of the error, most likely
                error.add_note(str(held))
                raise error from None
            await self._unpin(mapped)
            raise
        mapped.close()
        await self._unpin(mapped)

    async def _mapped(self, name: str, offset: int, length: int | None, check: Check | None) -> MappedObject:
        """A mapping whose connection is still there when it is handed out."""
        for _ in range(MAP_ATTEMPTS):
            mapped = await self.run(self.steps.map(name, offset, length, check))
            if not mapped.chunks:
                return mapped
            mapped.is_pinned = partial(self.is_held, mapped.epoch)
            if mapped.is_pinned():
                return mapped
            mapped.close()
        raise EngineUnreachable(f"the connection was lost while {name} was mapped", subject=name)

    async def _unpin(self, mapped: MappedObject) -> None:
        if mapped.is_pinned():
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
                await self.run(unpin(mapped))

    # --- names -------------------------------------------------------------------------------------

    async def stat(self, name: str) -> ObjectStat:
        """What is known of a name; KeyNotFound."""
        return await self.run(self.steps.stat(name))

    async def exists(self, name: str) -> bool:
        """Whether the name is there."""
        return await self.run(self.steps.exists(name))

    async def ls(self, name: str, *, delimiter: str = "", folders: bool = False) -> AsyncIterator[ListEntry]:
        """All keys that begin with the name's key, in byte order, read page by page."""
        after = ""
        while True:
            page = await self.run(
                self.steps.list_page(name, after=after, delimiter=delimiter, folders=folders)
            )
            for entry in page.entries:
                yield entry
            after = page.next_after
            if not after:
                return

    async def remove(self, name: str) -> bool:
        """Remove an object or an empty folder; whether it was there."""
        return await self.run(self.steps.remove(name))

    async def move(
        self, source: str, target: str, *, replace: bool = True, create_bucket: bool = False
    ) -> ObjectStat:
        """Rename an object or folder, atomically; `create_bucket` makes the target's bucket when it is missing."""
        return await self.run(self.steps.move(source, target, replace=replace, create_bucket=create_bucket))

    async def copy(self, source: str, target: str, *, create_bucket: bool = False) -> ObjectStat:
        """Give an object's content a second name; no byte moves."""
        return await self.run(self.steps.copy(source, target, create_bucket=create_bucket))

    async def make_folder(
        self, name: str, *, exclusive: bool = False, create_bucket: bool = False
    ) -> ObjectStat:
        """Make a folder that stays when empty."""
        return await self.run(self.steps.make_folder(name, exclusive=exclusive, create_bucket=create_bucket))

    def watch(self, bucket: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Events of a bucket from now on: `async with lake.watch("models") as events: async for event in events`.

        In order, each after it is durable.  A `resync` event says: look at everything again.
        """
        return self._engine.watch(bucket)

    # --- buckets -----------------------------------------------------------------------------------

    async def buckets(self) -> list[BucketStat]:
        """All buckets."""
        return await self.run(self.steps.buckets())

    async def create_bucket(self, name: str) -> BucketStat:
        """Make a bucket; AlreadyExists."""
        return await self.run(self.steps.create_bucket(name))

    async def remove_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        await self.run(self.steps.remove_bucket(name))

    async def bucket(self, name: str) -> BucketStat:
        """A bucket and its settings; BucketNotFound."""
        return await self.run(self.steps.bucket(name))

    async def set_bucket(
        self, name: str, *, anonymous_read: bool | None = None, versioning: str | None = None
    ) -> BucketStat:
        """Change settings of a bucket, None: as it is."""
        return await self.run(
            self.steps.set_bucket(name, anonymous_read=anonymous_read, versioning=versioning)
        )

    # --- access keys -------------------------------------------------------------------------------

    async def create_access_key(
        self, *, buckets: Sequence[str] = (), read_only: bool = False
    ) -> AccessKeyStat:
        """Make an access key for those buckets (none: all); the answer has its secret."""
        return await self.run(self.steps.create_access_key(buckets=buckets, read_only=read_only))

    async def access_keys(self) -> list[AccessKeyStat]:
        """All access keys, without their secrets."""
        return await self.run(self.steps.access_keys())

    async def find_access_key(self, access_key: str) -> AccessKeyStat | None:
        """What an access key may do, with its secret, as it is now; None when there is none."""
        return await self.run(self.steps.find_access_key(access_key))

    async def remove_access_key(self, access_key: str) -> None:
        """Revoke an access key; AccessKeyNotFound."""
        await self.run(self.steps.remove_access_key(access_key))

    # --- upkeep ------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """State of the engine."""
        return cast(dict[str, Any], json.loads(await self.run(self.steps.status())))

    async def gc(self, *, compact: bool = False) -> dict[str, Any]:
        """One cycle of garbage collection, with `compact` to the last page; its report."""
        return cast(dict[str, Any], json.loads(await self.run(self.steps.gc(compact=compact))))

    async def fsck(self, *, full: bool = False) -> dict[str, Any]:
        """Check the store; the report."""
        return cast(dict[str, Any], json.loads(await self.run(self.steps.fsck(full=full))))

    async def scrub(
        self,
        *,
        for_s: float = 0.0,
        rate_bytes_per_s: int | None = None,
        restart: bool = False,
        damaged: bool = False,
    ) -> dict[str, Any]:
        """Go on with the scrub for a while, at most a minute; its report, with `done` when a pass has ended.

        `rate_bytes_per_s`: 0 is unbounded.  With `damaged` the report has the quarantine and its objects.
        """
        steps = self.steps.scrub(
            for_s=for_s, rate_bytes_per_s=rate_bytes_per_s, restart=restart, damaged=damaged
        )
        return cast(dict[str, Any], json.loads(await self.run(steps)))


class OpenedObject:
    """An object opened for reading, at any offset."""

    def __init__(self, lake: TrioLake, opened: Opened) -> None:
        self._lake = lake
        self._opened = opened

    @property
    def stat(self) -> ObjectStat:
        """What the name was when it was opened."""
        return self._opened.stat

    @property
    def pieces(self) -> list[Piece]:
        """The chunks of the content, in order, as far as the answer to the opening told them."""
        return list(self._opened.pieces)

    async def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """A range, to the end when no length is given; cut at the object's end, checked."""
        wanted = self._opened.stat.size_bytes - offset if length is None else length
        return await self._lake.run(self._lake.steps.read(self._opened, offset, wanted))

    async def aclose(self) -> None:
        """Give the lease back."""
        await self._lake.run(self._lake.steps.close(self._opened))

    async def __aenter__(self) -> OpenedObject:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
            await self.aclose()
