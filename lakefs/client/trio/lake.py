"""The trio client: the same operations as `lakefs.client.blocking.lake.Lake`, awaited, many at once.

`TrioLake` has the methods of `lakefs.lake.lake_steps.LakeSteps`; `lakefs.client.trio.driver` runs them over any
`EngineClient`: a remote engine (`connect_trio`), or one in the same process.  An object opened for reading is an
`OpenedObject`; close it, or use it as a context manager.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cached_property, partial

import trio

from lakefs.client.facade import Facade, awaited, awaited_known, awaited_pages
from lakefs.client.trio.chunks import TrioChunks
from lakefs.client.trio.driver import CLEANUP_S, TrioDriver
from lakefs.client.trio.spaces import TrioSpace
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.fabric.client_fabric import ClientFabric
from lakefs.fabric.counts import NO_RDMA, FabricCounts
from lakefs.get.mapping import MAP_ATTEMPTS, MappedObject, unmapped_at_end, unpin
from lakefs.get.opened import Opened, Piece
from lakefs.get.pools import Pool
from lakefs.known.counts import KnownCounts
from lakefs.lake.lake_steps import LakeSteps
from lakefs.names import check_text
from lakefs.ports import Offload
from lakefs.put.shared_memory import SharedMemory
from lakefs.sync.sync_steps import sync
from lakefs.trees.tree_steps import get_tree, put_tree, remove_tree
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import ObjectStat, WatchEvent


class TrioLake(Facade[TrioDriver]):
    """A lake over one engine client.  Safe for use by many tasks at once.  Errors are those of `lakefs.errors`."""

    def __init__(
        self,
        engine: EngineClient,
        offload: Offload,
        *,
        network: bool = False,
        check: Check = Check.BLAKE3,
        repeats: bool = True,
        fabric: ClientFabric | None = None,
    ) -> None:
        self._driver = TrioDriver(engine, offload, network=network, check=check, repeats=repeats, fabric=fabric)

    async def aclose(self) -> None:
        """Close the descriptors.  The owner of the engine client closes that."""
        await self._driver.aclose()

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

    put = awaited(LakeSteps.put)
    put_many = awaited(LakeSteps.put_many)

    @asynccontextmanager
    async def shared_memory(self, size_bytes: int) -> AsyncIterator[SharedMemory]:
        """Make shared memory: fill its slots and put them; the engine copies them.  See `lakefs.put.shared_memory`."""
        memory = await self._driver.offload.run(SharedMemory, size_bytes)
        try:
            yield memory
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
                with suppress(LakeError):  # a lending ends with its connection
                    await self._driver.run(self._driver.steps.return_memory(memory))
            memory.close()

    # --- multipart uploads -------------------------------------------------------------------------

    create_upload = awaited(LakeSteps.create_upload)
    put_part = awaited(LakeSteps.put_part)
    copy_part = awaited(LakeSteps.copy_part)
    parts = awaited_pages(LakeSteps.parts)
    uploads = awaited_pages(LakeSteps.uploads)
    complete_upload = awaited(LakeSteps.complete_upload)
    abort_upload = awaited(LakeSteps.abort_upload)

    # --- reading -----------------------------------------------------------------------------------

    get = awaited_known(LakeSteps.get)
    get_into = awaited_known(LakeSteps.get_into)
    get_many = awaited_known(LakeSteps.get_many)
    get_many_into = awaited_known(LakeSteps.get_many_into)
    load_many = awaited(LakeSteps.load_many)

    @cached_property
    def chunks(self) -> TrioChunks:
        """Chunks by their ids: `await lake.chunks.get(id)`, `get_into(id, buffer)`, `get_many_into(ids, buffers)`."""
        return TrioChunks(self._driver)

    @asynccontextmanager
    async def pool(self, *, size_bytes: int = 0, descriptor: int | None = None) -> AsyncIterator[Pool]:
        """Memory for `load_many`: new memory, or the memory of a descriptor (whole, or its first bytes).

        InvalidArgument, LocalFileError.  After the block the engine no longer touches the memory.
        """
        pool = await self._driver.offload.run(partial(Pool, size_bytes=size_bytes, descriptor=descriptor))
        try:
            yield pool
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
                with suppress(LakeError):  # a lending ends with its connection
                    await self._driver.run(self._driver.steps.return_pool(pool))
            pool.close()

    async def open(self, name: str) -> OpenedObject:
        """Open an object.  Its content stays the same, whatever happens to the name."""
        return OpenedObject(self._driver, await self._open(name))

    _open = awaited_known(LakeSteps.open)

    @asynccontextmanager
    async def map(
        self, name: str, offset: int = 0, length: int | None = None, *, check: Check | None = None
    ) -> AsyncIterator[MappedObject]:
        """Map an object, or a range of it, as read-only memory, without a copy; see `Lake.map`."""
        mapped = await self._mapped(name, offset, length, check)
        try:
            with unmapped_at_end(mapped):
                yield mapped
        finally:
            if not mapped.pieces and mapped.is_pinned():
                with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
                    await self._driver.run(unpin(mapped))

    async def _mapped(self, name: str, offset: int, length: int | None, check: Check | None) -> MappedObject:
        """Return a mapping whose connection is still open; map again if it was lost during the mapping."""
        for _ in range(MAP_ATTEMPTS):
            mapped = await self._driver.run(self._driver.steps.map(name, offset, length, check))
            if mapped.is_pinned():
                return mapped
            mapped.close()
        raise EngineUnreachable(f"the connection was lost while {name} was mapped", subject=name)

    # --- names -------------------------------------------------------------------------------------

    stat = awaited_known(LakeSteps.stat)
    exists = awaited_known(LakeSteps.exists)
    ls = awaited_pages(LakeSteps.ls)
    remove = awaited(LakeSteps.remove)
    move = awaited(LakeSteps.move)
    copy = awaited(LakeSteps.copy)
    make_folder = awaited(LakeSteps.make_folder)

    # --- trees -------------------------------------------------------------------------------------

    put_tree = awaited(put_tree)
    get_tree = awaited(get_tree)
    remove_tree = awaited(remove_tree)
    sync = awaited(sync)

    def watch(self, bucket: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Watch a bucket from now on: `async with lake.watch("models") as events: async for event in events`.

        Events arrive in order, each after its change is durable.  After a `resync` event look at everything again.
        """
        return self._driver.watch(check_text(bucket))

    # --- buckets -----------------------------------------------------------------------------------

    buckets = awaited(LakeSteps.buckets)
    create_bucket = awaited(LakeSteps.create_bucket)
    remove_bucket = awaited(LakeSteps.remove_bucket)
    bucket = awaited(LakeSteps.bucket)
    set_bucket = awaited(LakeSteps.set_bucket)

    # --- keyed blobs -------------------------------------------------------------------------------

    async def space(
        self, name: str, *, quota: str | int | None = None, ttl: str | float | None = None, create: bool = True
    ) -> TrioSpace:
        """Return a space of keyed blobs; make it if it does not exist.  See `LakeSteps.open_space`."""
        stat = await self._driver.run(self._driver.steps.open_space(name, quota=quota, ttl=ttl, create=create))
        return TrioSpace(self._driver, stat)

    spaces = awaited(LakeSteps.spaces)
    remove_space = awaited(LakeSteps.remove_space)

    # --- access keys -------------------------------------------------------------------------------

    create_access_key = awaited(LakeSteps.create_access_key)
    access_keys = awaited(LakeSteps.access_keys)
    find_access_key = awaited(LakeSteps.find_access_key)
    remove_access_key = awaited(LakeSteps.remove_access_key)

    # --- upkeep ------------------------------------------------------------------------------------

    status = awaited(LakeSteps.status)
    gc = awaited(LakeSteps.gc)
    fsck = awaited(LakeSteps.fsck)
    scrub = awaited(LakeSteps.scrub)


class OpenedObject:
    """An object opened for reading, at any offset."""

    def __init__(self, driver: TrioDriver, opened: Opened) -> None:
        self._driver = driver
        self._opened = opened

    @property
    def stat(self) -> ObjectStat:
        """Stat of the name when it was opened."""
        return self._opened.stat

    @property
    def pieces(self) -> list[Piece]:
        """The chunks of the content, in order, as far as the answer to `open` had them."""
        return list(self._opened.pieces)

    async def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Return a range (to the end if no length is given), cut at the object's end, checked."""
        wanted = self._opened.stat.size_bytes - offset if length is None else length
        return await self._driver.run(self._driver.steps.read(self._opened, offset, wanted))

    async def aclose(self) -> None:
        """Close the object: give its lease back."""
        await self._driver.run(self._driver.steps.close(self._opened))

    async def __aenter__(self) -> OpenedObject:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLEANUP_S):
            await self.aclose()
