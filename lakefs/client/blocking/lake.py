"""The blocking client: `lakefs.connect()`, for training loops, notebooks and the command line.

`Lake` has the methods of `lakefs.lake.lake_steps.LakeSteps`; `blocking_driver` drives them over one connection.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from lakefs.client.blocking.driver import BlockingDriver
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.get.mapping import MAP_ATTEMPTS, MappedObject, unpin
from lakefs.get.opened import Opened
from lakefs.get.pools import Pool
from lakefs.host.forks import NO_FORK
from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer
from lakefs.lake.lake_steps import Progress, PutData
from lakefs.lake.multipart import ListedPart, UploadName
from lakefs.names import parse_object_name
from lakefs.put.shared_memory import SharedMemory, Slot
from lakefs.put.upload import PutResult
from lakefs.trees.get_file import replace_file
from lakefs.trees.walk import Observer
from lakefs.wire.messages import (
    AccessKeyStat,
    BucketStat,
    ListEntry,
    ObjectAttributes,
    ObjectStat,
    PartStat,
    UploadEntry,
)

if TYPE_CHECKING:
    from lakefs.client.blocking.chunks import Chunks
    from lakefs.client.blocking.loads import PoolLoads


class Lake(BlockingDriver):
    """A connection to one engine.  Use as a context manager, or `close()`.

    Errors are those of `lakefs.errors`; see `LakeSteps` for what each method promises.
    """

    _chunks: Chunks | None = None
    _loads: PoolLoads | None = None

    def begin_anew(self) -> None:
        """See `BlockingDriver.begin_anew`; what is mapped of the parent's engine goes."""
        self._chunks = self._loads = None
        super().begin_anew()

    # --- writing -----------------------------------------------------------------------------------

    def put(self, name: str, data: PutData, **options: Any) -> PutResult:
        """Store bytes, a slot of shared memory, a file (`pathlib.Path`) or a binary stream; durable on return."""
        return self.run(self.steps.put(name, data, **options))

    def put_many(
        self,
        objects: Sequence[tuple[str, Buffer | Slot]],
        *,
        create_bucket: bool = False,
        in_flight: int = 256,
    ) -> list[ObjectStat]:
        """Store many small objects (each at most 4 MiB) from buffers or slots of shared memory; durable on return."""
        return self.run(self.steps.put_many(objects, create_bucket=create_bucket, in_flight=in_flight))

    @contextlib.contextmanager
    def shared_memory(self, size_bytes: int) -> Iterator[SharedMemory]:
        """Memory to fill and to put slots of, which the engine copies itself; see `lakefs.put.shared_memory`."""
        memory = SharedMemory(size_bytes)
        try:
            yield memory
        finally:
            with contextlib.suppress(LakeError):  # a lending ends with its connection
                self.run(self.steps.return_memory(memory))
            memory.close()

    # --- multipart uploads -------------------------------------------------------------------------

    def create_upload(
        self,
        name: str,
        attributes: ObjectAttributes | None = None,
        *,
        details: Mapping[str, str] | None = None,
    ) -> UploadName:
        """Begin a multipart upload to a name, whose bucket must exist."""
        return self.run(self.steps.create_upload(name, attributes, details=details))

    def put_part(self, upload: UploadName, number: int, data: PutData, **options: Any) -> PartStat:
        """Store data as a part of an upload, in place of the one that had its number; durable on return."""
        return self.run(self.steps.put_part(upload, number, data, **options))

    def copy_part(self, upload: UploadName, number: int, source: str, **options: Any) -> PartStat:
        """Make a range of an object a part of an upload."""
        return self.run(self.steps.copy_part(upload, number, source, **options))

    def parts(self, upload: UploadName) -> Iterator[PartStat]:
        """All parts of an upload, by number, read page by page."""
        after = 0
        while True:
            page = self.run(self.steps.parts_page(upload, after=after))
            yield from page.parts
            after = page.next_after
            if not after:
                return

    def uploads(self, name: str) -> Iterator[UploadEntry]:
        """All unfinished uploads to keys that begin with the name's key, in byte order, read page by page."""
        after, after_upload = "", b""
        while True:
            page = self.run(self.steps.uploads_page(name, after=after, after_upload=after_upload))
            yield from page.entries
            after, after_upload = page.next_after, page.next_upload
            if not after:
                return

    def complete_upload(
        self, upload: UploadName, parts: Sequence[ListedPart | tuple[int, bytes]], **options: Any
    ) -> ObjectStat:
        """Make the listed parts (number, ETag) the object; no byte moves; durable on return."""
        return self.run(self.steps.complete_upload(upload, parts, **options))

    def abort_upload(self, upload: UploadName) -> None:
        """End an upload and drop its parts; what has the name stays."""
        self.run(self.steps.abort_upload(upload))

    @property
    def chunks(self) -> Chunks:
        """Chunks by their ids: `lake.chunks.get(id)`, `get_into(id, buffer)`, `get_many_into(ids, buffers)`."""
        return self._chunks or self._make_chunks()

    def _make_chunks(self) -> Chunks:
        with NO_FORK:
            if self._chunks is None:  # the import is a tenth of the start-up
                self._chunks = cast("Chunks", import_module("lakefs.client.blocking.chunks").Chunks(self))
            return self._chunks

    # --- reading -----------------------------------------------------------------------------------

    def get(self, name: str, *, progress: Progress | None = None) -> bytes:
        """The whole content of an object, checked."""
        return self.run(self.steps.get(name, progress=progress))

    def get_into(self, name: str, buffer: WritableBuffer) -> int:
        """The whole content into a buffer, an array or a tensor; the number of bytes."""
        return self.run(self.steps.get_into(name, buffer))

    def get_many_into(self, names: Sequence[str], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Whole contents of many objects, each straight into a buffer, array or tensor; the numbers of bytes.

        After an error the buffers may hold anything.
        """
        return self.run(self.steps.get_many_into(names, buffers))

    @contextlib.contextmanager
    def pool(self, *, size_bytes: int = 0, descriptor: int | None = None) -> Iterator[Pool]:
        """Memory for `load_many`: new memory, or the memory of a descriptor (whole, or its first bytes).

        InvalidArgument, LocalFileError.  The engine touches it no more when the block has ended.
        """
        pool = Pool(size_bytes=size_bytes, descriptor=descriptor)
        try:
            yield pool
        finally:
            with contextlib.suppress(LakeError):  # a lending ends with its connection
                self.run(self.steps.return_pool(pool))
            pool.close()

    def load_many(
        self,
        wanted: Sequence[bytes | str],
        pool: Pool,
        offsets: Sequence[int],
        rooms: Sequence[int] = (),
    ) -> list[int]:
        """Bring chunks (by id) and objects (by name) to offsets of a pool; their lengths, in order.

        Chunks that the page cache has are copied by this process, without a request; the engine moves the rest.
        """
        return (self._loads or self._make_loads()).load_many(wanted, pool, offsets, rooms)

    def _make_loads(self) -> PoolLoads:
        with NO_FORK:
            if self._loads is None:
                made = import_module("lakefs.client.blocking.loads").PoolLoads
                self._loads = cast("PoolLoads", made(self, self.chunks))
            return self._loads

    def get_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole contents of many objects, in order, in few round trips."""
        return self.run(self.steps.get_many(names))

    def get_file(
        self, name: str, path: os.PathLike[str] | str, *, progress: Progress | None = None
    ) -> ObjectStat:
        """The whole content into a local file, complete or absent, with the object's mode and time."""
        observer = Observer(progress=progress or (lambda done, present: None))
        return self.run(replace_file(self.steps, parse_object_name(name), os.fspath(path), observer))

    def open(self, name: str) -> io.BufferedReader:
        """A readable, seekable binary file.  It keeps the content it was opened on, whatever happens to the name."""
        return io.BufferedReader(ObjectReader(self, self.run(self.steps.open(name))), buffer_size=1 << 20)

    @contextlib.contextmanager
    def map(
        self, name: str, offset: int = 0, length: int | None = None, *, check: Check | None = None
    ) -> Iterator[MappedObject]:
        """An object, or a range of it, as read-only memory, without a copy: `with lake.map(name) as m: m.view`.

        Checked once, here; the engine keeps the bytes where they are until the end of the block.  An I/O error of
        the disk under it ends the process (SIGBUS).  BufferError when something made of it outlives the block.
        """
        mapped = self._mapped(name, offset, length, check)
        try:
            yield mapped
        except BaseException as error:
            try:
                mapped.close()
            except BufferError as held:  # by the frames of the error, most likely
                error.add_note(str(held))
                raise error from None
            self._unpin(mapped)
            raise
        mapped.close()
        self._unpin(mapped)

    def _mapped(self, name: str, offset: int, length: int | None, check: Check | None) -> MappedObject:
        """A mapping whose connection is still there when it is handed out."""
        for _ in range(MAP_ATTEMPTS):
            mapped = self.run(self.steps.map(name, offset, length, check))
            if not mapped.chunks:
                return mapped
            mapped.is_pinned = partial(self.is_held, mapped.epoch)
            if mapped.is_pinned():
                return mapped
            mapped.close()
        raise EngineUnreachable(f"the connection was lost while {name} was mapped", subject=name)

    def _unpin(self, mapped: MappedObject) -> None:
        if mapped.is_pinned() and not self._closed:
            self.run(unpin(mapped))

    # --- names -------------------------------------------------------------------------------------

    def stat(self, name: str) -> ObjectStat:
        """What is known of a name; KeyNotFound."""
        return self.run(self.steps.stat(name))

    def exists(self, name: str) -> bool:
        """Whether the name is there."""
        return self.run(self.steps.exists(name))

    def ls(self, name: str, *, delimiter: str = "", folders: bool = False) -> Iterator[ListEntry]:
        """All keys that begin with the name's key, in byte order, read page by page."""
        after = ""
        while True:
            page = self.run(self.steps.list_page(name, after=after, delimiter=delimiter, folders=folders))
            yield from page.entries
            after = page.next_after
            if not after:
                return

    def remove(self, name: str) -> bool:
        """Remove an object or an empty folder; whether it was there."""
        return self.run(self.steps.remove(name))

    def move(
        self, source: str, target: str, *, replace: bool = True, create_bucket: bool = False
    ) -> ObjectStat:
        """Rename an object or folder, atomically; `create_bucket` makes the target's bucket when it is missing."""
        return self.run(self.steps.move(source, target, replace=replace, create_bucket=create_bucket))

    def copy(self, source: str, target: str, *, create_bucket: bool = False) -> ObjectStat:
        """Give an object's content a second name; no byte moves."""
        return self.run(self.steps.copy(source, target, create_bucket=create_bucket))

    def make_folder(self, name: str, *, exclusive: bool = False, create_bucket: bool = False) -> ObjectStat:
        """Make a folder that stays when empty."""
        return self.run(self.steps.make_folder(name, exclusive=exclusive, create_bucket=create_bucket))

    # --- buckets -----------------------------------------------------------------------------------

    def buckets(self) -> list[BucketStat]:
        """All buckets."""
        return self.run(self.steps.buckets())

    def create_bucket(self, name: str) -> BucketStat:
        """Make a bucket; AlreadyExists."""
        return self.run(self.steps.create_bucket(name))

    def remove_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        self.run(self.steps.remove_bucket(name))

    def bucket(self, name: str) -> BucketStat:
        """A bucket and its settings; BucketNotFound."""
        return self.run(self.steps.bucket(name))

    def set_bucket(
        self, name: str, *, anonymous_read: bool | None = None, versioning: str | None = None
    ) -> BucketStat:
        """Change settings of a bucket, None: as it is."""
        return self.run(self.steps.set_bucket(name, anonymous_read=anonymous_read, versioning=versioning))

    # --- access keys -------------------------------------------------------------------------------

    def create_access_key(self, *, buckets: Sequence[str] = (), read_only: bool = False) -> AccessKeyStat:
        """Make an access key for those buckets (none: all); the answer has its secret."""
        return self.run(self.steps.create_access_key(buckets=buckets, read_only=read_only))

    def access_keys(self) -> list[AccessKeyStat]:
        """All access keys, without their secrets."""
        return self.run(self.steps.access_keys())

    def find_access_key(self, access_key: str) -> AccessKeyStat | None:
        """What an access key may do, with its secret, as it is now; None when there is none."""
        return self.run(self.steps.find_access_key(access_key))

    def remove_access_key(self, access_key: str) -> None:
        """Revoke an access key; AccessKeyNotFound."""
        self.run(self.steps.remove_access_key(access_key))

    # --- upkeep ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """State of the engine."""
        return cast(dict[str, Any], json.loads(self.run(self.steps.status())))

    def gc(self, *, compact: bool = False) -> dict[str, Any]:
        """One cycle of garbage collection, with `compact` to the last page; its report."""
        return cast(dict[str, Any], json.loads(self.run(self.steps.gc(compact=compact))))

    def fsck(self, *, full: bool = False) -> dict[str, Any]:
        """Check the store; the report."""
        return cast(dict[str, Any], json.loads(self.run(self.steps.fsck(full=full))))

    def scrub(
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
        return cast(dict[str, Any], json.loads(self.run(steps)))


class ObjectReader(io.RawIOBase):
    """One opened object as a raw binary file; wrap in `io.BufferedReader`, as `Lake.open` does."""

    def __init__(self, lake: Lake, opened: Opened) -> None:
        self._lake = lake
        self._opened = opened
        self._position = 0

    @property
    def stat(self) -> ObjectStat:
        """What the name was when it was opened."""
        return self._opened.stat

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._opened.stat.size_bytes}[
            whence
        ]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}: before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self._lake.run(self._lake.steps.read(self._opened, self._position, len(view)))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def readall(self) -> bytes:
        rest = max(0, self._opened.stat.size_bytes - self._position)
        content = self._lake.run(self._lake.steps.read(self._opened, self._position, rest))
        self._position += len(content)
        return content

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(EngineUnreachable):  # the lease ended with the connection
                self._lake.run(self._lake.steps.close(self._opened))
        super().close()
