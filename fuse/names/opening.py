"""Opening files: what a name has when it is opened, whoever keeps changing it.

The kernel opens an inode that it has looked up before, perhaps long ago, so its name may have other content by now, or
none.  An open finds the present content, and never fails for a name that always exists:

- An inode that nobody has open takes over what its name has.
- One that others have open must keep its content for them.  The open is refused with ESTALE; the kernel looks the path
  up anew, and opens what it finds.  It does so once (`fuse.names.repeats`).
- So a thread that was refused gets, at its second open, also content that others have open, if a look-up behind the
  refusal has found that: it was the present content while the open was under way.  If its inode has lost the name once
  more, it gets the file that others have open under the name, past the kernel's page cache: its inode borrows that.
- An open whose name is gone is refused with ESTALE too: only the kernel knows if the call makes the file (O_CREAT).
- While the kernel reads an inode's content from memory, as for a mapping that is left of it (`fuse.hot.hot_set`), the
  inode takes over nothing and borrows nothing; and while it has borrowers, no handle of it passes through.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import trio
from pyfuse3 import FUSEError

from fuse.names.lookups import Lookups
from fuse.names.repeats import Repeats
from fuse.open_file import OpenFile
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from fuse.state.stat_fields import OBJECT
from lakefs.errors import BucketNotFound, KeyNotFound, PreconditionFailed

_ATTEMPTS_MAX: Final = 16


class Opening:
    """Opens the files of one mount."""

    def __init__(
        self,
        mount: Mount,
        lookups: Lookups,
        file_of: Callable[[Inode], OpenFile],
        is_held: Callable[[Inode], bool],
        repeats: Repeats,
    ) -> None:
        """`file_of` returns the open file of an inode, made if it has none; `is_held` is True while the kernel reads
        the content of an inode that nobody has open from memory."""
        self._mount = mount
        self._lookups = lookups
        self._file_of = file_of
        self._is_held = is_held
        self._repeats = repeats
        self._taking: dict[int, trio.Lock] = {}
        """Inodes, by number, of which tasks take what their names have."""

    async def open(self, inode: Inode, thread: int) -> OpenFile:
        """Add a handle to what the name of an inode has now; `thread` opens it.  ESTALE, EAGAIN.

        The file may be another inode's: then the handle must bypass the kernel's page cache, and is a borrower of this
        inode until `close`.
        """
        begun_at = trio.current_time()
        refused_at = self._repeats.begin(thread)
        try:
            return await self._present(inode, refused_at)
        except FUSEError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            if refused_at is None:
                self._repeats.refuse(thread, begun_at)
            raise FUSEError(errno.ESTALE) from error

    async def close(self, inode: Inode, file: OpenFile, *, stores: bool = False) -> None:
        """Remove a handle of an inode, for which `open` returned this file (`OpenFile.release`)."""
        inode.borrowers -= file.inode is not inode
        await file.release(stores=stores)

    async def _present(self, inode: Inode, refused_at: float | None) -> OpenFile:
        """Add a handle, as `open` does; `refused_at` is None unless an open is repeated, whose look-up began then."""
        if (file := await self._opened(inode, refused_at)) is not None:
            return file
        async with self._one_at_a_time(inode):
            for _ in range(_ATTEMPTS_MAX):
                found = await self._taken(inode)
                if found is not inode and refused_at is None:
                    break
                if found is not inode and (file := await self._shared(inode, found)) is not None:
                    return file
                if (file := await self._opened(inode, refused_at)) is not None:
                    return file
        raise FUSEError(errno.ESTALE if refused_at is None else errno.EAGAIN)

    async def _opened(self, inode: Inode, refused_at: float | None) -> OpenFile | None:
        """Add a handle to the file of an inode; None if its name has other content by now."""
        file = self._file_of(inode)
        try:
            await file.open()
        except (KeyNotFound, BucketNotFound, PreconditionFailed):
            if refused_at is not None and inode.found_at >= refused_at and await file.share():
                return file
            await file.discard()
            return None
        except BaseException:
            await file.discard()
            raise
        return file

    @asynccontextmanager
    async def _one_at_a_time(self, inode: Inode) -> AsyncIterator[None]:
        """Context manager: one task takes what the name has; else each would find that others have it open."""
        taking = self._taking.setdefault(inode.number, trio.Lock())
        try:
            async with taking:
                yield
        finally:
            if not taking.locked():
                self._taking.pop(inode.number, None)

    async def _shared(self, inode: Inode, found: Inode) -> OpenFile | None:
        """Add a handle to the file that others have open under the name, for an inode that nobody has open."""
        file = found.file
        if not isinstance(file, OpenFile) or not await file.share():
            return None
        if inode.file is not None or self._is_held(inode):
            await file.release()
            return None
        inode.borrowers += 1
        inode.attributes = replace(found.attributes)
        self._mount.forget_attributes(inode)
        return file

    async def _taken(self, inode: Inode) -> Inode:
        """Look at the name of an inode again; return the inode if it has taken what is there, else the one that has it.

        ENOENT, ESTALE.
        """
        place, inode.kept = inode.place, None
        found = await self._lookups.present(inode, OBJECT)
        if found is inode:
            return inode
        if inode.file is None and inode.cached_blob is not None:
            inode.cached_blob = None
            await self._mount.forget_pages(inode)
        is_free = inode.file is None and inode.cached_blob is None and found.file is None
        is_there = place is not None and found.parent is place[0]
        if not is_free or self._is_held(inode) or not is_there or found.is_pending:
            return found
        self._mount.table.take_over(inode, found)
        self._mount.forget_attributes(inode)
        return inode
