"""The set-user-id and set-group-id bits of a file whose content changes.

The kernel clears most of them itself, by setting a mode.  It leaves three cases to the mount: open with O_TRUNC, writes
past the page cache, and the set-group-id bit of a file that its group may not execute.  The rule is the kernel's for
local file systems: root keeps both bits; other users lose both, but a member of the file's group keeps set-group-id
on a file that the group may not execute.
"""

from __future__ import annotations

import stat

from pyfuse3 import RequestContext, get_sup_groups

from fuse.state.inodes import OBJECT, Attributes


def without_set_id(attributes: Attributes, ctx: RequestContext, mode: int | None = None) -> int:
    """Return the mode (the file's, or the one given) after this caller changed the content; unchanged if not a file."""
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
    except OSError:  # the caller has ended, or is in another namespace of processes
        return False
