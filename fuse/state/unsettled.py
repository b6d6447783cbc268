"""Changes that are visible and not known to be durable: an engine that is killed may lose those of its last second.

Rules kept here:
- A change is noted for its inodes, with the engine run (boot) that answered it, until the same run answers a later
  `Sync`; the answer of a later run proves nothing.
- A caller that syncs such an inode gets its runs once, and reports the loss if one is gone.
- `settle` sends a `Sync` by itself, two seconds behind a change: else a restart long afterwards would count as a loss.
- At most `INODES_MAX` inodes for each of `BOOTS_MAX` runs are noted; the oldest are forgotten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog
import trio

from lakefs.errors import LakeError

SETTLE_S: Final = 2.0
INODES_MAX: Final = 65_536
"""Most inodes noted per boot, 100 bytes each: the changes of a mount in two seconds.  The oldest are forgotten."""
BOOTS_MAX: Final = 8
_log: Final = structlog.get_logger()


class Unsettled:
    """Boots of the engine, and for each the inodes changed in it, with the number of their last change."""

    def __init__(self) -> None:
        self._boots: dict[bytes, dict[int, int]] = {}
        self.count = 0
        """Number of changes so far."""
        self._some = trio.Event()
        self._taken: dict[bytes, set[int]] = {}
        """Inodes that `take` has returned, and that no later sync of that boot has made durable."""

    def note(self, boot: bytes, inodes: Iterable[int]) -> None:
        """Note that changes of these inodes are visible in this run of the engine."""
        changed = self._boots.setdefault(boot, {})
        self.count += 1
        for inode in inodes:
            changed.pop(inode, None)
            changed[inode] = self.count
        while len(changed) > INODES_MAX:
            del changed[next(iter(changed))]
        while len(self._boots) > BOOTS_MAX:
            del self._boots[next(iter(self._boots))]
        self._some.set()

    def concerns(self, inode: int) -> bool:
        """Return True if a change of the inode is not known to be durable."""
        return any(inode in changed for changed in self._boots.values())

    def may_be_lost(self, inode: int, boot_now: bytes) -> bool:
        """Return True if a change of the inode was visible in an earlier boot, and may have been lost with it."""
        lost = [known for boots in (self._boots, self._taken) for boot, known in boots.items() if boot != boot_now]
        return any(inode in known for known in lost)

    def take(self, inode: int) -> set[bytes]:
        """Return the boots in which the inode was changed, and forget them; the caller reports a boot that is gone."""
        boots = {boot for boot, changed in self._boots.items() if changed.pop(inode, 0)}
        for boot in boots:
            taken = self._taken.setdefault(boot, set())
            if len(taken) < INODES_MAX:
                taken.add(inode)
        while len(self._taken) > BOOTS_MAX:
            del self._taken[next(iter(self._taken))]
        return boots

    def settled(self, boot: bytes, count: int) -> None:
        """Forget those of the first `count` changes that are this boot's: it answered a later sync."""
        self._taken.pop(boot, None)
        left = {inode: at for inode, at in self._boots.pop(boot, {}).items() if at > count}
        if left:
            self._boots[boot] = left

    async def settle(self, boot_now: Callable[[], bytes], sync: Callable[[], Awaitable[object]]) -> None:
        """Send a `Sync` some time behind changes, and forget those that it covered; until cancelled."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            await trio.sleep(SETTLE_S)
            boot, count = boot_now(), self.count
            if not self._boots.get(boot):
                continue  # synced already, or lost: the next fsync reports it
            try:
                await sync()
            except LakeError as error:
                _log.info("what was changed is not known to be durable yet", reason=error.message)
                continue
            if boot == boot_now():
                self.settled(boot, count)
