"""Compares contents: a local file with an object, by the hashes of the object's chunks; two objects by their ids."""

from __future__ import annotations

from lakefs.errors import KeyNotFound
from lakefs.get.objects import close_object, open_object
from lakefs.names import Name
from lakefs.put.sources import FileSource
from lakefs.steps.steps import Steps, work
from lakefs.sync.entries import Entry, Pair
from lakefs.sync.sides import BucketSide, FolderSide, Side
from lakefs.trees.walk import file_holds_blob, same_content
from lakefs.wire.messages import ObjectStat


def is_same_content(source: Side, target: Side, pair: Pair) -> Steps[bool]:
    """Return True if both entries, which have the same size, have the same bytes.

    Two objects are the same if their ids are; content that was cut in another way has another id.  LocalFileError.
    """
    assert pair.source is not None
    assert pair.target is not None
    if isinstance(source, FolderSide) and isinstance(target, BucketSide):
        return (yield from _file_is(source.path_of(pair.path), target, pair.target))
    if isinstance(target, FolderSide) and isinstance(source, BucketSide):
        return (yield from _file_is(target.path_of(pair.path), source, pair.source))
    return pair.source.blob == pair.target.blob


def _file_is(local: str, side: BucketSide, entry: Entry) -> Steps[bool]:
    name = Name(side.name.bucket, side.name.key + entry.path)
    source: FileSource = yield from work(FileSource, local)
    try:
        if source.size_bytes != entry.size_bytes:
            return False
        stat = ObjectStat(name.bucket, name.key, 2, entry.node, entry.size_bytes, "", entry.mtime_ns, entry.blob)
        equal: bool | None = yield from work(file_holds_blob, source, stat)
        if equal is None:
            equal = yield from side.asked(_same_as_opened(source, side, name))
        return equal
    finally:
        source.close()


def _same_as_opened(source: FileSource, side: BucketSide, name: Name) -> Steps[bool]:
    try:
        opened = yield from open_object(side.steps.access(None), name)
    except KeyNotFound:
        return False
    try:
        return (yield from same_content(source, opened))
    finally:
        yield from close_object(opened)
