"""The write-behind of one open file as a task in the background: begun by writes, awaited by the commit, and ended.

What is stored, and when it can be, is in `fuse.staging.write_behind`.  All is called with the file's lock held.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from fuse.staging.folder import StagedFile
from fuse.staging.write_behind import BEGIN_BYTES, WriteBehind
from lakefs.client.trio.driver import TrioDriver
from lakefs.errors import LakeError
from lakefs.limits import BLOB_BYTES_MAX

_log: Final = structlog.get_logger(__name__)


class StoringBehind:
    """Stores the complete parts of a long new file, while more is written.

    `background` outlives the file's handles; `writers` bounds how many files of a mount are stored so at once.
    """

    def __init__(self, driver: TrioDriver, background: trio.Nursery, writers: trio.CapacityLimiter) -> None:
        self.behind: WriteBehind | None = None
        """The chunks that are stored; None while nothing was."""
        self._driver = driver
        self._background = background
        self._writers = writers
        self._is_idle = trio.Event()
        self._is_idle.set()

    def written(self, staged: StagedFile, offset: int, end: int) -> None:
        """Note a write, and begin to store what is complete by now."""
        if self.behind is None:
            if staged.size < BEGIN_BYTES or staged.base_bytes:
                return
            self.behind = WriteBehind(self._driver.steps, staged)
        self.behind.changed(offset, end)
        if self.behind.has_work() and self._is_idle.is_set():
            self._is_idle = trio.Event()
            self._background.start_soon(self._run, self.behind, self._is_idle, staged.name)

    def truncated(self, size: int) -> None:
        """Note another length: stored chunks behind it do not count, and at 0 all begins anew."""
        if not size:
            self.end()
        elif self.behind is not None:
            self.behind.changed(size, BLOB_BYTES_MAX)

    async def wait_idle(self) -> None:
        """Wait until nothing is being stored."""
        await self._is_idle.wait()

    def end(self) -> None:
        """Store no more, and forget what is stored; its session ends in the background."""
        behind, self.behind = self.behind, None
        if behind is not None:
            behind.stop()
            self._background.start_soon(self._give_back, behind, self._is_idle)
            self._is_idle = trio.Event()
            self._is_idle.set()

    async def _run(self, behind: WriteBehind, idle: trio.Event, name: str) -> None:
        try:
            async with self._writers:
                await self._driver.run(behind.run())
        except LakeError as error:
            _log.info("write-behind ended; the rest is stored at close", name=name, error=error.message)
        except Exception:  # noqa: BLE001 - a bug in it must not end the mount: the close does not depend on it
            _log.exception("write-behind failed; the rest is stored at close", name=name)
        finally:
            idle.set()

    async def _give_back(self, behind: WriteBehind, idle: trio.Event) -> None:
        await idle.wait()
        await self._driver.run(behind.end())
