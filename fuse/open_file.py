"""One open file: its stored content, written bytes that are not stored yet, and the commit between them.

    open        the stored content is opened and held (a lease), so that it stays readable whole, whatever happens
    write       writes to the staging file, over the stored content; other clients do not see it
    commit      at close, fsync and release: one atomic change of the name; then others see all of it
    release     of the last handle: removes the staging file and gives the lease back

Rules kept here:
- All handles of an inode on this mount see the same content at once, as on a local file system.
- The first commit of a file gives it its node.  Later commits keep it, and go where `fuse.storing` says when the name
  has other content by now.
- A file without a name (unlinked, or replaced here) commits nothing.
- A file that the kernel reads from memory (`hot`) is written to there too, and what mappings wrote there is staged
  before each commit (`fuse.hot`).
- Native threads append to a file only between the calls here: each that takes the lock ends that (`_alone`).
- A failed commit keeps the staged bytes; the next close or fsync tries again, and after the last handle they stay in
  the staging folder, named in the log.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Final

import structlog
import trio

from fuse.hot.hot_file import HotFile
from fuse.hot.mappings import release_when_unmapped
from fuse.reading.blob_reader import BlobReader
from fuse.staging.folder import Base, Kind, StagedFile
from fuse.staging.storing_behind import StoringBehind
from fuse.state.decided_upon import place_of
from fuse.state.following import give_back, open_longer
from fuse.state.inodes import Inode
from fuse.state.kept import note_change
from fuse.state.mount import Mount, check_size, now_ns, replaced
from fuse.state.writers import Writers
from fuse.storing import FileContent, base_of, new_reader, reader_of, store
from lakefs.errors import DeadlineExceeded, DiskFailed, KeyNotFound, LakeError
from lakefs.get.opened import Opened
from lakefs.ids import Buffer
from lakefs.limits import FILE_BYTES_MAX
from lakefs.wire.messages import ListEntry, ObjectStat, SetAttributes

_log: Final = structlog.get_logger(__name__)


class OpenFile:
    """One file that is open, by one handle or many."""

    def __init__(self, mount: Mount, inode: Inode, hot: HotFile | None = None) -> None:
        self.inode = inode
        self.hot = hot
        """The file in memory that all handles pass through to; set at the first handle, or never."""
        self.handles = 0
        """Number of handles, with those that are being opened."""
        self.answered = 0
        """Number of handles that the kernel has, or is being given."""
        self.readers = 0
        """Handles that may read."""
        self.is_dirty = False
        """True if bytes were written, or the name is new, and the store does not have that."""
        self.writers = Writers()
        """Handles that may change it."""
        self._mount = mount
        self._lock = trio.Lock()
        self._content = FileContent(StoringBehind(mount.driver, mount.background, mount.writers_behind))
        self._visible_since = b""  # boot of the engine in which the last commit is visible but not known to be durable

    # --- handles -------------------------------------------------------------------------------------

    @property
    def is_stored(self) -> bool:
        """True if the content is the store's, and nothing was written over it since the first handle."""
        return self._content.staged is None and self._content.reader is not None and not self.is_dirty

    async def open(self) -> None:
        """Add a handle.  KeyNotFound or PreconditionFailed if the name has other content by now.

        The first handle opens the stored content.  Later ones compare it with the name, so that an open sees every
        version that was closed elsewhere before it.
        """
        self.handles += 1  # before the wait: no other task closes the file during it
        try:
            async with self._alone():
                await self._open()
        except BaseException:
            self.handles -= 1
            raise

    async def _open(self) -> None:
        if self.inode.parent is None and not self.inode.is_removed:
            raise KeyNotFound(f"{self.inode.name!r} was removed or replaced elsewhere", subject=self.inode.name)
        if self.inode.parent is None:
            await self._stored()  # a file that was removed here keeps its open content
        elif self.inode.is_pending:
            return
        elif self.is_dirty:
            await self._check_name()
        elif self._content.reader is None:
            await self._open_stored()
        else:
            await self._compare_stored()

    async def share(self) -> bool:
        """Add a handle to the content that others have open, whatever the name has by now; False if nobody has."""
        if not self.handles:
            return False
        self.handles += 1
        async with self._alone():
            if self._content.reader is not None:
                return True
            self.handles -= 1
            return False

    def open_new(self) -> None:
        """Add a handle of a file that this mount has just made, empty."""
        self.handles += 1
        self.is_dirty = self.inode.is_pending
        self._content.is_new = True

    async def release(self, *, stores: bool = False) -> None:
        """Remove a handle.  The last one, or one that `stores`, stores what is still unstored; an error is logged, and
        kept for the next open if nobody had it.  The last one gives everything back."""
        self.handles -= 1
        async with self._alone():
            if self.handles and not stores:
                return
            try:
                await self._take_over()
                if self.is_dirty:
                    await self._commit(durable=self._mount.options.sync)
                    if self.handles:
                        await self._hold()
            except LakeError as error:
                self._mount.note_failure(self.inode, self.writers, error)
                if not self.handles:
                    self._leave_staged(error)
                    self._let_go()
                    self._mount.show_stored(self.inode)
            finally:  # it may have been opened again during the commit
                if self._outlived_by_mapping and not self._mount.is_ending:
                    self._keep_for_mapping()
                elif not self.handles:
                    self.abandon()

    @property
    def _may_change_by_mapping(self) -> bool:
        """True if a mapping may have written, since the last `_take_over`, what has to be stored."""
        return self.hot is not None and self.hot.may_be_mapped and not self.inode.is_removed

    @property
    def _outlived_by_mapping(self) -> bool:
        """True if a mapping may still write when every handle that may do so is closed."""
        if not self._may_change_by_mapping or self in self._mount.mapped:
            return False
        return not self.handles or (self.hot is not None and not self.hot.writers)

    def _let_go(self) -> None:
        """Take over nothing any more: it could not be staged, or stored.  No other file gets what mappings wrote."""
        if self.hot is not None and self.hot.may_be_mapped:
            self.hot.is_let_go = True
            self.hot.may_be_mapped = False

    def _keep_for_mapping(self) -> None:
        """Keep the file open, by a handle that stands for a mapping that may write to it, until that has ended."""
        assert self.hot is not None, "no other file is mapped past the mount"
        self.handles += 1
        self._mount.mapped.add(self)
        self._mount.background.start_soon(release_when_unmapped, self._mount, self, self.hot)

    def abandon(self) -> None:
        """Close the file without waiting, as the mount ends.  Unstored bytes stay in the staging folder.

        Harmless when called twice.
        """
        if self.is_dirty and not self.inode.is_removed:
            self._leave_staged(DeadlineExceeded("the mount had to end before it was stored", subject=self.inode.name))
        self._close()

    async def discard(self) -> None:
        """Close a file that has no handle."""
        async with self._alone():
            if not self.handles:
                self._close()

    def _close(self) -> None:
        self._content.behind.end()
        staged, self._content.staged = self._content.staged, None
        if staged is not None:
            staged.discard()
        reader, self._content.reader = self._content.reader, None
        self.is_dirty = False
        self._mount.table.closed(self.inode, self)
        if reader is not None:
            reader.close()
            self._mount.give_back(reader.opened.lease)

    def _leave_staged(self, error: LakeError) -> None:
        self._content.behind.end()
        staged, self._content.staged = self._content.staged, None
        self.is_dirty = False
        self._mount.note_unstored(error)
        if staged is None:
            _log.error("a new file could not be stored", name=self.inode.name, error=error.message)
            return
        try:
            staged.keep_for_recovery()
        except LakeError as failure:  # the file is kept, but may not survive a power cut
            _log.error("staged bytes could not be synced", name=self.inode.name, error=failure.message)
        _log.error(
            "what was written could not be stored and stays in the staging folder",
            name=staged.name,
            error=error.message,
        )

    # --- stored content ------------------------------------------------------------------------------

    async def _open_stored(self) -> None:
        name = self._mount.table.name_of(self.inode)
        asked_at = trio.current_time()
        opened = await self._mount.opened(name, self.inode.attributes.size_bytes)
        if opened.stat.node != self.inode.node or opened.stat.blob != self.inode.attributes.blob:
            self._take_newer(opened)
        elif not (self.is_dirty or self.inode.is_newer_than(asked_at)):
            self._mount.take(self.inode, opened.stat)
        self._content.stat = opened.stat
        self.inode.xattrs, self.inode.seen_boot = opened.stat.xattrs, self._mount.engine_boot()
        assert self._content.reader is None  # else its native reads would have to end
        self._content.reader = new_reader(self._mount, opened)
        self._content.is_new = False

    def _take_newer(self, opened: Opened) -> None:
        """Take content stored since the name was looked up.  PreconditionFailed if the inode was open before.

        No reader has seen a byte of an inode that was never open, so it takes the newer content.  So a name that others
        keep overwriting can be opened: the kernel looks it up once more, not again and again.
        """
        mount, inode, stat = self._mount, self.inode, opened.stat
        known = mount.table.by_node(stat.node)
        is_first = inode.cached_blob is None and self.hot is None and self.handles <= 1 and self._content.staged is None
        if not is_first or not mount.has_name(inode, opened.name) or known not in (None, inode):
            mount.give_back(opened.lease)
            raise replaced(mount.table.name_of(inode))
        inode.take(mount.owner.shown(stat))
        mount.table.stored(inode, stat.node, is_found=True)
        mount.forget_attributes(inode)

    async def _check_name(self) -> None:
        """Raise KeyNotFound if a file that is being written here was removed elsewhere."""
        found = await self._mount.stat_of_small(self._mount.table.name_of(self.inode), 0)
        if isinstance(found, LakeError):
            raise found
        self.inode.seen_boot = self._mount.engine_boot()

    async def _compare_stored(self) -> None:
        name = self._mount.table.name_of(self.inode)
        found = await self._mount.stat_of_small(name, self.inode.attributes.size_bytes)
        if isinstance(found, LakeError):
            raise found
        is_other = found.node != self.inode.node or found.blob != self.inode.attributes.blob
        if is_other and not await self._follow(found):
            raise replaced(name)

    async def follow(self, found: ObjectStat | ListEntry) -> bool:
        """Have all handles show what the name has now, if that is their own content with something appended.

        `found`: the store's record of the inode's node.  Returns False if they keep their own.  EngineUnreachable.
        """
        async with self._alone():
            return await self._follow(found)

    async def _follow(self, found: ObjectStat | ListEntry) -> bool:
        own, hot = self._content.reader, self.hot
        if found.blob == self.inode.attributes.blob:
            return True
        if own is None or not self._shows_stored():
            return False
        longer = await open_longer(self._mount, self.inode, own, found, keep=hot is not None)
        if longer is None:
            return False
        if self._shows_stored() and (hot is None or hot.append(longer.added)):
            self._show(own, longer.reader)
            return True
        give_back(self._mount, longer.reader)
        return False

    def _shows_stored(self) -> bool:
        """Return True if all that handles show is the stored content of the inode's name."""
        return not self.is_dirty and self.inode.parent is not None and (self.hot is None or self.hot.is_followed)

    def _show(self, before: BlobReader, reader: BlobReader) -> None:
        """Show content that begins with what was shown before."""
        mount, inode, staged = self._mount, self.inode, self._content.staged
        self._content.reader, self._content.staged, self._content.stat = reader, None, reader.opened.stat
        if staged is not None:
            staged.discard()
        give_back(mount, before)
        inode.take(mount.owner.shown(self._content.stat))
        inode.xattrs, inode.cached_blob = self._content.stat.xattrs, None
        mount.touch(inode)
        mount.forget_attributes(inode)  # with the new length the kernel forgets its pages

    def note(self, stat: ObjectStat) -> None:
        """Take a changed record of the name; its content is the same."""
        self._content.stat = stat

    async def renew_lease(self) -> None:
        """Hold the content again after the connection was lost, if the name still has it."""
        async with self._alone():
            reader = self._content.reader
            if reader is None or not reader.opened.lease or self.inode.parent is None:
                return
            opened = await self._mount.leased(self._mount.table.name_of(self.inode))
            if opened.stat.blob == reader.opened.stat.blob:
                reader.close()
                self._content.reader = new_reader(self._mount, opened)
            else:
                self._mount.give_back(opened.lease)

    # --- reading and writing -------------------------------------------------------------------------

    def read_nowait(self, offset: int, length: int) -> Buffer | None:
        """Like `read`, if the content is stored and in memory; else None."""
        if self.hot is not None:
            return self.hot.read(offset, length)
        if self._content.staged is None and self._content.reader is not None:
            return self._content.reader.read_nowait(offset, length)
        return None

    def teach(self, handle: int, offset: int, length: int) -> None:
        """Have native threads answer reads like the one just answered, of stored content that no mapping writes to."""
        if self.hot is None and self._content.staged is None and self._content.reader is not None:
            self._content.reader.teach(handle, offset, length)

    async def read(self, offset: int, length: int) -> Buffer:
        """Return bytes as this mount sees them now, fewer at the end; valid until the caller's next checkpoint."""
        if self.hot is not None:
            return self.hot.read(offset, length)
        if self._content.staged is None and self._content.reader is not None:
            return await self._content.reader.read(offset, length)
        async with self._alone():
            if self._content.staged is None:
                return await self._read_stored(offset, length)
            parts: list[Buffer] = []
            for span in self._content.staged.spans(offset, length):
                if span.kind is Kind.BASE:
                    parts.append(await self._read_stored(span.offset, span.length))
                else:
                    parts.append(self._content.staged.read(span.offset, span.length))
            return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read_stored(self, offset: int, length: int) -> bytes:
        """Return a copy of stored bytes."""
        stored = await self._stored()
        return b"" if stored is None else bytes(await stored.read(offset, length))

    async def _stored(self) -> BlobReader | None:
        """Return the stored content; None for a new file.  KeyNotFound, PreconditionFailed if it cannot be opened."""
        if self._content.reader is None and not self._content.is_new:
            await self._open_stored()
        return self._content.reader

    async def write(self, offset: int, data: Buffer, appender: int = 0, *, appends: bool = False) -> bool:
        """Write to the staging file; native threads may write what follows through the handle `appender`, if not 0.

        `appends`: at the end of the file as this mount knows it, whatever the offset.  Returns False if that is
        elsewhere.  StoreFull; OSError EFBIG.
        """
        async with self._alone():
            staged = await self._staging()
            wanted, offset = offset, staged.size if appends else offset
            check_size(self.inode, offset + len(data))
            self._content.is_appended = appends and (self._content.is_appended or not self.is_dirty)
            if self.hot is None:
                staged.write(offset, data)
            else:
                self.hot.write(offset, data, staged.write)
            self._note_change(staged)
            self._content.behind.written(staged, offset, offset + len(data))
            if appender and self.hot is None and offset == wanted:
                staged.let_append(appender, FILE_BYTES_MAX, partial(self._note_change, staged))
            return offset == wanted

    async def truncate(self, size: int) -> None:
        """Change the file's length.  StoreFull; OSError EFBIG."""
        async with self._alone():
            check_size(self.inode, size)
            staged = await self._staging()
            self._content.is_appended = False
            if self.hot is None:
                staged.truncate(size)
            else:
                self.hot.truncate(size, staged.write, staged.truncate)
            self._note_change(staged)
            self._content.behind.truncated(size)

    async def _take_over(self) -> None:
        """Stage what mappings wrote to the file in memory, past the mount."""
        hot = self.hot
        if hot is None or not self._may_change_by_mapping:
            return
        may_be_mapped = hot.is_mapped_for_writing()  # asked before the look: after it nothing may be missed
        numbers = await self._mount.offload.run(hot.differing)
        if numbers:
            staged = await self._staging()
            self._content.is_appended = False
            hot.take_over(numbers, staged.write)
            self._note_change(staged)
            self.writers.changed(0, is_mapped=True)
        hot.may_be_mapped = may_be_mapped

    def end_appends(self) -> None:
        """Have the next write of each handle asked of the mount."""
        if self._content.staged is not None:
            self._content.staged.end_appends()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Keep all other tasks, and native threads, from using the file in the block."""
        async with self._lock:
            self.end_appends()
            yield

    def _note_change(self, staged: StagedFile, time_ns: int = 0) -> None:
        self.is_dirty = True
        attributes = self.inode.attributes
        attributes.size_bytes = staged.size
        attributes.mtime_ns = attributes.ctime_ns = time_ns or now_ns()
        self._mount.touch(self.inode)

    async def _staging(self) -> StagedFile:
        if self._content.staged is None:
            name = self._name()
            stored = await self._stored()
            base = None if stored is None else base_of(stored.opened.stat)
            if stored is not None:
                stored.close()  # the bytes below what is written are read here, beside it
            self._content.staged = self._mount.staging.new(name, base)
        else:
            await self._stored()
            if not self.is_dirty:
                self._note_name(self._content.staged)
        return self._content.staged

    def _note_name(self, staged: StagedFile) -> None:
        """Update the staged file's name: it, or a folder above it, may have been renamed since the last store."""
        if staged.name != (name := self._name()):
            staged.rename(name)

    def _name(self) -> str:
        """Return bucket and key of the file, or of what it was; only its component if a folder above it is gone."""
        place = self.inode.place
        try:
            return self.inode.name if place is None else str(self._mount.table.child_name(*place))
        except KeyNotFound:
            return self.inode.name

    # --- storing -------------------------------------------------------------------------------------

    async def commit(self, *, durable: bool) -> None:
        """Store written bytes, if any.  Visible to all on return; durable too if `durable`."""
        async with self._alone():
            await self._take_over()
            if self.is_dirty:
                with self.writers.reporting():
                    await self._commit(durable=durable)
                if durable or self.handles > 1:
                    await self._hold()
            elif durable and self._visible_since:
                await self._sync()

    def is_changed_by(self, handle: int) -> bool:
        """Return True if something was changed through a handle, or maybe a mapping of it, that is not stored."""
        if self._may_change_by_mapping and self.writers.may_be_mapped(handle):
            return True
        return self.is_dirty and self.writers.has_changed(handle)

    async def is_stored_at_flush(self, handle: int) -> bool:
        """Return True if the close of a descriptor of the handle stores the file: its program has no other."""
        return self.is_changed_by(handle) and not await self._mount.is_kept_open(self.inode, self.writers, handle)

    async def _sync(self) -> None:
        """Make an earlier commit durable.  DiskFailed if the engine restarted and the commit was lost with it."""
        mount = self._mount
        await mount.ask_sync()
        visible_since, self._visible_since = self._visible_since, b""
        if visible_since != mount.engine_boot() and self.inode.parent is not None:
            (found,) = await mount.stat([mount.table.name_of(self.inode)])
            if not isinstance(found, ObjectStat) or found.blob != self.inode.attributes.blob:
                raise DiskFailed(
                    f"{self.inode.name}: the engine was restarted before the last close was durable; write it again",
                    subject=self.inode.name,
                )

    async def _commit(self, *, durable: bool) -> None:
        if self.inode.is_removed:
            return
        if self._content.staged is None:
            await self._staging()
        await self._content.behind.wait_idle()
        async with self._mount.settling() if durable else nullcontext():
            stat, content, folder, epoch = await store(
                self._mount, self.inode, self._content, hot=self.hot, durable=durable
            )
        boot = b"" if durable else self._mount.engine_boot()
        if not durable:
            self._mount.note_visible(self.inode.parent)
        inode, attributes = self.inode, self.inode.attributes
        if inode.is_pending:
            note_change(place_of(inode)[0], folder, epoch)
        if attributes.mtime_ns == 0:  # with new content, 0 means now
            bucket, key = self._mount.table.child_name(*place_of(inode))
            atime_ns = attributes.atime_ns or 0
            request = SetAttributes(bucket, key, mtime_ns=0, atime_ns=atime_ns, durable=durable)
            stat = (await self._mount.change(request)).made
        self._mount.table.stored(inode, stat.node)
        self._mount.table.retake(inode)
        inode.named_ns, inode.is_set, inode.seen_boot = 0, False, self._mount.engine_boot()
        shown = self._mount.owner.shown(stat)
        attributes.mode, attributes.uid, attributes.gid = shown.mode, shown.uid, shown.gid
        attributes.blob = stat.blob
        attributes.size_bytes = stat.size_bytes
        attributes.ctime_ns = stat.ctime_ns or attributes.ctime_ns
        inode.cached_blob = stat.blob if self.hot is None else None  # the kernel's cached pages are the written ones
        self._mount.touch(inode)
        self._content.stat = stat
        self.is_dirty = False
        self.writers.committed()
        self._mount.failures.forget(f"{stat.bucket}/{stat.key}")
        self._visible_since = boot
        self._take_as_stored(base_of(stat), None if content is None else reader_of(self._mount, stat, content))

    @asynccontextmanager
    async def at_rest(self, *, stored: bool = False) -> AsyncIterator[None]:
        """Keep the file from being committed in the block, which may remove its name; its content stays readable.

        With `stored`, written bytes are committed first.
        """
        async with self._alone():
            await self._take_over()
            if stored and self.is_dirty:
                await self._commit(durable=False)
            await self._hold()
            yield

    async def _hold(self) -> None:
        """Open the stored content of a file that stays open.  If that fails, its next use raises the error."""
        with suppress(LakeError):
            await self._stored()

    def _take_as_stored(self, base: Base, reader: BlobReader | None) -> None:
        """Read staged content from the store from now on; without `reader` it is opened when next needed."""
        assert self._content.staged is not None
        before, self._content.reader = self._content.reader, reader
        self._content.is_new = False
        self._content.staged.mark_stored(base)
        self._content.behind.end()
        if before is not None:
            before.close()
            self._mount.give_back(before.opened.lease)


def may_read(flags: int) -> bool:
    """Return True if the kernel's page cache serves the handle's reads and mappings.

    A handle that only writes bypasses it: a program seldom reads soon what it writes to a long file, and caching the
    pages would cost as much as all the rest.  No mapping is lost: a shared one needs a handle that reads.
    """
    return flags & os.O_ACCMODE != os.O_WRONLY
