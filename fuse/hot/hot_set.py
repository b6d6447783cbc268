"""The hot set: which contents lie in memory for the kernel, which open file uses which, and what has to go.

    seen      an object is opened for reading, for the second time within ten minutes
    filled    in the background, by checked reads (`fuse.hot.filling`); nothing waits for it
    given     to the next inode with that content that is opened for reading, and of which the kernel has no handle
    in use    until the last handle, and the last mapping, of that inode has ended
    gone      when room is needed (the one opened longest ago first), memory is scarce, or it was written to

Rules kept here:
- A hot file belongs to one inode at a time, however many have its content: what is written to one shows in its own
  backing only.  It changes hands when nothing uses it.
- While it is in use all handles of its inode pass through to it, those that write too (`HotFile.write`).  So
  `held` is asked before an inode is opened, and whether there is one is decided at the first handle (`given`).
- A hot file in use is never closed, and counts for the budget.
- What is found damaged is given to nobody; an open of the inode that uses it fails with EIO.
- No error of a fill reaches a reader.

Bounds: two fills at a time, and `WAITING_MAX` that wait; `SEEN_MAX` contents remembered as opened.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from fuse.hot.backings import Backings
from fuse.hot.budget import Budget
from fuse.hot.filling import fill
from fuse.hot.hot_file import HotFile
from fuse.hot.memory_files import MemoryFiles
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from lakefs.errors import LakeError
from lakefs.limits import HOT_FILLS, MIB

MIN_BYTES: Final = 2 * MIB
"""Smaller objects are read at once by most readers: what a handle costs is then more than what its reads cost."""
SECOND_OPEN_S: Final = 600.0
WAITING_MAX: Final = 64
SEEN_MAX: Final = 4096
"""100 bytes each."""
LOOK_S: Final = 2.0
CHECK_S: Final = 3600.0
_WRITING: Final = os.O_WRONLY | os.O_RDWR
_log: Final = structlog.get_logger(__name__)


@dataclass
class HotCounts:
    """Counts since the mount began."""

    opened: int = 0
    """Handles that passed through."""
    filled: int = 0
    filled_bytes: int = 0
    refused: int = 0
    """Fills that had no room."""
    failed: int = 0
    """Fills that ended with an error: damaged, gone, or no memory."""
    evicted: int = 0
    damaged: int = 0


@dataclass
class HotRules:
    """When an object becomes hot.  `forced`, for tests: at its first open, which waits for that, whatever its size."""

    min_bytes: int = MIN_BYTES
    second_open_s: float = SECOND_OPEN_S
    check_s: float = CHECK_S
    forced: bool = False


class HotSet:
    """The hot files of one mount.  All methods run in the loop; those that are not `async` are atomic."""

    def __init__(
        self, mount: Mount, files: MemoryFiles, backings: Backings, budget: Budget, rules: HotRules | None = None
    ) -> None:
        self.counts = HotCounts()
        self._mount = mount
        self._files = files
        self._backings = backings
        self._budget = budget
        self._rules = rules or HotRules()
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._filling: dict[bytes, int] = {}
        """Content that is being filled, or waits for that: its bytes, once room was found for them."""
        self._fills = trio.CapacityLimiter(HOT_FILLS)
        self._all: OrderedDict[HotFile, int] = OrderedDict()
        """All hot files, and the memory of each; the one opened longest ago first."""
        self._by_blob: dict[bytes, HotFile] = {}
        self._owner: dict[HotFile, Inode] = {}
        self._owned: dict[Inode, HotFile] = {}
        self._is_scarce = False

    @property
    def used_bytes(self) -> int:
        """Memory that hot files take, and those being filled will take."""
        return sum(self._all.values()) + sum(self._filling.values())

    @property
    def file_count(self) -> int:
        """Number of hot files."""
        return len(self._all)

    # --- opening -------------------------------------------------------------------------------------

    def held(self, inode: Inode) -> HotFile | None:
        """Return the hot file that the kernel uses for this inode: then all its handles pass through to it.

        Called when the inode has no open file here.  OSError EIO if it was found damaged.
        """
        hot = self._owned.get(inode)
        if hot is None:
            return None
        if not hot.is_in_use():
            self._disown(hot)
            return None
        if hot.is_damaged:
            raise OSError(errno.EIO, "its content in memory is damaged, and still mapped")
        return hot

    def is_held(self, inode: Inode) -> bool:
        """Return True if the kernel uses a hot file for this inode, be it damaged: a handle or a mapping is left."""
        hot = self._owned.get(inode)
        return hot is not None and hot.is_in_use()

    def given(self, inode: Inode) -> HotFile | None:
        """Return a hot file with the inode's stored content, which now belongs to it; None if there is none free.

        The kernel has no handle of the inode but the one that it is being given, which reads.
        """
        hot = self._by_blob.get(inode.attributes.blob)
        if hot is None or hot.is_damaged or hot.size != inode.attributes.size_bytes:
            return None
        if hot.is_changed or (self._owner.get(hot) is not inode and self._is_busy(hot)):
            return None
        if not hot.backing and not self._register(hot):
            return None
        self._disown(hot)
        self._owner[hot] = inode
        self._owned[inode] = hot
        return hot

    def pass_through(
        self, inode: Inode, hot: HotFile | None, handle: int, flags: int, *, begins: bool
    ) -> HotFile | None:
        """Have a handle, whose open is being answered, pass through, and return to what; None if it does not.

        `hot`: what the inode's other handles pass through to.  `begins`: there are none, and it may be the first.
        OSError: it cannot, and none does.
        """
        found = self.given(inode) if hot is None and begins else hot
        if found is not None:
            self.opened(found, handle, flags)
        return found

    def opened(self, hot: HotFile, handle: int, flags: int) -> None:
        """Count a handle, whose open is being answered, and have it pass through.  OSError: it cannot, and none is."""
        self._backings.pass_through(handle, hot.backing, direct=bool(flags & _WRITING))
        hot.handles += 1
        if flags & _WRITING:
            hot.writers += 1
            hot.may_be_mapped = hot.may_be_mapped or flags & os.O_ACCMODE == os.O_RDWR
        self._all.move_to_end(hot)
        self.counts.opened += 1

    def closed(self, hot: HotFile, flags: int) -> None:
        """Subtract a handle."""
        hot.handles -= 1
        if flags & _WRITING:
            hot.writers -= 1

    def _register(self, hot: HotFile) -> bool:
        try:
            hot.backing = self._backings.open_backing(hot.descriptor)
        except OSError as error:
            _log.warning("the kernel takes no more hot files", error=error.strerror)
            return False
        return True

    # --- filling -------------------------------------------------------------------------------------

    async def seen(self, inode: Inode) -> None:
        """Note that the inode's stored content is opened for reading; the second time soon after, fill it.

        Waits for nothing, unless the rules are forced.
        """
        blob, size = inode.attributes.blob, inode.attributes.size_bytes
        if inode.parent is None or not blob or not self._is_wanted(blob, size):
            return
        now = trio.current_time()
        before = self._seen.pop(blob, None)
        if self._rules.forced:
            await self._fill(inode, blob, size)
        elif before is not None and now - before <= self._rules.second_open_s:
            self._filling[blob] = 0
            self._mount.background.start_soon(self._fill, inode, blob, size)
        else:
            self._seen[blob] = now
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)

    def _is_wanted(self, blob: bytes, size: int) -> bool:
        if self._rules.forced:
            return size > 0 and (blob not in self._by_blob or self._by_blob[blob].is_changed)
        known = self._by_blob.get(blob)
        return (
            size >= self._rules.min_bytes
            and size <= self._budget.limit_bytes
            and (known is None or known.is_changed)
            and blob not in self._filling
            and len(self._filling) < WAITING_MAX
        )

    async def _fill(self, inode: Inode, blob: bytes, size: int) -> None:
        """Fill one content.  No error but cancellation leaves it."""
        try:
            async with self._fills:
                if not self._make_room(size):
                    self._refuse(inode, size)
                    return
                self._filling[blob] = size
                hot = HotFile(blob, self._files.new())
                try:
                    await fill(self._mount, self._mount.table.name_of(inode), blob, hot)
                    if self._is_known(blob):  # filled twice: only where fills are forced
                        return
                    self._add(hot)
                finally:
                    if hot not in self._all:
                        hot.close()
            if inode.file is None:
                inode.cached_blob = None
                await self._mount.forget_pages(inode)
        except LakeError as error:
            self._failed(inode, error.message)
        except OSError as error:
            self._failed(inode, error.strerror or str(error))
        except Exception:  # noqa: BLE001 - a bug in it must not end the mount: no reader depends on it
            self.counts.failed += 1
            _log.exception("a hot file could not be filled", name=inode.name)
        finally:
            self._filling.pop(blob, None)

    def _is_known(self, blob: bytes) -> bool:
        known = self._by_blob.get(blob)
        return known is not None and not known.is_changed

    def _add(self, hot: HotFile) -> None:
        self._all[hot] = hot.used_bytes
        self._by_blob[hot.blob] = hot
        self.counts.filled += 1
        self.counts.filled_bytes += hot.size
        self._filling.pop(hot.blob, None)
        _log.info("filled a hot file", size_bytes=hot.size, hot_files=self.file_count, hot_bytes=self.used_bytes)

    def _refuse(self, inode: Inode, size: int) -> None:
        self.counts.refused += 1
        _log.info("no room for a hot file", name=inode.name, size_bytes=size, hot_bytes=self.used_bytes)

    def _failed(self, inode: Inode, reason: str) -> None:
        self.counts.failed += 1
        _log.warning("a hot file could not be filled", name=inode.name, error=reason)

    # --- giving up -----------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Close hot files until `size` more bytes fit; False if they do not, whatever goes."""
        if self._budget.is_scarce():
            return False
        room = self._budget.room_bytes(self.used_bytes)
        for hot, used_bytes in list(self._all.items()):
            if room >= size:
                break
            if not self._is_busy(hot):
                self._close(hot)
                self.counts.evicted += 1
                room += used_bytes
        return room >= size

    def _is_busy(self, hot: HotFile) -> bool:
        """Return True if the kernel uses it, or an open file here does."""
        owner = self._owner.get(hot)
        return hot.holds > 0 or (owner is not None and owner.file is not None) or hot.is_in_use()

    def _disown(self, hot: HotFile) -> None:
        """Take a hot file that nothing uses from its inode; if it was written to it is closed."""
        owner = self._owner.pop(hot, None)
        if owner is not None:
            del self._owned[owner]
        if hot.is_changed and hot in self._all:
            self._close(hot)

    def _close(self, hot: HotFile) -> None:
        del self._all[hot]
        if self._by_blob.get(hot.blob) is hot:
            del self._by_blob[hot.blob]
        self._disown(hot)
        if hot.backing:
            try:
                self._backings.close_backing(hot.backing)
            except OSError as error:
                _log.warning("a hot file could not be given back", error=error.strerror)
        hot.close()

    def look_after(self) -> None:
        """Close what is of no use any more: what was written to or is damaged; all that is not in use when memory is
        scarce."""
        was_scarce, self._is_scarce = self._is_scarce, self._budget.is_scarce()
        if self._is_scarce and not was_scarce and self._all:
            _log.warning("memory is scarce: hot files are given up", hot_files=self.file_count)
        for hot in list(self._all):
            if hot.is_written:
                self._all[hot] = hot.used_bytes  # it may have grown
            if (hot.is_changed or hot.is_damaged or self._is_scarce) and not self._is_busy(hot):
                self._close(hot)
                self.counts.evicted += 1

    # --- checking ------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Compare all hot files with their checksums; those that differ are given to nobody any more."""
        for hot in list(self._all):
            if hot in self._all and not hot.is_changed:
                hot.holds += 1
                try:
                    is_right = not await self._mount.offload.run(hot.differing)
                except OSError:  # EIO: the kernel has found the memory itself broken
                    is_right = False
                finally:
                    hot.holds -= 1
                if not is_right and not hot.is_changed:
                    self._note_damaged(hot)

    def _note_damaged(self, hot: HotFile) -> None:
        hot.is_damaged = True
        self.counts.damaged += 1
        owner = self._owner.get(hot)
        _log.error("a hot file is damaged in memory and is given up", name="" if owner is None else owner.name)
        if not self._is_busy(hot):
            self._close(hot)

    # --- life ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after the hot files, and check them every hour, until cancelled."""
        check_at = trio.current_time() + self._rules.check_s
        while True:
            await trio.sleep(LOOK_S)
            try:
                self.look_after()
                if trio.current_time() >= check_at:
                    check_at = trio.current_time() + self._rules.check_s
                    await self.check()
            except OSError as error:  # of the kernel, which has no memory: tried again at the next look
                _log.warning("hot files could not be looked after", error=error.strerror)

    def close(self) -> None:
        """Log the counts, and give everything up; the kernel's own use is over or ends with the mount."""
        if self.counts.filled or self.counts.refused or self.counts.failed:
            _log.info("hot files of this mount", **vars(self.counts))
        for hot in list(self._all):
            hot.close()
        self._all.clear()
        self._files.close()


def made_hot_set(
    mount: Mount, backings: Backings, wanted_bytes: int | None, rules: HotRules | None = None
) -> HotSet | str:
    """Return the hot set of a mount, or the reason why this user or kernel can have none."""
    budget = Budget(wanted_bytes)
    if not budget.limit_bytes:
        return "--hot-memory is 0"
    try:
        # Writers may make files in use longer than they were filled: as much room again is theirs.
        files = MemoryFiles(2 * budget.limit_bytes)
    except OSError as error:
        return f"no file system in memory could be made ({error.strerror}): it needs the capability CAP_SYS_ADMIN"
    try:
        _try_out(files, backings)
    except PermissionError:
        files.close()
        return "this user may give the kernel no backing file: it needs CAP_SYS_ADMIN in the first user namespace"
    except OSError as error:
        files.close()
        return f"the kernel takes no backing file ({error.strerror})"
    return HotSet(mount, files, backings, budget, rules)


def _try_out(files: MemoryFiles, backings: Backings) -> None:
    hot = HotFile(b"", files.new())
    try:
        backings.close_backing(backings.open_backing(hot.descriptor))
    finally:
        hot.close()
