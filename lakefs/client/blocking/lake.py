"""The blocking client: `lakefs.connect()`, for training loops, notebooks and the command line.

`Lake` has the methods of `lakefs.lake.lake_steps.LakeSteps`; `lakefs.client.blocking.driver` runs them over one
connection.  A method is written out here only if it does more than run those steps: it reads without a request, writes
a local file, returns an object to be closed, or ends with a block.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Self, cast, overload

from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.object_reader import BUFFER_BYTES, ObjectFile, ObjectReader
from lakefs.client.blocking.object_writer import WRITE_MODES, ObjectWriter, WriteMode
from lakefs.client.facade import Facade, blocking, blocking_known, blocking_pages
from lakefs.content.verify import Check
from lakefs.errors import AlreadyExists, EngineUnreachable, InvalidArgument, LakeError
from lakefs.fabric.counts import NO_RDMA, FabricCounts
from lakefs.get.mapping import MAP_ATTEMPTS, MappedObject, unmapped_at_end, unpin
from lakefs.get.pools import Pool
from lakefs.host.forks import NO_FORK
from lakefs.known.counts import KnownCounts
from lakefs.lake.lake_steps import LakeSteps, Progress
from lakefs.names import parse_new_name, parse_object_name
from lakefs.put.shared_memory import SharedMemory
from lakefs.sync.sync_steps import sync
from lakefs.trees.get_file import replace_file
from lakefs.trees.tree_steps import get_tree, put_tree, remove_tree
from lakefs.trees.walk import Observer
from lakefs.wire.engine_port import BlockingEngineClient
from lakefs.wire.messages import ObjectStat

if TYPE_CHECKING:
    from lakefs.client.blocking.chunks import Chunks
    from lakefs.client.blocking.loads import PoolLoads
    from lakefs.client.blocking.spaces import Space
    from lakefs.fabric.client_fabric import ClientFabric


class Lake(Facade[BlockingDriver]):
    """A connection to one engine.  Use as a context manager, or `close()`.  Errors are those of `lakefs.errors`."""

    _chunks: Chunks | None = None
    _loads: PoolLoads | None = None

    def __init__(
        self,
        engine: BlockingEngineClient,
        *,
        check: Check = Check.BLAKE3,
        repeats: bool = True,
        fabric: ClientFabric | None = None,
    ) -> None:
        self._driver = BlockingDriver(engine, check=check, repeats=repeats, fabric=fabric)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; unfinished puts and leases end with it.  Does nothing in another process."""
        self._driver.close()

    @property
    def address(self) -> str:
        """The engine's address: `unix:PATH` or `tcp://HOST:PORT`."""
        return self._driver.address

    @property
    def known(self) -> KnownCounts:
        """Counts of the names that this client knows, and of those that it has answered without a request."""
        return self._driver.known_counts

    @property
    def rdma(self) -> FabricCounts:
        """Counts of what was moved by RDMA, and the reason why it is not used, if it was tried in vain."""
        fabric = self._driver.steps.fabric
        return NO_RDMA if fabric is None else fabric.counts

    # --- writing -----------------------------------------------------------------------------------

    put = blocking(LakeSteps.put)
    put_many = blocking(LakeSteps.put_many)

    @contextlib.contextmanager
    def shared_memory(self, size_bytes: int) -> Iterator[SharedMemory]:
        """Make shared memory: fill its slots and put them; the engine copies them.  See `lakefs.put.shared_memory`."""
        memory = SharedMemory(size_bytes)
        try:
            yield memory
        finally:
            with contextlib.suppress(LakeError):  # a lending ends with its connection
                self._driver.run(self._driver.steps.return_memory(memory))
            memory.close()

    # --- multipart uploads -------------------------------------------------------------------------

    create_upload = blocking(LakeSteps.create_upload)
    put_part = blocking(LakeSteps.put_part)
    copy_part = blocking(LakeSteps.copy_part)
    parts = blocking_pages(LakeSteps.parts)
    uploads = blocking_pages(LakeSteps.uploads)
    complete_upload = blocking(LakeSteps.complete_upload)
    abort_upload = blocking(LakeSteps.abort_upload)

    # --- reading -----------------------------------------------------------------------------------

    get = blocking_known(LakeSteps.get)
    get_into = blocking_known(LakeSteps.get_into)
    get_many = blocking_known(LakeSteps.get_many)
    get_many_into = blocking_known(LakeSteps.get_many_into)

    @property
    def chunks(self) -> Chunks:
        """Chunks by their ids: `lake.chunks.get(id)`, `get_into(id, buffer)`, `get_many_into(ids, buffers)`."""
        return self._chunks or self._make_chunks()

    def _make_chunks(self) -> Chunks:
        with NO_FORK:
            if self._chunks is None:  # the import is a tenth of the start-up
                self._chunks = cast("Chunks", import_module("lakefs.client.blocking.chunks").Chunks(self._driver))
            return self._chunks

    @contextlib.contextmanager
    def pool(self, *, size_bytes: int = 0, descriptor: int | None = None) -> Iterator[Pool]:
        """Memory for `load_many`: new memory, or the memory of a descriptor (whole, or its first bytes).

        InvalidArgument, LocalFileError.  After the block the engine no longer touches the memory.
        """
        pool = Pool(size_bytes=size_bytes, descriptor=descriptor)
        try:
            yield pool
        finally:
            with contextlib.suppress(LakeError):  # a lending ends with its connection
                self._driver.run(self._driver.steps.return_pool(pool))
            pool.close()

    def load_many(
        self, wanted: Sequence[bytes | str], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
    ) -> list[int]:
        """Load chunks (by id) and objects (by name) to offsets of a pool; return their lengths in bytes, in order.

        If all are chunks that the shared index has, this process copies those in the page cache itself, without a
        request.  The engine loads the rest; see `LakeSteps.load_many`.  `rooms`, if given, has for each the most bytes
        that it may take.  ChunkNotFound, ChunkDamaged, InvalidArgument if something does not fit.  After an error the
        places may hold anything.
        """
        return (self._loads or self._make_loads()).load_many(wanted, pool, offsets, rooms)

    def _make_loads(self) -> PoolLoads:
        with NO_FORK:
            if self._loads is None:
                made = import_module("lakefs.client.blocking.loads").PoolLoads
                self._loads = cast("PoolLoads", made(self._driver))
            return self._loads

    def get_file(self, name: str, path: os.PathLike[str] | str, *, progress: Progress | None = None) -> ObjectStat:
        """Fetch an object into a local file, complete or absent, with the object's mode and modification time."""
        observer = Observer(progress=progress or (lambda done, present: None))
        return self._driver.run(replace_file(self._driver.steps, parse_object_name(name), os.fspath(path), observer))

    @overload
    def open(self, name: str, mode: Literal["rb"] = "rb") -> io.BufferedReader: ...
    @overload
    def open(self, name: str, mode: WriteMode, *, create_bucket: bool = False) -> ObjectWriter: ...
    def open(
        self, name: str, mode: Literal["rb"] | WriteMode = "rb", *, create_bucket: bool = False
    ) -> io.BufferedReader | ObjectWriter:
        """Open an object as a binary file.

        "rb": seekable; its content stays the same, whatever happens to the name.
        "wb", "xb" (the name must not exist: AlreadyExists), "ab" (behind what the object has): written from the
        beginning to the end.  The name changes when the file is closed: atomically, and durable then.  After an error
        in the file's `with` block, and after `discard()`, nothing changes.
        `create_bucket`: make the bucket if it does not exist, when the file is closed.
        """
        if mode == "rb":
            return ObjectFile(ObjectReader(self._driver, self._open(name)), BUFFER_BYTES)
        if mode not in WRITE_MODES:
            raise InvalidArgument(
                f"{name}: objects are opened with rb, wb, xb or ab, not {mode!r}; for text, encode it", subject=name
            )
        target = parse_new_name(name)
        if mode == "xb" and self.exists(name):
            raise AlreadyExists(f"{name} exists already", subject=name)
        return ObjectWriter(self._driver, target, mode, create_bucket=create_bucket)

    _open = blocking_known(LakeSteps.open)

    @contextlib.contextmanager
    def map(
        self, name: str, offset: int = 0, length: int | None = None, *, check: Check | None = None
    ) -> Iterator[MappedObject]:
        """Map an object, or a range of it, as read-only memory, without a copy: `with lake.map(name) as m: m.view`.

        The bytes are checked once, when they are mapped.  The engine keeps them in place until the end of the block.
        An I/O error of the disk under the mapping ends the process (SIGBUS).  BufferError if something made from the
        view outlives the block.
        """
        mapped = self._mapped(name, offset, length, check)
        try:
            with unmapped_at_end(mapped):
                yield mapped
        finally:
            if not mapped.pieces and mapped.is_pinned() and not self._driver.is_closed:
                self._driver.run(unpin(mapped))

    def _mapped(self, name: str, offset: int, length: int | None, check: Check | None) -> MappedObject:
        """Return a mapping whose connection is still open; map again if it was lost during the mapping."""
        for _ in range(MAP_ATTEMPTS):
            mapped = self._driver.run(self._driver.steps.map(name, offset, length, check))
            if mapped.is_pinned():
                return mapped
            mapped.close()
        raise EngineUnreachable(f"the connection was lost while {name} was mapped", subject=name)

    # --- names -------------------------------------------------------------------------------------

    stat = blocking_known(LakeSteps.stat)
    exists = blocking_known(LakeSteps.exists)
    ls = blocking_pages(LakeSteps.ls)
    remove = blocking(LakeSteps.remove)
    move = blocking(LakeSteps.move)
    copy = blocking(LakeSteps.copy)
    make_folder = blocking(LakeSteps.make_folder)

    # --- trees -------------------------------------------------------------------------------------

    put_tree = blocking(put_tree)
    get_tree = blocking(get_tree)
    remove_tree = blocking(remove_tree)
    sync = blocking(sync)

    # --- buckets -----------------------------------------------------------------------------------

    buckets = blocking(LakeSteps.buckets)
    create_bucket = blocking(LakeSteps.create_bucket)
    remove_bucket = blocking(LakeSteps.remove_bucket)
    bucket = blocking(LakeSteps.bucket)
    set_bucket = blocking(LakeSteps.set_bucket)

    # --- keyed blobs -------------------------------------------------------------------------------

    def space(
        self, name: str, *, quota: str | int | None = None, ttl: str | float | None = None, create: bool = True
    ) -> Space:
        """Return a space of keyed blobs; make it if it does not exist.  See `LakeSteps.open_space`."""
        stat = self._driver.run(self._driver.steps.open_space(name, quota=quota, ttl=ttl, create=create))
        made = import_module("lakefs.client.blocking.spaces").Space
        return cast("Space", made(self._driver, self.chunks, self._loads or self._make_loads(), stat))

    spaces = blocking(LakeSteps.spaces)
    remove_space = blocking(LakeSteps.remove_space)

    # --- access keys -------------------------------------------------------------------------------

    create_access_key = blocking(LakeSteps.create_access_key)
    access_keys = blocking(LakeSteps.access_keys)
    find_access_key = blocking(LakeSteps.find_access_key)
    remove_access_key = blocking(LakeSteps.remove_access_key)

    # --- upkeep ------------------------------------------------------------------------------------

    status = blocking(LakeSteps.status)
    gc = blocking(LakeSteps.gc)
    fsck = blocking(LakeSteps.fsck)
    scrub = blocking(LakeSteps.scrub)
