"""What the commit of an open file is decided upon: the condition that goes with it, and the look behind a refusal.

- A file that is not in the store yet: its name is absent, and no folder has it.
- One that was only appended to: the name has the very content that the bytes go behind.
- Any other: the name has its node.  A name that was overwritten has another; then the last close wins, whole, unless
  the node that was opened has another name by now.
- Always: the folder is the one in which the name was opened.
"""

from __future__ import annotations

from fuse.state.inodes import OBJECT, Inode
from fuse.state.mount import Mount
from lakefs.errors import BucketNotFound, KeyNotFound, LakeError, PreconditionFailed
from lakefs.wire.messages import Condition, ObjectStat


def upon(inode: Inode, found: ObjectStat | None, opened_node: int, *, is_appended: bool) -> Condition:
    """Return the condition for a commit; `found` is what the name had when it was looked at again, if it was.

    `opened_node`: the node that the file was opened with, 0 for one that this mount made.
    """
    assert inode.parent is not None, "it has a name"
    folder = 0 if inode.parent.parent is None else inode.parent.node
    node, blob = (inode.node, inode.attributes.blob) if found is None else (found.node, found.blob)
    if not node:
        return Condition(absent=True, alone=True, folder=folder)
    gone = opened_node if opened_node != node else 0
    return Condition(node=node, folder=folder, blob=blob if is_appended else b"", gone=gone)


async def look_again(mount: Mount, inode: Inode) -> ObjectStat | None:
    """Return the object that the name of a file has now; None if it is still free for a file that is not stored yet.

    PreconditionFailed if the name, or its folder, is another or none: the inode has lost its name then.
    """
    table, parent = mount.table, inode.parent
    assert parent is not None, "it has a name"
    names = [table.name_of(inode), table.child_name(parent, inode.name, folder=True)]
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
        if inode.is_pending and isinstance(found, LakeError):
            return None
    raise lost_its_name(mount, inode)


def lost_its_name(mount: Mount, inode: Inode) -> PreconditionFailed:
    """Note that an inode has lost its name to a change elsewhere; return the error for what was written to it."""
    if inode.parent is not None:
        mount.table.detach(inode)
    return PreconditionFailed(
        f"{inode.name} was removed or renamed elsewhere; what was written to it stays staged, see: lake staged ls",
        subject=inode.name,
    )
