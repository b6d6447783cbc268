"""Which files and folders have changes visible that nobody knows to be durable, and in which run of the engine.

An engine that is killed may take along what was visible for less than a second.  So a change is noted for the inodes
that it concerns, with the boot of the engine that answered it, until a `Sync` that the same boot answered: one that a
later boot answers says nothing of it.  Whoever syncs such an inode is told, once for each inode.

`settle` asks for a `Sync` by itself, two seconds behind a change: else a restart long afterwards would count as a loss.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog
import trio

from lakefs.errors import LakeError

SETTLE_S: Final = 2.0
INODES_MAX: Final = 65_536
"""Of one boot, 100 bytes each: what a mount changes in two seconds.  The oldest are forgotten."""
BOOTS_MAX: Final = 8
_log: Final = structlog.get_logger()


class Unsettled:
    """Boots of the engine, and for each the inodes changed in it, with the number of their last change."""

    def __init__(self) -> None:
        self._boots: dict[bytes, dict[int, int]] = {}
        self.count = 0
        """Changes so far."""
        self._some = trio.Event()

    def note(self, boot: bytes, inodes: Iterable[int]) -> None:
        """Changes of these inodes are visible in this run of the engine."""
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
        """Whether something of the inode is not known to be durable."""
        return any(inode in changed for changed in self._boots.values())

    def take(self, inode: int) -> set[bytes]:
        """Boots that the inode was changed in; who takes them says so when one of them is gone."""
        return {boot for boot, changed in self._boots.items() if changed.pop(inode, 0)}

    def settled(self, boot: bytes, count: int) -> None:
        """The first `count` changes are durable, as far as they were this boot's: it answered for a later one."""
        left = {inode: at for inode, at in self._boots.pop(boot, {}).items() if at > count}
        if left:
            self._boots[boot] = left

    async def settle(self, boot_now: Callable[[], bytes], sync: Callable[[], Awaitable[object]]) -> None:
        """Until cancelled: some time behind changes, sync, and forget those that this covered."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            await trio.sleep(SETTLE_S)
            boot, count = boot_now(), self.count
            if not self._boots.get(boot):
                continue  # synced already, or lost: the next fsync says so
            try:
                await sync()
            except LakeError as error:
                _log.info("what was changed is not known to be durable yet", reason=error.message)
                continue
            if boot == boot_now():
                self.settled(boot, count)
