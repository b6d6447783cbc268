"""The inode table: the inodes that the kernel knows, and the place of each in the tree.

An inode is a node of the store as this mount has seen it: folder, file or symlink.  Its place is (parent inode,
component), so a folder's rename moves all that is below it at once; its key is put together when it is needed.

Rules kept here:
- Only this mount changes the content of an inode.  When a name is found bound to another node, or the node to
  other content, the old inode loses its name (open handles keep its content), and a new inode takes the name.
- A file that was created here and is not stored yet (`node` 0), or that is being written here, owns its name here,
  whatever object the store has: its commit decides.
- An inode is known while the kernel has looked it up, or it is open, or a reading of its folder will list it,
  or an inode below it is known.

Pure state: no I/O, no trio, no pyfuse3.  An inode's number is that of its node, where that number is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fuse.state.open_content import OpenContent
from fuse.state.shown_numbers import ShownNumber, ShownNumbers
from fuse.state.stat_fields import FOLDER, OBJECT, Attributes
from lakefs.errors import KeyNotFound
from lakefs.names import Name

ROOT: Final = 1
EXPIRED: Final = -1e9
"""A time before all others: nothing confirmed then is fresh."""


@dataclass(slots=True, eq=False)
class Inode:
    """One node as this mount knows it."""

    number: int
    node: int
    parent: Inode | None
    name: str
    """The component; meaningless once `parent` is None, except for the root."""
    attributes: Attributes
    lookups: int = 0
    """Number of look-ups by the kernel, and one for each reading of a folder that will list it."""
    is_removed: bool = False
    """True once this mount has removed or replaced its name."""
    confirmed_at: float = 0.0
    """Time of the last request whose answer confirmed it, or of the last change by this mount; on trio's clock, as
    are the next."""
    seen_boot: bytes = b""
    """The engine's run that last answered that the store has its node under its name."""
    found_at: float = EXPIRED
    """Time of the last request whose answer found it under its name, whatever was noticed since."""
    changed_at: float = -1.0
    """Time of this mount's last change of it: answers to earlier requests do not count."""
    busy: int = 0
    """Number of this mount's changes of its name or attributes that are not answered yet."""
    changed_below_ns: int = 0
    """Time of this mount's last change of a name in this folder, on the wall clock."""
    names_changed_at: float = -1.0
    """Time when names in this folder were last seen to change elsewhere: earlier answers about them are out of date."""
    cached_blob: bytes | None = None
    """The content that the kernel's page cache may hold."""
    file: OpenContent | None = None
    asked: int = 0
    """Number of the kernel's requests for its attributes that are under way."""
    is_doubted: bool = False
    """True if the answer to the last of those may be out of date: the kernel has to ask again."""
    borrowers: int = 0
    """Number of handles of it that show another inode's file (`fuse.names.opening`)."""
    children: dict[str, Inode] = field(default_factory=dict)
    target: bytes = b""
    is_set: bool = False
    """True if mode, owner or times were set here while the file was being written: the next commit stores them."""
    shown: ShownNumber | None = None
    """`st_ino`, if that may not be the number: that of all inodes of the node."""
    named_ns: int = 0
    """Time when the name of a file that is not in the store yet was made in its folder."""
    lost_place: tuple[Inode, str] | None = None
    """Folder and component of a name that was lost to a change elsewhere."""
    xattrs: dict[str, bytes] | None = None
    """None: not known; else as fresh as the attributes."""
    readings: int = 0
    """Number of handles by which a folder is being read."""
    stored_ns: int = 0
    """A folder's change time in the store, as last answered.  Each change of a name in it moves that."""
    names_ns: int = 0
    """A folder's change time as of which `children` has all its names; 0: one may be missing."""
    kept: tuple[bytes, int] | None = None
    """Stamps of the last answer about it, and their connection (`fuse.state.kept`); None: it has to be confirmed."""

    def take(self, found: Attributes) -> bool:
        """Show the store's attributes; a folder keeps the times of later changes in it by this mount.

        Returns True if others were shown: the kernel may still have those.
        """
        self.stored_ns = found.ctime_ns
        if self.names_ns != found.ctime_ns:
            self.names_ns = 0
        if self.changed_below_ns > found.ctime_ns:
            found.mtime_ns = found.ctime_ns = self.changed_below_ns
        before, self.attributes = self.attributes, found
        return before != found

    def doubt_names(self) -> None:
        """Note that a name in this folder may be missing in `children`."""
        self.names_ns = 0

    @property
    def place(self) -> tuple[Inode, str] | None:
        """Folder and component of its name, or of the one it had before a change elsewhere; None if there is none."""
        return self.lost_place if self.parent is None else (self.parent, self.name)

    @property
    def st_ino(self) -> int:
        """The number that `stat` shows: the same for every content that the node has had."""
        return self.number if self.shown is None else self.shown.number

    @property
    def is_folder(self) -> bool:
        """True if names can be below it."""
        return self.attributes.kind == FOLDER

    def is_newer_than(self, asked_at: float) -> bool:
        """True if the answer to a request of `asked_at` may be older than a change by this mount."""
        return self.busy > 0 or self.changed_at >= asked_at

    def is_ahead_of(self, asked_at: float) -> bool:
        """True if it was changed by this mount, or confirmed by the answer to a later request, since `asked_at`."""
        return self.is_newer_than(asked_at) or self.confirmed_at > asked_at

    def confirm(self, asked_at: float) -> None:
        """Note that the store, asked at this time, has found it under its name."""
        self.confirmed_at = self.found_at = asked_at

    @property
    def is_dirty(self) -> bool:
        """True for a file that is open here and has something that the store does not have."""
        return self.file is not None and self.file.is_dirty

    @property
    def is_pending(self) -> bool:
        """True for a file that was created here and is not in the store yet."""
        return self.node == 0


class InodeTable:
    """All known inodes.  `bucket`: the root is that bucket's folder instead of the list of buckets."""

    def __init__(self, root: Attributes, bucket: str = "") -> None:
        self.bucket = bucket
        self.root = Inode(ROOT, ROOT, None, "", root, lookups=1)
        self._by_number: dict[int, Inode] = {ROOT: self.root}
        self._by_node: dict[int, Inode] = {}
        self._shown = ShownNumbers()
        self.on_lost: Callable[[Inode, str, int], None] = lambda parent, name, removed: None
        """Called with folder and name that an inode has lost and the kernel may still know, and the number of the inode
        if it was removed, 0 if it was replaced or moved."""
        self.on_changed: Callable[[Inode], None] = lambda inode: None
        """Called with an inode that shows other attributes, found elsewhere, than the kernel may know."""

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Inode]:
        return iter(list(self._by_number.values()))

    def of(self, number: int) -> Inode:
        """Return the inode with a number that the kernel was given."""
        return self._by_number[number]

    def by_node(self, node: int) -> Inode | None:
        """Return the inode that has the node's current name and content."""
        return self._by_node.get(node)

    # --- names in the store --------------------------------------------------------------------------

    def name_of(self, inode: Inode) -> Name:
        """Return bucket and key; a folder's key ends in `/`, a bucket's is empty.  KeyNotFound if it has no name."""
        parts: list[str] = []
        at = inode
        while at.parent is not None:
            parts.append(at.name)
            at = at.parent
        if at is not self.root:
            raise KeyNotFound(f"{inode.name!r} was removed or replaced", subject=inode.name)
        if self.bucket:
            parts.append(self.bucket)
        if not parts:
            raise KeyNotFound("the list of buckets has no name")
        parts.reverse()
        key = "/".join(parts[1:])
        return Name(parts[0], f"{key}/" if key and inode.is_folder else key)

    def has_name(self, inode: Inode) -> bool:
        """Return True if the inode has a name in the store: it and all folders above it."""
        return inode is not self.root and self.is_below(inode, self.root)

    def child_name(self, parent: Inode, name: str, *, folder: bool = False) -> Name:
        """Return the store's name of a child of a folder."""
        suffix = "/" if folder else ""
        if parent is self.root and not self.bucket:
            return Name(name, "")
        bucket, key = self.name_of(parent)
        return Name(bucket, f"{key}{name}{suffix}")

    def holds_buckets(self, inode: Inode) -> bool:
        """Return True if this folder is the list of buckets."""
        return inode is self.root and not self.bucket

    def is_below(self, inode: Inode, folder: Inode) -> bool:
        """Return True if `inode` is `folder` or somewhere in it."""
        at: Inode | None = inode
        while at is not None and at is not folder:
            at = at.parent
        return at is folder

    # --- changes -------------------------------------------------------------------------------------

    def adopt(self, parent: Inode, name: str, node: int, found: Attributes, asked_at: float) -> Inode:
        """Return the inode for a name that the store bound to `node` when asked; another inode loses the name.

        A file of this mount that is not stored yet keeps its name, and one that is being written its attributes.
        """
        present = parent.children.get(name)
        if present is not None and (present.is_pending or present.is_ahead_of(asked_at)):
            return present
        if present is not None and present.is_dirty and found.kind == OBJECT:
            return present  # the commit decides what becomes of the name
        inode = self._by_node.get(node)
        if inode is not None and inode.is_ahead_of(asked_at):
            return inode
        # A folder found in itself, or below, was moved elsewhere: the path to `parent` is out of date.
        if inode is not None and (not _is_shown_by(inode, found) or self.is_below(parent, inode)):
            self.detach(inode)
            present, inode = None if present is inode else present, None
        if inode is None:
            number = self._shown.own() if node in self._by_number else node
            inode = Inode(number, node, None, name, found, stored_ns=found.ctime_ns)
            self._show(inode)
            self._by_number[inode.number] = inode
            self._by_node[node] = inode
        if present is not None and present is not inode:
            self.detach(present)
        if not inode.is_dirty:
            if inode.take(found) and inode.lookups > 0:
                self.on_changed(inode)
            inode.xattrs = inode.kept = None
        if inode.parent is not parent or inode.name != name:
            if inode.parent is not None:
                inode.parent.doubt_names()
                inode.parent.names_changed_at = max(inode.parent.names_changed_at, asked_at)
                self.on_lost(inode.parent, inode.name, 0)
                _doubt_names_from(inode)  # earlier events of names below this one found no inode to doubt
            self._place(inode, parent, name)
        inode.confirm(asked_at)
        if parent.names_changed_at > asked_at:  # names changed elsewhere since: it is asked again when it is next used
            inode.confirmed_at = EXPIRED
        return inode

    def create(self, parent: Inode, name: str, attributes: Attributes) -> Inode:
        """Add a new file that is not in the store yet."""
        inode = Inode(self._shown.own(), 0, None, name, attributes)
        self._by_number[inode.number] = inode
        present = parent.children.get(name)
        if present is not None:
            self.remove(present)
        self._place(inode, parent, name)
        return inode

    def stored(self, inode: Inode, node: int, *, is_found: bool = False) -> None:
        """Note that the inode's content is now in the store, as this node's; 0: that it is not there any more.

        It takes its number along, unless the node was found: that is another file, with a number of its own.
        """
        if inode.node and self._by_node.get(inode.node) is inode:
            del self._by_node[inode.node]
        if inode.node != node and is_found:
            self._shown.give(inode, node, self._known_as(inode, node) or ShownNumber(self._shown.own()))
        elif inode.node != node:
            self._shown.end(inode.node, inode.shown)
            self._shown.give(inode, node, ShownNumber(inode.st_ino))
        if node and inode.parent is not None:
            self._by_node[node] = inode

    def move(self, inode: Inode, parent: Inode, name: str) -> Inode | None:
        """Move the inode to another place; return the inode that it replaced, which has no name now."""
        replaced = parent.children.get(name)
        if replaced is inode:
            return None
        if replaced is not None:
            self.remove(replaced)
        if inode is not parent and self.is_below(parent, inode):  # only if out of date: the store refuses such a move
            self.detach(self._child_on_path(parent, inode))
        self._place(inode, parent, name)
        _doubt_names_from(inode)  # it may have been listed by a name that it no longer had
        if inode.node:
            self._by_node[inode.node] = inode
        return replaced

    def exchange(self, first: tuple[Inode, str, Inode], second: tuple[Inode, str, Inode]) -> None:
        """Exchange the places of two inodes; each is given with the folder and name that it had."""
        (source, old, one), (target, new, other) = first, second
        for inode, parent, name in ((one, target, new), (other, source, old)):
            present = parent.children.get(name)
            if present is not None and present not in (one, other):
                self.detach(present)
            if inode is not parent and self.is_below(parent, inode):  # only if out of date, as in `move`
                self.detach(self._child_on_path(parent, inode))
        self._unlink(one)
        self._unlink(other)
        for inode, parent, name in ((one, target, new), (other, source, old)):
            self._place(inode, parent, name)
            _doubt_names_from(inode)
            if inode.node:
                self._by_node[inode.node] = inode

    def retake(self, inode: Inode) -> None:
        """Give a file that was just stored the name again that it had lost to other content elsewhere.

        Not while another file is being written here under that name.
        """
        if inode.parent is not None or inode.lost_place is None:
            return
        parent, name = inode.lost_place
        present = parent.children.get(name)
        if (present is not None and (present.is_pending or present.is_dirty)) or not self.is_below(parent, self.root):
            return
        if present is not None:
            self.detach(present)
        self._place(inode, parent, name)
        self._by_node[inode.node] = inode

    def take_over(self, inode: Inode, other: Inode) -> None:
        """Give name, node and attributes of another file to one that nobody has open and no page is cached of."""
        parent, name, node = other.parent, other.name, other.node
        assert parent is not None, "the other one has a name"
        assert inode.file is None, "nobody reads what it had"
        assert inode.cached_blob is None, "nor has the kernel pages of that"
        self.detach(other)
        self._unlink(inode)
        if self._by_node.get(inode.node) is inode:
            del self._by_node[inode.node]
        self._shown.give(inode, node, ShownNumber(other.number) if other.shown is None else other.shown)
        inode.is_removed = False
        inode.attributes, inode.target, inode.xattrs = other.attributes, other.target, other.xattrs
        inode.kept, inode.confirmed_at, inode.found_at = other.kept, other.confirmed_at, other.found_at
        self._by_node[node] = inode
        self._place(inode, parent, name)

    def remove(self, inode: Inode) -> None:
        """Remove the name, by this mount's own change; open handles keep the content."""
        inode.is_removed = True
        self._unlink(inode)
        self._forget_node(inode)

    def detach(self, inode: Inode, *, is_removed: bool = False) -> None:
        """Remove a name that was removed elsewhere, or bound to another node.  Open handles keep the content."""
        if inode.parent is not None:
            inode.parent.doubt_names()
            self.on_lost(inode.parent, inode.name, inode.number if is_removed else 0)
            inode.lost_place = inode.parent, inode.name
        self._unlink(inode)
        self._forget_node(inode)

    def _forget_node(self, inode: Inode) -> None:
        if self._by_node.get(inode.node) is inode:
            del self._by_node[inode.node]
        self._drop_if_unknown(inode)

    def forget(self, number: int, count: int) -> None:
        """Subtract `count` look-ups that the kernel gives back."""
        inode = self._by_number.get(number)
        if inode is not None:
            self.release(inode, count)

    def release(self, inode: Inode, count: int = 1) -> None:
        """Like `forget`, for look-ups that were counted on this side."""
        inode.lookups -= count
        self._drop_if_unknown(inode)

    def closed(self, inode: Inode, file: OpenContent) -> None:
        """Note that no handle of this file of the inode is open.  Another may have been opened since: that stays."""
        if inode.file is file:
            inode.file = None
        self._drop_if_unknown(inode)

    def _drop_if_unknown(self, inode: Inode) -> None:
        while inode is not self.root and inode.lookups <= 0 and inode.file is None and not inode.children:
            parent = inode.parent
            if parent is not None:
                parent.doubt_names()
            self._unlink(inode)
            if self._by_number.get(inode.number) is inode:  # another may have the number since
                del self._by_number[inode.number]
            self._shown.leave(inode.node, inode.shown, inode)
            if self._by_node.get(inode.node) is inode:
                del self._by_node[inode.node]
            if parent is None:
                return
            inode = parent

    def _child_on_path(self, inode: Inode, folder: Inode) -> Inode:
        """Return the child of `folder` on the path to `inode`, which is below it."""
        at = inode
        while at.parent is not None and at.parent is not folder:
            at = at.parent
        return at

    def _place(self, inode: Inode, parent: Inode, name: str) -> None:
        self._unlink(inode)
        inode.parent, inode.name, inode.lost_place = parent, name, None
        parent.children[name] = inode

    def _unlink(self, inode: Inode) -> None:
        parent = inode.parent
        if parent is not None and parent.children.get(inode.name) is inode:
            del parent.children[inode.name]
        inode.parent = None

    def _show(self, inode: Inode) -> None:
        """Let a new inode show the number by which its node is known, with this or other content."""
        if inode.number != inode.node or self._shown.of(inode.node) is not None:
            self._shown.give(inode, inode.node, self._known_as(inode, inode.node) or ShownNumber(inode.number))

    def _known_as(self, inode: Inode, node: int) -> ShownNumber | None:
        """Return the number of a node that this inode shows; None if another file has the node's own."""
        holder = self._by_number.get(node, inode)
        is_own = node != ROOT and (holder is inode or holder.node == node)
        return self._shown.of(node) or (ShownNumber(node) if is_own else None)


def _doubt_names_from(inode: Inode) -> None:
    """Note that a name may be missing in the known folders at an inode and below it."""
    below = [inode] if inode.is_folder else []
    while below:
        folder = below.pop()
        folder.doubt_names()
        below += [child for child in folder.children.values() if child.is_folder]


def _is_shown_by(inode: Inode, found: Attributes) -> bool:
    """Return True if this inode can show the store's record: same content, or content that is being written here."""
    if inode.attributes.kind != found.kind:
        return False
    return found.kind != OBJECT or inode.attributes.blob == found.blob or inode.is_dirty
