"""Stores the written content of an open file under its name, upon what the name has (`fuse.state.decided_upon`).

- A refused commit looks at the name again.  Where everything was appended, the bytes are staged behind what is there;
  else the commit is made over it: the last close wins, whole.
- A commit whose answer was lost may have been made: sent again, it may meet its own success, and appends nothing twice.
- PreconditionFailed: the name was removed or renamed elsewhere; the bytes stay staged.

The caller holds the file's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fuse.hot.hot_file import HotFile
from fuse.reading.blob_reader import BlobReader
from fuse.reading.following import COMPARED_MAX, appended
from fuse.staging.behind import copy_behind, is_there
from fuse.staging.commit import Stored, store_staged
from fuse.staging.folder import Base, StagedFile
from fuse.staging.storing_behind import StoringBehind
from fuse.state.attributes import to_store
from fuse.state.decided_upon import look_again, lost_its_name, place_of, upon
from fuse.state.following import give_back
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from lakefs.errors import EngineUnreachable, KeyNotFound, PreconditionFailed
from lakefs.get.opened import Opened, Piece
from lakefs.ids import ChunkId
from lakefs.names import Name
from lakefs.wire.messages import ObjectStat

_ATTEMPTS_MAX: Final = 64
"""Most attempts at one commit; each but the first is refused only because another client has just committed."""
_COMPARE_BYTES: Final = 1 << 20


@dataclass
class FileContent:
    """The content of one open file."""

    behind: StoringBehind
    """Stores staged bytes while more is written."""
    reader: BlobReader | None = None
    """The stored content."""
    staged: StagedFile | None = None
    """Bytes written over it."""
    stat: ObjectStat | None = None
    """The record as opened, for fields that a file system has not."""
    is_new: bool = False
    """True if the store has nothing of it, or an empty file."""
    is_appended: bool = True
    """True if all that is not stored was written through O_APPEND handles, if anything was."""


async def store(mount: Mount, inode: Inode, content: FileContent, *, hot: HotFile | None, durable: bool) -> Stored:
    """Bind the name to the staged content, upon what it has; look at it again when that has changed.

    PreconditionFailed: the name was removed or renamed elsewhere; what was written stays staged.
    """
    opened_node = inode.node
    found: ObjectStat | None = None
    is_lost = False
    if not mount.checks_places:  # the engine checks less than it is sent: look first
        found = await look_again(mount, inode)
        is_other = found is not None and (found.node, found.blob) != (inode.node, inode.attributes.blob)
        if found is not None and is_other and content.is_appended:
            done = await _go_behind(mount, inode, content, found, hot=hot, is_lost=False)
            if done is not None:
                return Stored(done)
    for attempt in range(_ATTEMPTS_MAX):
        assert content.staged is not None, "there is something to store"
        condition = upon(inode, found, opened_node, is_appended=content.is_appended)
        try:
            return await mount.driver.run(
                store_staged(
                    mount.driver.steps,
                    content.staged,
                    None if content.reader is None else content.reader.opened,
                    mount.table.child_name(*place_of(inode)),
                    to_store(inode.attributes, content.stat),
                    keep_node=condition.node,
                    named_ns=inode.named_ns,
                    condition=condition,
                    durable=durable,
                    behind=content.behind.behind,
                    keep_attributes=not inode.is_set,
                )
            )
        except EngineUnreachable:
            if is_lost or attempt == _ATTEMPTS_MAX - 1:
                raise
            is_lost = True  # the change may have been made
        except (PreconditionFailed, KeyNotFound):
            if attempt == _ATTEMPTS_MAX - 1:
                raise
            before, found = found, await look_again(mount, inode)
            if found is not None and before == found:
                raise lost_its_name(mount, inode) from None  # what was opened has another name
            if found is not None and content.is_appended:
                done = await _go_behind(mount, inode, content, found, hot=hot, is_lost=is_lost)
                if done is not None:
                    return Stored(done)
    raise AssertionError("the loop returns or raises")


async def _go_behind(
    mount: Mount, inode: Inode, content: FileContent, found: ObjectStat, *, hot: HotFile | None, is_lost: bool
) -> ObjectStat | None:
    """Stage what was appended behind the content that the name has now; return that if nothing is to be added.

    `is_lost`: the answer to an earlier attempt was lost, and the content may end with, or contain, what it stored.
    """
    opened = await mount.leased(mount.table.child_name(*place_of(inode)))
    staged, reader = content.staged, new_reader(mount, opened)
    assert staged is not None, "something was appended"
    if (opened.stat.node, opened.stat.blob) != (found.node, found.blob):
        give_back(mount, reader)
        return None  # changed once more: the next attempt is refused, and looks again
    target = mount.staging.new(staged.name, base_of(opened.stat))
    try:
        is_done = is_lost and await _has_appended(staged, reader)
        if not is_done:
            await copy_behind(staged, target)
        if hot is not None and not await _go_behind_in_memory(hot, content.reader, reader, target):
            raise PreconditionFailed(
                f"{inode.name} was changed elsewhere, and not only appended to, while this mount had it in memory for"
                " its readers; what was appended stays staged, see: lake staged ls",
                subject=inode.name,
            )
    except BaseException:
        target.discard()
        give_back(mount, reader)
        raise
    before, content.reader, content.staged = content.reader, reader, target
    staged.discard()
    if before is not None:
        give_back(mount, before)
    _take_base(mount, inode, content, opened.stat, target.size)
    return opened.stat if target.size == opened.stat.size_bytes else None


async def _go_behind_in_memory(hot: HotFile, own: BlobReader | None, base: BlobReader, target: StagedFile) -> bool:
    """Put what `target` has behind the content that readers have in memory, if its base begins with that.

    Returns False, changing nothing, if it does not, or if memory is full.
    """
    if own is None or target.size - target.base_bytes > COMPARED_MAX:
        return False
    added = await appended(own, base, keep=True)
    if added is None or not hot.is_followed:
        return False
    mine = target.read(target.base_bytes, target.size - target.base_bytes)
    return hot.replace_end(own.opened.stat.size_bytes, [added, mine])


def _take_base(mount: Mount, inode: Inode, content: FileContent, stat: ObjectStat, size_bytes: int) -> None:
    """Be the file that the name has now, whose content the appended bytes are behind."""
    content.behind.end()
    content.stat, content.is_new = stat, False
    shown, mtime_ns = mount.owner.shown(stat), inode.attributes.mtime_ns
    inode.attributes = shown
    if size_bytes != stat.size_bytes:
        shown.size_bytes, shown.mtime_ns = size_bytes, mtime_ns
    mount.table.stored(inode, stat.node)
    inode.named_ns = 0
    mount.forget_attributes(inode)
    mount.background.start_soon(mount.forget_pages, inode)  # not here: it waits for reads, which wait for the lock


async def _has_appended(staged: StagedFile, reader: BlobReader) -> bool:
    """Return True if stored content has, where they were appended, the bytes appended in a staged file."""
    offset, end = staged.base_bytes, staged.size
    while offset < end:
        piece = bytes(await reader.read(offset, min(_COMPARE_BYTES, end - offset)))
        if not piece or not is_there(staged, offset, piece):
            return False
        offset += len(piece)
    return end > staged.base_bytes


def new_reader(mount: Mount, opened: Opened) -> BlobReader:
    """Return a reader of opened content."""
    return BlobReader(mount.driver, mount.offload, mount.read_buffers, opened)


def base_of(stat: ObjectStat) -> Base:
    """Return stored content as what a staged file is written over."""
    return Base(stat.size_bytes, stat.node, stat.blob)


def reader_of(mount: Mount, stat: ObjectStat, content: memoryview) -> BlobReader:
    """Return a reader of content just stored, all of it in memory: it needs neither a place nor a lease."""
    chunk = ChunkId(stat.blob)
    pieces = [Piece(chunk, 0, len(content))] if len(content) else []
    return new_reader(mount, Opened(Name(stat.bucket, stat.key), stat, 0, pieces, {}, {chunk: bytes(content)}))
