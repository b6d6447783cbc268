"""The part of opening and stopping a store that its content has no part in: lock, superblock, reserve and metadata.

    locked     lock, superblock; one of another role or lake is refused  --  released at the end, however it ends
    recovered  reserve, metadata (recovery), superblock says "not clean"
    running    commits, index and checkpoints run; the root node exists
    stopped    metadata closed, superblock says "clean", if every group is durable

`engine.store.opening` opens a whole store with it, `engine.store.names_opening` one without content.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace

import structlog
import trio

from engine.format.group_parts import FIRST_SHARD
from engine.format.sizes import MetadataSizes
from engine.host.tasks import plain_errors
from engine.metadata.metadata_store import Metadata
from engine.metadata.opening import open_metadata
from engine.namespace.buckets import initialise, is_initialised
from engine.store.features import Features
from engine.superblock import superblock as superblocks
from engine.superblock.reserve import Reserve
from engine.superblock.store_role import refuse_other_role
from engine.superblock.superblock import OpenedStore, Superblock, write_superblock
from lakefs import ids
from lakefs.errors import LakeError, StoreFull, StoreReadOnly
from lakefs.ids import NamesShard
from lakefs.ports import Clock, Disk, Offload

Leading = Callable[[Metadata, Superblock], AbstractAsyncContextManager[None]]
"""Entered with the running metadata of a store before anything is read or decided: when it leads, where it has
replicas.  It may end its block with an error."""
_log = structlog.get_logger()


def always_leading(metadata: Metadata, superblock: Superblock) -> AbstractAsyncContextManager[None]:
    """Let a store without replicas read and decide."""
    return nullcontext()


@asynccontextmanager
async def locked_store(
    disk: Disk,
    clock: Clock,
    offload: Offload,
    *,
    create: bool,
    cluster_id: bytes,
    has_names: bool,
    names_shard: NamesShard = FIRST_SHARD,
    while_locked: Callable[[OpenedStore], AbstractContextManager[None]],
) -> AsyncIterator[OpenedStore]:
    """Take the store's lock for the block, and enter `while_locked` with what the superblock says.

    Arguments and errors: see `engine.superblock.superblock.open_store` and `refuse_other_role`.  StoreReadOnly.
    """

    def open_blocking() -> OpenedStore:
        return superblocks.open_store(
            disk, clock, create=create, cluster_id=cluster_id, has_names=has_names, names_shard=names_shard
        )

    with telling_full():
        opened = await offload.run(open_blocking)
    try:
        refuse_other_role(opened.superblock, cluster_id, has_names=has_names, names_shard=names_shard)
        if opened.read_only:
            raise StoreReadOnly(opened.read_only)
        for warning in opened.warnings:
            _log.warning(warning)
        with plain_errors(), while_locked(opened):
            yield opened
    finally:
        opened.lock.close()


@contextmanager
def telling_full() -> Iterator[None]:
    """Add to StoreFull the advice for a disk too full to open the store, when no engine runs to remove objects."""
    try:
        yield
    except StoreFull as error:
        raise StoreFull(
            f"the store cannot be opened, its disk is full: {error.message.partition(';')[0]}; "
            "make a few MiB of room on that disk, or remove some files if it has no inodes left, and start again; "
            "nothing is lost",
            subject=error.subject,
        ) from error


@contextmanager
def logging_unclean_stop() -> Iterator[None]:
    """Log a step of the stop that fails, and leave the store as after a crash."""
    try:
        yield
    except LakeError as error:
        _log.error("the store was not stopped cleanly; the next start recovers it", error=error.message)


@dataclass(frozen=True)
class MetadataLife:
    """The metadata of a store whose lock is held: recovered, run, stopped."""

    disk: Disk
    clock: Clock
    offload: Offload
    opened: OpenedStore
    sizes: MetadataSizes
    index_committed: Callable[[], None] | None
    reserve: Reserve

    @property
    def unclean(self) -> Superblock:
        """The superblock of the store while it is open."""
        return replace(self.opened.superblock, clean_sequence=None)

    async def recovered(self) -> Metadata:
        """Return the metadata, recovered, with the reserve open; the superblock says "not clean" on return."""
        try:
            with telling_full():
                return await self._recovered()
        except BaseException:
            self.reserve.close()
            raise

    async def _recovered(self) -> Metadata:
        await self.offload.run(self.reserve.open)
        metadata = await open_metadata(
            self.disk,
            self.offload,
            self.clock,
            identity=self.opened.superblock.identity,
            clean_sequence=self.opened.superblock.clean_sequence,
            release_reserve=self.reserve.release,
            index_committed=self.index_committed,
            sizes=self.sizes.fitted(await self.offload.run(self.disk.total_bytes)),
            headroom_bytes=self.reserve.headroom_bytes,
        )
        try:
            await self.offload.run(write_superblock, self.disk, self.unclean, self.reserve)
        except BaseException:
            await metadata.close(clean=False)  # else the index stays open, and the opening cannot be tried again
            raise
        return metadata

    @asynccontextmanager
    async def running(
        self,
        metadata: Metadata,
        first: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        leading: Leading = always_leading,
    ) -> AsyncIterator[None]:
        """Run the metadata during the block, behind `first`; at the end, close the reserve and leave files as they are.

        The block is within that of `leading`, and begins when this store may decide.  The root node exists, and is
        durable.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(metadata.run)
            try:
                async with leading(metadata, self.opened.superblock):
                    await first()
                    await _initialised(metadata)
                    yield
            finally:
                self.reserve.close()
                nursery.cancel_scope.cancel()

    def features(self, metadata: Metadata) -> Features:
        """Return the features of the open store."""
        return Features(self.unclean, self.disk, self.offload, self.reserve, metadata)

    async def stop(
        self, metadata: Metadata, features: Features, kept: Sequence[Callable[[ids.Sequence], None]] = ()
    ) -> None:
        """Close the metadata; if every group is durable, call `kept`, and write a superblock that says "clean".

        LakeError.
        """
        clean_sequence = await metadata.close()
        if clean_sequence is None:
            return
        for keep in kept:
            await self.offload.run(keep, clean_sequence)
        assert features.superblock.clean_sequence is None, "the superblock of an open store is not clean"
        clean = replace(features.superblock, clean_sequence=clean_sequence)
        await self.offload.run(write_superblock, self.disk, clean, self.reserve)


async def _initialised(metadata: Metadata) -> None:
    """Let the root node exist, durably.  A store that has one is not changed, as it may refuse changes."""
    with metadata.view() as view:
        if is_initialised(view):
            return
    _, sequence = await metadata.commit(initialise)
    await metadata.wait_durable(sequence)
