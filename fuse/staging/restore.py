"""Putting what a killed mount left back into the store, under its own name or another.

Rules kept here:
- Content that came under the name after the file was opened is newer: it is replaced only when that is asked for.  So
  the name must still have the content that the file was written over (by its blob), or be free, or an empty object
  where the file was new.  The commit checks it once more.
- Content that has every written byte where it was written, and the same length, is what the mount stored, or tried to
  store, when it ended: then there is nothing to do.
- Bytes that were not written are those of that content, or zeros when that is asked for; else they are missed.
- Only what was written is stored: what is in the store already is kept where it is.
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
"""Of a file whose mode nobody knows any more: not wider than it was."""


class Standing(StrEnum):
    """What restoring a leftover under its own name would do."""

    READY = "ready"
    """It works."""
    CHANGED = "changed"
    """The name has other content by now."""
    INCOMPLETE = "incomplete"
    """Only parts of it are here, and what they were written over is gone."""
    UNNAMED = "unnamed"
    """Its sidecar cannot be read: only which pages were written is known."""
    IN_USE = "in use"
    """A running mount has it open."""
    UNKNOWN = "unknown"
    """The engine did not answer."""


def standing(leftover: Leftover, found: ObjectStat | LakeError) -> Standing:
    """How it stands, given what the store has under its name.  Of one in use nothing is known here."""
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

    `force` replaces whatever is there; `zeros` stand for bytes that are nowhere any more.  PreconditionFailed when the
    name has other content than the file was written over (or anything, for another name); KeyNotFound for bytes that
    are missed; BucketNotFound for another name (the bucket of its own is made again); and what `store_staged` raises:
    then nothing was changed.
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
                lake,
                staged,
                base,
                name,
                _attributes(leftover, found),
                keep_node=0,
                condition=condition,
                durable=True,
            )
            return stored.stat
    finally:
        if base is not None:
            yield from close_object(base)


def open_base(lake: LakeSteps, leftover: Leftover, *, zeros: bool) -> Steps[Opened | None]:
    """The content that the file was written over, to be closed; None when none of it is needed.

    KeyNotFound when it is needed and gone; with `zeros` that is None, too.
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
    """Whether the name has other content than the file's base, and all that was written is in it."""
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
    said = "has other content than the file was written over" if is_own else "is there already"
    raise PreconditionFailed(
        f"{name} {said}; restore it elsewhere with --to, or replace what is there with --force",
        subject=str(name),
    )


def _has_base(leftover: Leftover, found: ObjectStat | LakeError) -> bool:
    base = leftover.base
    return isinstance(found, ObjectStat) and base is not None and found.blob == base.blob


def _was_made_for_it(leftover: Leftover, found: ObjectStat) -> bool:
    """A new file's name may have been made, empty, before its content was stored."""
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
