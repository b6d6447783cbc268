"""Keeps a mirrored disk at so many copies while it is used: one that was lost or is stale is made anew.

    look   are the folders still those that were locked?  -- which copies are missing  --  make one, at a pace  --  ...

Rules kept here:
- One copy is made at a time, on the best folder that has none: a device without a copy first, and one that failed in
  this process last.
- The folder of a copy that is stale, since the list does not name it, is set aside, not removed: it is locked then, so
  nobody has it open.  A folder that is no copy is left alone.
- A folder where the making failed is tried again later, behind the others.
- Where two copies lie on one device, and a device without one is here, one of the two is given up for a copy there: a
  device is lost with all that is on it.  That is tried once in RESPREAD_S, since the making may fail.
- While LMDB lies on a copy that is lost, none is made: a checkpoint would read the lost index.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Final

import structlog
import trio

from engine.mirror.copy import Copy
from engine.mirror.copy_folders import CopyFolder, best_folders
from engine.mirror.copy_list import LIST_FILE, LOCK_FILE
from engine.mirror.mirror_bounds import COPY_BYTES_PER_S
from engine.mirror.mirrored_disk import MirroredDisk
from engine.mirror.new_copy import add_copy
from lakefs.errors import DiskFailed, EngineBusy, LakeError
from lakefs.ports import Clock, Offload

LOOK_EVERY_S: Final = 5.0
RESPREAD_S: Final = 3600.0
RETRY_S: Final = 60.0
"""A folder where no copy could be made is tried again so much later."""
_log: Final = structlog.get_logger(__name__)


class CopyKeeper:
    """The task that makes missing copies of one mirror.  Used on the loop; what blocks runs by `offload`."""

    def __init__(
        self,
        mirror: MirroredDisk,
        folders: Sequence[CopyFolder],
        wanted_max: int,
        offload: Offload,
        *,
        clock: Clock,
        before: Callable[[], Awaitable[object]],
        failed: Callable[[str], None],
        bytes_per_s: float = COPY_BYTES_PER_S,
    ) -> None:
        """Looks at the folders, so it blocks.  `wanted_max`: copies wanted where there are so many folders.

        `before` is called before each copy: a checkpoint leaves less to copy.
        `failed` is called with the reason when the mirror cannot be used any more.
        """
        self.devices = {folder.name: folder.device() for folder in folders}
        """Number of each folder's device, as it was when that was last looked at."""
        self._mirror = mirror
        self._folders = [*folders]
        self._wanted_max = wanted_max
        self._offload = offload
        self._clock = clock
        self._before = before
        self._failed = failed
        self._bytes_per_s = bytes_per_s
        self._failed_until: dict[str, float] = {}
        self._spread_at = -math.inf
        self._is_ended = False

    @property
    def wanted(self) -> int:
        """Number of copies to keep."""
        return min(self._wanted_max, len(self._folders))

    def add(self, folder: CopyFolder) -> None:
        """Let copies lie in one more folder from now on; does nothing for one that is known."""
        if folder.name not in [each.name for each in self._folders]:
            self._folders.append(folder)

    @property
    def device_count(self) -> int:
        """Number of devices that have a good copy: all but one of them may be lost."""
        return len({self.devices.get(copy.name) for copy in self._mirror.copies.good})

    def end(self) -> None:
        """Give up the copy that is being made; the task may be cancelled then."""
        self._is_ended = True

    async def run(self) -> None:
        """Look after the copies until cancelled."""
        while True:
            await self.look()
            await trio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Throw out copies whose folders were moved or replaced, and make those that are missing."""
        try:
            await self._offload.run(self._mirror.check_lock)
        except EngineBusy:
            return  # it says nothing about the copies
        except LakeError as error:
            self._failed(error.message)
            return
        await self._spread()
        while not self._is_ended and not self._mirror.is_home_lost and len(self._mirror.copies.good) < self.wanted:
            folder = await self._offload.run(self._next_folder)
            if folder is None:
                return
            await self._make(folder)

    async def _spread(self) -> None:
        """Give up a copy beside another one on its device, if a device without one is here: it is made there then."""
        now = self._clock.monotonic()
        if self._is_ended or self._mirror.is_home_lost or now < self._spread_at + RESPREAD_S:
            return
        if len(self._mirror.copies.good) < self.wanted or self.device_count >= self.wanted:
            return
        surplus = await self._offload.run(self._surplus)
        if surplus is None:
            return
        self._spread_at = now
        try:
            await self._offload.run(self._mirror.throw_out, surplus.id, "another copy lies on its device")
        except LakeError as error:
            _log.warning("a copy of the names stays beside another one on its device", reason=error.message)

    def _surplus(self) -> Copy | None:
        """Return a copy beside another one on its device; None while no device without a copy is here."""
        devices = {folder.name: folder.device() for folder in self._folders}
        good = self._mirror.copies.good
        used = [devices.get(copy.name) for copy in good]
        if None in used or not set(devices.values()) - {*used, None}:
            return None
        return next(
            (copy for copy in good if used.count(devices[copy.name]) > 1 and copy is not self._mirror.home), None
        )

    def _next_folder(self) -> CopyFolder | None:
        now = self._clock.monotonic()
        tried = {name for name, until in self._failed_until.items() if until > now}
        taken = [copy.name for copy in self._mirror.copies.good]
        out = {state.name for state in self._mirror.state() if state.state == "out"}
        folders = [folder for folder in self._folders if folder.name not in tried]
        return next(iter(best_folders(folders, 1, taken, out)), None)

    async def _make(self, folder: CopyFolder) -> None:
        try:
            await self._before()
        except LakeError as error:
            _log.warning("no checkpoint before a new copy of the names is made", reason=error.message)
        try:
            await self._offload.run(self._make_blocking, folder)
        except (LakeError, FileNotFoundError, FileExistsError) as error:
            self._failed_until[folder.name] = self._clock.monotonic() + RETRY_S
            if not self._is_ended:
                _log.error(
                    "no new copy could be made here; another folder is tried", folder=folder.name, reason=str(error)
                )
        else:
            _log.warning("a new copy was made", folder=folder.name)

    def _make_blocking(self, folder: CopyFolder) -> None:
        disk = folder.disk()
        if disk.exists(LIST_FILE):
            self._mirror.copies.release_out(folder.name)
            with closing(disk.lock(LOCK_FILE)):
                folder.set_aside()
            disk = folder.disk()
        add_copy(self._mirror, folder.name, disk, self._paced)
        self.devices[folder.name] = folder.device()

    def _paced(self, count: int) -> None:
        if self._is_ended:
            raise DiskFailed("the making of a copy was ended")
        time.sleep(count / self._bytes_per_s)
