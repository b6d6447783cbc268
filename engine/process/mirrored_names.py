"""The names of a lake on a mirrored disk: opened from the folders where copies lie, and kept on enough of them.

    open   choose the good copies (or make them, in a new lake)  --  open the names on them
    serve  a copy that is lost is made anew elsewhere; the index moves when its copy is lost
    stop   names stopped cleanly  --  the mirror's list says that all copies are equal, folders released

Rules kept here:
- Names are made only in a new lake: where no copy is found in an old one, its names lie on devices that are not here.
- A file of the journal, or a checkpoint, that recovery finds damaged is read from another copy, while one is left.
- The index lies on one copy.  When that is lost, it is rebuilt on another from checkpoint and journal; commits go on.
- The machine itself is not outlived.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
import trio

from engine.format.group_parts import FIRST_SHARD
from engine.format.sizes import DEFAULT_STORE_SIZES, StoreSizes
from engine.mirror.copy_calls import CopyCalls
from engine.mirror.copy_folders import CopyFolder, open_or_make
from engine.mirror.copy_keeper import CopyKeeper
from engine.mirror.mirror_bounds import COPIES_MAX, COPY_BYTES_PER_S
from engine.mirror.mirrored_disk import MirroredDisk
from engine.store.given_rights import NOTHING_KEPT, GivenRights
from engine.store.keyed_store import KeyedStore
from engine.store.metadata_life import Leading, always_leading
from engine.store.names_opening import BeginAnew, open_names_store
from lakefs.errors import CorruptionError, DiskFailed, LakeError
from lakefs.ids import CopyId, NamesShard
from lakefs.ports import Clock, Disk, Offload

INDEX_MOVES_MAX: Final = 2
"""A process gives up so many copies because their index cannot be written: then it is not the devices' fault."""
_LOOK_AT_HOME_S: Final = 1.0
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class NamesHost:
    """The facilities that names stand on.  `copying` makes new copies: a call takes as long as one is copied."""

    clock: Clock
    offload: Offload
    copying: Offload
    calls: CopyCalls
    index_committed: Callable[[], None] | None = None
    """Runs in a thread after each commit of the index."""
    while_open: Callable[[Disk], AbstractContextManager[None]] = lambda _: nullcontext()
    """Entered with the disk before anything is recovered."""
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    given_rights: GivenRights = NOTHING_KEPT


class LocalNames:
    """The names of a lake, open on this machine.  Used on the loop."""

    def __init__(self, store: KeyedStore, mirror: MirroredDisk, keeper: CopyKeeper, offload: Offload) -> None:
        self.store = store
        self._mirror = mirror
        self._keeper = keeper
        self._offload = offload
        self._moves_left = INDEX_MOVES_MAX
        self._is_moving = False
        self._is_ended = False
        store.metadata.outlive_index(self._is_index_moved)

    @property
    def disk(self) -> Disk:
        """The disk on which the names lie, as whoever reads their files has it."""
        return self._mirror

    def state(self) -> dict[str, Any]:
        """Return where the names lie, for people and scripts; JSON-able.

        `outlives_devices`: so many of the devices may be lost.  The machine may not.
        """
        devices = self._keeper.device_count
        return {
            "copies": [
                {"copy": copy_id.hex(), "folder": name, "state": state, "reason": reason}
                for copy_id, name, state, reason in self._mirror.state()
            ],
            "wanted": self._keeper.wanted,
            "devices": devices,
            "outlives_devices": max(0, devices - 1),
            "index_in": self._mirror.home.name,
        }

    def add_folder(self, folder: CopyFolder) -> None:
        """Let copies lie in one more folder: one is made there within seconds if there are too few."""
        self._keeper.add(folder)

    def end(self) -> None:
        """Move the index no more: nothing waits for that when the names stop."""
        self._is_ended = True

    async def keep_index(self) -> None:
        """Rebuild the index on another copy when that on which it lies is lost, until cancelled."""
        while True:
            await trio.sleep(_LOOK_AT_HOME_S)
            if self._mirror.is_home_lost and self.store.metadata.failed is None:
                await self._move_index()

    async def _is_index_moved(self, error: LakeError) -> bool:
        """Give up the copy whose index cannot be written, if others are left; `keep_index` does the rest."""
        if self._is_ended:
            return False
        if self._is_moving or self._mirror.is_home_lost:
            return self.store.metadata.failed is None
        if not isinstance(error, DiskFailed) or len(self._mirror.copies.good) < 2 or self._moves_left <= 0:
            return False
        reason = f"the index on it cannot be written: {error.message}"
        try:
            await self._offload.run(self._mirror.throw_out, self._mirror.home.id, reason)
        except LakeError:
            return False
        return True

    async def _move_index(self) -> None:
        self._is_moving = True  # the old index is written once more, perhaps, before it is replaced
        self._moves_left -= 1
        self._mirror.move_home()
        _log.warning("the index is rebuilt on another device: its own is lost", folder=self._mirror.home.name)
        try:
            await self.store.metadata.rebuild_online()
        except LakeError as error:
            reason = f"the index's device is lost, and it cannot be rebuilt on another: {error.message}"
            self.store.metadata.stop_writing(reason)
        self._is_moving = False


@asynccontextmanager
async def open_names_in(
    folders: Sequence[CopyFolder],
    host: NamesHost,
    *,
    lake_id: bytes,
    protection_losses: int,
    is_new: bool,
    without: frozenset[CopyId] = frozenset(),
    restored: bool = False,
    verify_index: bool = True,
    sizes: StoreSizes = DEFAULT_STORE_SIZES,
    shard: NamesShard = FIRST_SHARD,
    leading: Leading = always_leading,
    begin_anew: BeginAnew | None = None,
) -> AsyncIterator[LocalNames]:
    """Open the names that lie in these folders, and stop them cleanly at the end.

    Arguments and errors: see `engine.process.names_place.open_local_names`, and `open_names_store`.
    """
    wanted = min(protection_losses + 1, COPIES_MAX)
    opening = partial(open_or_make, copies=min(wanted, len(folders)), is_new=is_new, without=without, restored=restored)
    mirror = await host.offload.run(partial(opening, folders, host.calls))

    def opened_store() -> AbstractAsyncContextManager[KeyedStore]:
        return open_names_store(
            mirror,
            host.clock,
            host.offload,
            cluster_id=lake_id,
            create=is_new,
            verify_index=verify_index,
            sizes=sizes,
            shard=shard,
            index_committed=host.index_committed,
            while_locked=lambda _: host.while_open(mirror),
            leading=leading,
            begin_anew=begin_anew,
            given_rights=host.given_rights,
        )

    try:
        async with AsyncExitStack() as opened:
            store = await _entered(opened, opened_store, mirror, host.offload)
            keeper = await host.offload.run(_keeper, mirror, folders, wanted, host, store)
            _tell_devices(keeper)
            async with trio.open_nursery() as nursery:
                names = LocalNames(store, mirror, keeper, host.offload)
                nursery.start_soon(keeper.run)
                nursery.start_soon(names.keep_index)
                try:
                    yield names
                finally:
                    keeper.end()
                    names.end()
                    nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await host.offload.run(mirror.close)


async def _entered(
    opened: AsyncExitStack,
    opened_store: Callable[[], AbstractAsyncContextManager[KeyedStore]],
    mirror: MirroredDisk,
    offload: Offload,
) -> KeyedStore:
    """Enter the store; when a file is damaged, try again with that of another copy."""
    while True:
        try:
            return await opened.enter_async_context(opened_store())
        except CorruptionError as error:
            if not await offload.run(mirror.distrust, error.subject):
                raise
            _log.error("a file is damaged: it is read from another copy", path=error.subject, reason=error.message)


def _keeper(
    mirror: MirroredDisk, folders: Sequence[CopyFolder], wanted_max: int, host: NamesHost, store: KeyedStore
) -> CopyKeeper:
    return CopyKeeper(
        mirror,
        folders,
        wanted_max,
        host.copying,
        clock=host.clock,
        before=store.metadata.checkpoint,
        failed=store.metadata.stop_writing,
        bytes_per_s=host.copy_bytes_per_s,
    )


def _tell_devices(keeper: CopyKeeper) -> None:
    if keeper.device_count < keeper.wanted:
        _log.warning(
            "the names lie on fewer devices than the lake is to outlive: give folders on more devices",
            devices=keeper.device_count,
            wanted=keeper.wanted,
        )
