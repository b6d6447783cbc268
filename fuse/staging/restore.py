"""Restore: stores a leftover of a killed mount, under its own name or another.

Rules kept here:
- Content that was stored under the name after the file was opened is newer: it is replaced only on request.  So
  the name must still have the content that the file was written over (by its blob), or be free, or be an empty object
  where the file was new.  The commit checks that once more.
- Content that has every written byte at its place, and the same length, is the content that the mount stored, or tried
  to store, when it ended: then there is nothing to do.
- Bytes that were not written are those of the base, or zeros on request; if the base is gone, the restore fails.
- Only written bytes are stored: chunks that are in the store already are kept.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

from fuse.staging.commit import store_staged
from fuse.staging.leftovers import Leftover, reopened
from lakefs.errors import BucketNotFound, KeyNotFound, LakeError, PreconditionFailed
from lakefs.get.objects import close_object, open_object, read_range
from lakefs.get.opened import Opened
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CHUNK_BYTES
from lakefs.names import Name, parse_object_name
from lakefs.steps.steps import Steps
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes, ObjectStat

_OBJECT: Final = 2
_MODE: Final = 0o600
"""Mode of a file whose mode is not known any more: not wider than it was."""


class Standing(StrEnum):
    """The result of restoring a leftover under its own name."""

    READY = "ready"
    """The restore would work."""
    CHANGED = "changed"
    """The name has other content by now."""
    INCOMPLETE = "incomplete"
    """Only parts of it are left, and the content that they were written over is gone."""
    UNNAMED = "unnamed"
    """Its sidecar cannot be read: only the pages that were written are known."""
    IN_USE = "in use"
    """A running mount has it open."""
    UNKNOWN = "unknown"
    """The engine did not answer."""


def standing(leftover: Leftover, found: ObjectStat | LakeError) -> Standing:
    """Return the result to expect, given the store's record of its name.  Does not look for a mount that uses it."""
    if not leftover.name:
        return Standing.UNNAMED
    if isinstance(found, LakeError) and not isinstance(found, KeyNotFound | BucketNotFound):
        return Standing.UNKNOWN
    if _has_base(leftover, found):
        return Standing.READY
    if not leftover.is_complete:
        return Standing.INCOMPLETE
    if isinstance(found, LakeError) or _was_made_for_it(leftover, found):
        return Standing.READY
    return Standing.CHANGED


def restore_to_store(
    lake: LakeSteps, leftover: Leftover, name: Name, *, force: bool = False, zeros: bool = False
) -> Steps[ObjectStat]:
    """Store the leftover under `name`, durably; the leftover stays.

    `force` replaces any content of the name; `zeros` stand for bytes that are lost.  PreconditionFailed if the
    name has other content than the file was written over (or anything, for another name); KeyNotFound for bytes that
    are lost; BucketNotFound for another name (the bucket of its own name is made again); and the errors of
    `store_staged`: then nothing was changed.
    """
    own = parse_object_name(leftover.name) if leftover.name else None
    found = yield from _stat(lake, name)
    if name == own and not force and (yield from _is_stored(lake, leftover, name, found)):
        assert isinstance(found, ObjectStat)
        return found
    condition = NO_CONDITION if force else _condition(leftover, name, found, is_own=name == own)
    base = yield from open_base(lake, leftover, zeros=zeros)
    try:
        if isinstance(found, BucketNotFound):
            if name != own:
                raise found
            yield from lake.create_bucket(name.bucket)
        with reopened(leftover, with_base=base is not None) as staged:
            stored = yield from store_staged(
                lake, staged, base, name, _attributes(leftover, found), keep_node=0, condition=condition, durable=True
            )
            return stored.stat
    finally:
        if base is not None:
            yield from close_object(base)


def open_base(lake: LakeSteps, leftover: Leftover, *, zeros: bool) -> Steps[Opened | None]:
    """Open the content that the file was written over; the caller closes it.  None if none of it is needed.

    KeyNotFound if it is needed and gone; with `zeros` None instead.
    """
    if leftover.base is not None and leftover.base_bytes and leftover.name:
        try:
            opened = yield from open_object(lake.access(None), parse_object_name(leftover.name))
        except (KeyNotFound, BucketNotFound):
            opened = None
        if opened is not None and opened.stat.blob == leftover.base.blob:
            return opened
        if opened is not None:
            yield from close_object(opened)
    if leftover.is_complete or zeros:
        return None
    what = leftover.name or leftover.id
    raise KeyNotFound(
        f"{what}: {leftover.new_bytes} of {leftover.size_bytes} bytes are here, and the content that they were written"
        " over is not in the store any more; to get them with zeros for the rest, give --zeros",
        subject=what,
    )


def _stat(lake: LakeSteps, name: Name) -> Steps[ObjectStat | LakeError]:
    (found,) = yield from lake.stat_many([name])
    if isinstance(found, LakeError) and not isinstance(found, KeyNotFound | BucketNotFound):
        raise found
    return found


def _is_stored(lake: LakeSteps, leftover: Leftover, name: Name, found: ObjectStat | LakeError) -> Steps[bool]:
    """Return True if the name has other content than the file's base, and all written bytes are in it."""
    if isinstance(found, LakeError) or found.size_bytes != leftover.size_bytes or _has_base(leftover, found):
        return False
    access = lake.access(None)
    opened = yield from open_object(access, name)
    try:
        with reopened(leftover, with_base=False) as staged:
            for begin, end in leftover.ranges:
                for at in range(begin, end, CHUNK_BYTES):
                    length = min(CHUNK_BYTES, end - at)
                    if staged.read(at, length) != (yield from read_range(access, opened, at, length)):
                        return False
    finally:
        yield from close_object(opened)
    return True


def _condition(leftover: Leftover, name: Name, found: ObjectStat | LakeError, *, is_own: bool) -> Condition:
    if isinstance(found, LakeError):
        return Condition(absent=True)
    if is_own and (_has_base(leftover, found) or _was_made_for_it(leftover, found)):
        return Condition(etags=[found.etag], node=found.node)
    said = "has other content than the file was written over" if is_own else "exists already"
    raise PreconditionFailed(
        f"{name} {said}; restore it elsewhere with --to, or replace it with --force", subject=str(name)
    )


def _has_base(leftover: Leftover, found: ObjectStat | LakeError) -> bool:
    base = leftover.base
    return isinstance(found, ObjectStat) and base is not None and found.blob == base.blob


def _was_made_for_it(leftover: Leftover, found: ObjectStat) -> bool:
    """Return True for a new file's name that may have been made, empty, before its content was stored."""
    return leftover.base is None and found.kind == _OBJECT and not found.size_bytes


def _attributes(leftover: Leftover, found: ObjectStat | LakeError) -> ObjectAttributes:
    if isinstance(found, LakeError):
        return ObjectAttributes(mode=_MODE, uid=os.geteuid(), gid=os.getegid(), mtime_ns=leftover.time_ns)
    return ObjectAttributes(
        mode=found.mode & 0o7777,
        uid=found.uid,
        gid=found.gid,
        mtime_ns=leftover.time_ns,
        content_type=found.content_type,
        user_metadata=found.user_metadata,
        headers=found.headers,
        xattrs=found.xattrs,
    )
