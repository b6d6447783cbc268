"""The applier: writes durable groups from the overlay to the index, in large batches.

One round (`--` marks where a step ends and other tasks may run):

    freeze the overlay at a group border  --  wait until the frozen layer's last group is in the journal  --
    write the layer to the index in a thread  --  move the reader's snapshot and drop the layer (one step)

Rules kept here:
- Only groups that the journal has are written to the index: it never holds more than the journal.
- When the disk is full, the reserve is released and the write tried again, then once a second.  Until it succeeds the
  overlay grows to its bound, and commits are then refused instead of waiting.
- Any other failure of the index stops all writing, unless the owner says that another index takes its place soon
  (`outlive_index`): the round is tried again with that one.  The journal has every group, and the next start rebuilds
  the index.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from engine.metadata.group_commit import Committer
from engine.tables.merged_tables import Tables
from engine.tables.overlay import Layer
from lakefs.errors import CoordinatorLost, LakeError, StoreFull, StoreReadOnly
from lakefs.limits import OVERLAY_APPLY_INTERVAL_S
from lakefs.ports import Offload


class Applier:
    """Applies the overlay of one store.  A task that holds `paused` keeps the index as it is."""

    def __init__(
        self,
        tables: Tables,
        committer: Committer,
        offload: Offload,
        release_reserve: Callable[[], bool],
        applied: Callable[[], None],
    ) -> None:
        """`applied` is called on the loop after each round, while `paused` is still held."""
        self.paused = trio.Lock()
        self.applied_records = 0
        self._rebuilt_elsewhere: Callable[[LakeError], Awaitable[bool]] = _is_not_rebuilt
        self._tables = tables
        self._committer = committer
        self._offload = offload
        self._release_reserve = release_reserve
        self._applied = applied
        self._drain_wanted = trio.Event()
        self._filled = trio.Event()
        self._idle = trio.lowlevel.ParkingLot()
        self._running = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Apply a second after there is something, earlier after `hurry`, until cancelled or writing has failed."""
        self._running = True
        task_status.started()
        try:
            while self._committer.failed is None:
                await self._wait_until_due()
                if self._tables.overlay.entry_count:
                    await self._apply_round()
                else:
                    self._idle.unpark_all()
        except (StoreReadOnly, CoordinatorLost):
            if self._committer.failed is None:
                raise
        finally:
            self._running = False
            self._idle.unpark_all()

    async def drain(self) -> None:
        """Return when the overlay is empty, or cannot become so: writing failed, the index is full, or `run` ended.

        No commit may be under way.
        """
        while self._tables.overlay.entry_count and self._running:
            self.hurry()
            await self._idle.park()
            if self._committer.index_full is not None:
                return

    def outlive_index(self, rebuilt_elsewhere: Callable[[LakeError], Awaitable[bool]]) -> None:
        """Ask this when the index cannot be written: if it returns True, the caller rebuilds the index soon."""
        self._rebuilt_elsewhere = rebuilt_elsewhere

    def hurry(self) -> None:
        """Start a round now, as when the overlay is large."""
        self._drain_wanted.set()
        self._filled.set()

    def filled(self) -> None:
        """Note that the overlay has something to apply."""
        self._filled.set()

    async def _wait_until_due(self) -> None:
        if not self._tables.overlay.entry_count:  # an idle store sleeps
            self._filled = trio.Event()
            await self._filled.wait()
        with trio.move_on_after(OVERLAY_APPLY_INTERVAL_S):
            await self._drain_wanted.wait()
        self._drain_wanted = trio.Event()

    async def _apply_round(self) -> None:
        async with self.paused:
            frozen = self._tables.overlay.applying or await self._committer.freeze()
            await self._committer.wait_durable(frozen.last_sequence)
            await self._committer.log.wait_kept(frozen.last_sequence)
            if self._committer.failed is not None or frozen.last_sequence > self._committer.log.kept:
                return  # a log that is lost: the committer has failed, or will in a moment
            if not await self._write(frozen):
                return
            assert self._tables.overlay.applying is frozen, "the layer that was written is the one dropped"
            self._tables.drop_applied()
            self.applied_records += frozen.entry_count
            self._applied()
        self._committer.index_full = None
        self._committer.room_changed()
        if not self._tables.overlay.entry_count:
            self._idle.unpark_all()

    async def _write(self, frozen: Layer) -> bool:
        """Write the layer to the index; False when there is no room now."""
        index = self._tables.index
        try:
            with trio.CancelScope(shield=True):
                try:
                    await self._offload.run(index.apply, frozen, frozen.last_sequence)
                except StoreFull:
                    if not await self._offload.run(self._release_reserve):
                        raise
                    await self._offload.run(index.apply, frozen, frozen.last_sequence)
        except StoreFull as error:
            self._committer.index_full = error
            self._committer.room_changed()
            self._idle.unpark_all()
            return False
        except LakeError as error:
            if not await self._rebuilt_elsewhere(error):
                self._committer.fail(error)
            return False
        return True


async def _is_not_rebuilt(_: LakeError) -> bool:
    return False
