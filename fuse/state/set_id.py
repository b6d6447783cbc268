"""What a change of content does to a file's set-user-id and set-group-id bits.

The kernel clears most of them itself, by setting a mode; left to the mount are open with O_TRUNC, writes past the page
cache, and the set-group-id bit of a file that its group may not execute.  Decided as the kernel does it for local file
systems: root keeps them, others lose them, but members of the file's group not the latter.
"""

from __future__ import annotations

import stat

from pyfuse3 import RequestContext, get_sup_groups

from fuse.state.inodes import OBJECT, Attributes


def without_set_id(attributes: Attributes, ctx: RequestContext, mode: int | None = None) -> int:
    """The mode of a file, or the one given, after this caller has changed its content; of anything else as it is."""
    mode = attributes.mode if mode is None else mode
    if attributes.kind != OBJECT or ctx.uid == 0 or not mode & (stat.S_ISUID | stat.S_ISGID):
        return mode
    mode &= ~stat.S_ISUID
    if mode & stat.S_ISGID and (mode & stat.S_IXGRP or not _is_member(attributes.gid, ctx)):
        mode &= ~stat.S_ISGID
    return mode


def _is_member(gid: int, ctx: RequestContext) -> bool:
    if gid == ctx.gid:
        return True
    try:
        return gid in get_sup_groups(ctx.pid)
    except OSError:  # the caller is gone, or in another namespace of processes
        return False
