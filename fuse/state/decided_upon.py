"""Conditions of commits: sent with the commit of an open file; and the look at its name after a refusal.

- A file that is not in the store yet: its name is absent, and no folder has it.
- One that was only appended to: the name has the very content that the bytes go behind.
- Any other: the name has its node.  A name that was overwritten has another; then the last close wins, whole, unless
  the node that was opened has another name by now.
- Always: the folder is the one in which the name was opened.

An inode that has lost its name to other content elsewhere is committed under that name all the same.
"""

from __future__ import annotations

from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from fuse.state.stat_fields import OBJECT
from lakefs.errors import BucketNotFound, KeyNotFound, LakeError, PreconditionFailed
from lakefs.wire.messages import Condition, ObjectStat


def upon(inode: Inode, found: ObjectStat | None, opened_node: int, *, is_appended: bool) -> Condition:
    """Return the condition for a commit; `found` is what the name had when it was looked at again, if it was.

    `opened_node`: the node that the file was opened with, 0 for one that this mount made.
    """
    parent, _ = place_of(inode)
    folder = 0 if parent.parent is None else parent.node
    node, blob = (inode.node, inode.attributes.blob) if found is None else (found.node, found.blob)
    if not node:
        return Condition(absent=True, alone=True, folder=folder)
    gone = opened_node if opened_node != node else 0
    return Condition(node=node, folder=folder, blob=blob if is_appended else b"", gone=gone)


async def look_again(mount: Mount, inode: Inode) -> ObjectStat | None:
    """Return the object that the name of a file has now; None if it is free for a file that is not stored yet, or that
    was lost with a killed engine before it was durable.

    PreconditionFailed if the name, or its folder, is another or none: the inode has lost its name then.
    """
    table, (parent, component) = mount.table, place_of(inode)
    if not table.is_below(parent, table.root):
        raise lost_its_name(mount, inode)
    names = [table.child_name(parent, component), table.child_name(parent, component, folder=True)]
    if parent is not table.root:
        names.append(table.name_of(parent))
    found, twin, *folders = await mount.stat(names)
    for answer in (found, twin, *folders):
        if isinstance(answer, LakeError) and not isinstance(answer, (KeyNotFound, BucketNotFound)):
            raise answer
    is_in_place = all(isinstance(folder, ObjectStat) and folder.node == parent.node for folder in folders)
    if is_in_place and isinstance(twin, LakeError):
        if isinstance(found, ObjectStat) and found.kind == OBJECT:
            return found
        is_free = mount.may_have_lost(inode) or (inode.is_pending and inode.parent is not None)
        if isinstance(found, LakeError) and is_free:
            table.stored(inode, 0)
            return None
    raise lost_its_name(mount, inode)


def place_of(inode: Inode) -> tuple[Inode, str]:
    """Return folder and component under which an inode is committed; one that was removed here has none."""
    place = inode.place
    assert place is not None, "it was not removed here"
    return place


def lost_its_name(mount: Mount, inode: Inode) -> PreconditionFailed:
    """Note that an inode has lost its name to a change elsewhere; return the error for what was written to it."""
    if inode.parent is not None:
        mount.table.detach(inode)
    return PreconditionFailed(
        f"{inode.name} was removed or renamed elsewhere; what was written to it stays staged, see: lake staged ls",
        subject=inode.name,
    )
