"""Opens the names of a lake: a store of metadata without content, and stops it cleanly.

    open   lock, superblock (its role: names of this lake), metadata (recovery), superblock says "not clean", root node
    serve  commits, index and checkpoints run; a walk after the start verifies the index; spaces have their upkeep
    stop   journal synced, index completed, checkpoint if due, superblock says "clean", lock released

Rules kept here:
- The store of one engine, a member, and the names of another lake are refused by name; `open_store` refuses names.
- A damaged index is rebuilt from checkpoint and journal while the names serve, as that of an engine.
- It shares no stamps; heads that follow its turns repeat them (`engine.metadata.head_turns`).  After a stop that was
  not clean the names do not lead, and end no lease, before all rights that heads had are over; a clean stop waits for
  their end itself.  The last process may have kept that end (`engine.store.given_rights`); else it is the longest.
- What the reserve has given up on a full disk is taken back when there is room: no gc runs here that would do it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Final

import trio

from engine.chunks.quarantine import Quarantine
from engine.format.features import ReadOnlyFeature
from engine.format.group_parts import FIRST_SHARD
from engine.format.sizes import DEFAULT_STORE_SIZES, StoreSizes
from engine.keyed.upkeep import KeyedUpkeep
from engine.metadata.begin_anew import finish
from engine.metadata.head_turns import RIGHTS_OVER_S, open_turns
from engine.metadata.metadata_store import Metadata
from engine.namespace.watch import Watchers
from engine.sessions.references import References
from engine.store.given_rights import NOTHING_KEPT, GivenRights
from engine.store.keyed_store import KeyedStore
from engine.store.metadata_life import Leading, MetadataLife, always_leading, locked_store, logging_unclean_stop
from engine.superblock.reserve import Reserve
from engine.superblock.superblock import OpenedStore, Superblock
from engine.upkeep.index_upkeep import keep_index_whole
from lakefs.errors import LakeError
from lakefs.ids import NamesShard
from lakefs.ports import Clock, Disk, Offload

BeginAnew = Callable[[Disk, OpenedStore], Awaitable[OpenedStore]]
"""Replaces the metadata of a store whose lock is held, and returns the store as it is then."""
_SLEEP_S_MIN: Final = 0.001
_RESTORE_EVERY_S: Final = 60.0
"""The reserve is looked at so often."""


@asynccontextmanager
async def open_names_store(
    disk: Disk,
    clock: Clock,
    offload: Offload,
    *,
    cluster_id: bytes,
    create: bool,
    shard: NamesShard = FIRST_SHARD,
    verify_index: bool = True,
    sizes: StoreSizes = DEFAULT_STORE_SIZES,
    index_committed: Callable[[], None] | None = None,
    while_locked: Callable[[OpenedStore], AbstractContextManager[None]] = lambda _: nullcontext(),
    leading: Leading = always_leading,
    begin_anew: BeginAnew | None = None,
    given_rights: GivenRights = NOTHING_KEPT,
) -> AsyncIterator[KeyedStore]:
    """Open the names of a lake on a disk, and stop them cleanly at the end.

    `cluster_id`: the lake's, 16 bytes; `shard`: of its names.  `create`: make them when the disk has no store.  Of
    several replicas one is `leading`: the others follow until they do, and the block begins then.  `begin_anew`
    replaces the store's metadata before they are recovered.  `given_rights`: where the end of heads' rights
    is kept.  Errors and the other arguments: as of `engine.store.opening.open_store`, and errors of `begin_anew` and of
    `leading`, of this also in the midst of the block.
    """
    async with locked_store(
        disk,
        clock,
        offload,
        create=create,
        cluster_id=cluster_id,
        has_names=True,
        names_shard=shard,
        while_locked=while_locked,
    ) as opened:
        rights_over = _rights_over(opened, given_rights, clock.monotonic())
        superblock = await offload.run(finish, disk, clock, opened.superblock)
        opened = replace(opened, superblock=superblock)
        if begin_anew is not None:
            opened = await begin_anew(disk, opened)
        life = MetadataLife(disk, clock, offload, opened, sizes.metadata, index_committed, Reserve(disk))
        metadata = await life.recovered()
        record = given_rights.begin(opened.superblock, rights_over)
        metadata.use_turns(open_turns(clock, record.keep))
        async with life.running(metadata, leading=_behind_rights(clock, rights_over, leading)):
            store = _store(life, metadata)
            await store.features.mend()
            if store.features.has(ReadOnlyFeature.KEYED):
                store.keyed.used.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_run_beside, store, life, sizes)
                if verify_index:
                    nursery.start_soon(keep_index_whole, store)
                else:
                    store.index_looked_at.set()
                yield store
                nursery.cancel_scope.cancel()
            await _stop(store, life)
            record.remove()


def _rights_over(opened: OpenedStore, given_rights: GivenRights, now: float) -> float:
    """Return when no right is left that was given by the process which had the store open before."""
    if opened.created or opened.superblock.clean_sequence is not None:
        return -math.inf
    last_end = given_rights.last_end(opened.superblock)
    return now + RIGHTS_OVER_S if last_end is None else min(last_end, now + RIGHTS_OVER_S)


def _behind_rights(clock: Clock, rights_over: float, leading: Leading) -> Leading:
    """Let names lead behind the end of the rights: then the lease of their last process may be revoked, too."""

    @asynccontextmanager
    async def behind(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        await _sleep_until(clock, rights_over)
        async with leading(metadata, superblock):
            yield

    return behind


async def _sleep_until(clock: Clock, moment: float) -> None:
    while (left_s := moment - clock.monotonic()) > 0:  # noqa: ASYNC110 - nothing happens then but time
        await trio.sleep(max(left_s, _SLEEP_S_MIN))  # clocks differ from trio's, and so little may be no time there


def _store(life: MetadataLife, metadata: Metadata) -> KeyedStore:
    return KeyedStore(
        features=life.features(metadata),
        clock=life.clock,
        metadata=metadata,
        references=References(life.clock),
        watchers=Watchers(metadata.on_durable),
        quarantine=Quarantine(metadata, life.clock),
    )


async def _run_beside(store: KeyedStore, life: MetadataLife, sizes: StoreSizes) -> None:
    """Run what names need beside their requests, until cancelled."""
    ended = store.features.end_unused_spaces
    upkeep = KeyedUpkeep(store.metadata, store.keyed, store.clock, batch=sizes.gc_batch, without_spaces=ended)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upkeep.run)
        nursery.start_soon(_keep_reserve, life)
        if store.metadata.turns is not None:
            nursery.start_soon(store.metadata.turns.run)


async def _keep_reserve(life: MetadataLife) -> None:
    while True:
        await trio.sleep(_RESTORE_EVERY_S)
        if life.reserve.held_bytes < life.reserve.target_bytes:
            with suppress(LakeError):  # the journal meets it, too
                await life.offload.run(life.reserve.restore)


async def _stop(store: KeyedStore, life: MetadataLife) -> None:
    """Stop the names cleanly; if a step fails, log it and leave the store as after a crash."""
    with logging_unclean_stop():
        await store.end_rights()
        await life.offload.run(life.disk.check_lock)
        if store.metadata.failed is None:
            await store.metadata.sync()
        await life.stop(store.metadata, store.features)
