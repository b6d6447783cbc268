"""Opening files: what a name has when it is opened, whoever keeps changing it.

The kernel opens an inode that it has looked up before, perhaps long ago, so its name may have other content by now, or
none.  An open finds the present content, and never fails for a name that always exists:

- An inode that nobody has open takes over what its name has.
- One that others have open must keep its content for them.  The open is refused with ESTALE; the kernel looks the path
  up anew, and opens what it finds.  It does so once: a second ESTALE would be the program's.
- So a thread that was refused gets, at its second open, also content that others have open, if a look-up behind the
  refusal has found that: it was the present content while the open was under way.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import trio
from pyfuse3 import FUSEError

from fuse.names.lookups import Lookups
from fuse.open_file import OpenFile
from fuse.state.inodes import OBJECT, Inode
from fuse.state.mount import Mount
from lakefs.errors import BucketNotFound, KeyNotFound, PreconditionFailed

_ATTEMPTS_MAX: Final = 16
_REFUSED_MAX: Final = 1024
"""Most threads remembered as refused."""


class Opening:
    """Opens the files of one mount."""

    def __init__(self, mount: Mount, lookups: Lookups, file_of: Callable[[Inode], OpenFile]) -> None:
        """`file_of` returns the open file of an inode, made if it has none."""
        self._mount = mount
        self._lookups = lookups
        self._file_of = file_of
        self._refused: OrderedDict[int, float] = OrderedDict()
        """Threads whose last open was refused with ESTALE, and when."""

    async def open(self, inode: Inode, thread: int) -> OpenFile:
        """Add a handle to what the name of an inode has now; `thread` opens it.  ENOENT, ESTALE."""
        refused_at = self._refused.pop(thread, None) if thread else None
        for _ in range(_ATTEMPTS_MAX):
            file = self._file_of(inode)
            try:
                await file.open()
            except (KeyNotFound, BucketNotFound, PreconditionFailed):
                if refused_at is not None and inode.confirmed_at > refused_at and file.share():
                    return file
                await file.discard()
            except BaseException:
                await file.discard()
                raise
            else:
                return file
            if not await self._takes_newer(inode):
                break
        if thread:
            self._refused[thread] = trio.current_time()
            while len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)
        raise FUSEError(errno.ESTALE)

    async def _takes_newer(self, inode: Inode) -> bool:
        """Look at the name of an inode again; return True if the inode has what is there.  ENOENT, ESTALE."""
        place = inode.place
        if place is None:
            raise FUSEError(errno.ENOENT if inode.is_removed else errno.ESTALE)
        parent, name = place
        inode.kept = None
        if not self._mount.table.is_below(parent, self._mount.table.root):
            raise FUSEError(errno.ESTALE)
        found, _ = await self._lookups.look(parent, name, confirm=True)
        if found is None:
            raise FUSEError(errno.ENOENT)
        if found is inode:
            return True
        if found.attributes.kind != OBJECT:
            return False
        if inode.file is None and inode.cached_blob is not None:
            inode.cached_blob = None
            await self._mount.forget_pages(inode)
        is_free = inode.file is None and inode.cached_blob is None and found.file is None
        if not is_free or found.parent is not parent or found.is_pending:
            return False
        self._mount.table.take_over(inode, found)
        self._mount.forget_attributes(inode)
        return True
