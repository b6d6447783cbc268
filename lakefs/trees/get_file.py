"""Gets one object: into a local file, complete or absent, or as a stream.

A file is written through a `PartFile`, which keeps the chunks that an earlier, killed get wrote.

Rules kept here:
- With `compare`, a local file that already has the object's bytes (size first, then content at the object's cuts) is
  not fetched; it gets the object's mode and time.
- With `keep_newer`, a local file that differs and has a later time is left alone: an edit is not lost.
- A target has its old content or the new one, whole.  The part is removed if its get fails, but kept if the engine
  was lost: the next get continues from it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lakefs.errors import AlreadyExists, EngineUnreachable, LocalFileError
from lakefs.get.fetch import fetch_pieces
from lakefs.get.objects import close_object, open_object, read_range
from lakefs.get.opened import Access, Opened, Piece
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CHECK_WINDOW, STREAM_BYTES
from lakefs.names import Name
from lakefs.put.sources import FileSource
from lakefs.steps.steps import Pipeline, Start, Steps, Ticket, Wait, Work, work
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.part_files import PartFile, restore_attributes
from lakefs.trees.walk import Fate, FileOutcome, Observer, same_content
from lakefs.wire.messages import ObjectStat

KEPT_NEWER: Final = "changed here after the object was, and different; --force replaces it"


@dataclass(frozen=True)
class GetOptions:
    """`compare`: leave files that are already equal; `replace`: overwrite files that exist.

    `keep_newer`: leave a file that differs and was changed after the object; it is skipped, though wanted.
    `follow`: for trees, folders below the target folder may be symbolic links; else an object below one fails.
    """

    compare: bool = True
    replace: bool = True
    follow: bool = False
    keep_newer: bool = False


def get_to_file(
    lake: LakeSteps, name: Name, target: str, options: GetOptions, observer: Observer, version: str = ""
) -> Steps[FileOutcome]:
    """Write one object, or a version of it, to a local file, complete or absent.  A symbolic link is replaced.

    KeyNotFound, VersionNotFound, IsAFolder, ChunkDamaged, AlreadyExists (without `replace`), LocalFileError.
    """
    access = lake.access(observer.progress)
    opened = yield from open_object(access, name, version=version)
    try:
        return (yield from get_opened(access, opened, LocalTarget.at(target), options, observer))
    finally:
        yield from close_object(opened)


def replace_file(lake: LakeSteps, name: Name, target: str, observer: Observer) -> Steps[ObjectStat]:
    """Write one object to a local file as `get_to_file` does, whatever the file holds; return the object's stat."""
    access = lake.access(observer.progress)
    opened = yield from open_object(access, name)
    try:
        yield from get_opened(access, opened, LocalTarget.at(target), GetOptions(compare=False), observer)
        return opened.stat
    finally:
        yield from close_object(opened)


def stream_range(
    access: Access, opened: Opened, offset: int, length: int, write: Callable[[bytes], None]
) -> Steps[int]:
    """Pass a range to `write` (called as work, in order), fetching ahead; return the number of bytes.

    Each step ends where a chunk ends, so that whole chunks are checked by their ids.
    """
    end = min(offset + length, opened.stat.size_bytes)
    position = offset
    writing: Ticket | None = None
    while position < end:
        step_end = _step_end(opened, position, end)
        payload = yield from read_range(access, opened, position, step_end - position)
        if writing is not None:
            yield Wait(writing)
        writing = yield Start(Work(write, (payload,)))
        position = step_end
    if writing is not None:
        yield Wait(writing)
    return max(0, end - offset)


def get_opened(
    access: Access, opened: Opened, target: LocalTarget, options: GetOptions, observer: Observer
) -> Steps[FileOutcome]:
    """Write one opened object through a part file; like `get_to_file`."""
    size = opened.stat.size_bytes
    if options.compare and (yield from _is_unchanged(opened, target)):
        observer.progress(size, size)
        return FileOutcome(target.path, str(opened.name), Fate.UNCHANGED, size)
    if options.keep_newer and (yield from work(_is_newer, target, opened.stat.mtime_ns)):
        return kept_newer(target.path, str(opened.name), size)
    if not options.replace and (yield from work(target.exists)):
        raise AlreadyExists(f"{target.path} exists already", subject=target.path)
    part = PartFile(target)
    try:
        yield from work(part.open)
        missing = yield from _missing_pieces(part, opened, observer)
        yield from work(part.set_length, size)
        yield from fetch_pieces(access, opened, missing, part)
        yield from work(_finish, part, opened.stat, options)
    except EngineUnreachable:
        part.keep()
        raise
    except BaseException:
        part.discard()
        raise
    new_bytes = sum(piece.length for piece in missing)
    return FileOutcome(target.path, str(opened.name), Fate.FETCHED, size, new_bytes)


def kept_newer(path: str, name: str, size_bytes: int) -> FileOutcome:
    """Return the outcome of an object that would have replaced a file with later changes."""
    return FileOutcome(path, name, Fate.SKIPPED, size_bytes, notice=KEPT_NEWER, is_missing=True)


def _is_newer(target: LocalTarget, mtime_ns: int) -> bool:
    """Return True if the target is a file, no link, that was changed after that time.  Blocks."""
    with target.folder() as folder:
        try:
            found = os.stat(target.name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
    return stat.S_ISREG(found.st_mode) and found.st_mtime_ns > mtime_ns


def _finish(part: PartFile, stat_: ObjectStat, options: GetOptions) -> None:
    part.finish(stat_, replace=options.replace)


def _is_unchanged(opened: Opened, target: LocalTarget) -> Steps[bool]:
    """Return True if the target has the object's bytes; then also set its mode and time."""
    try:
        source: FileSource = yield from work(target.open_file)
    except LocalFileError:
        return False
    try:
        equal = yield from same_content(source, opened)
        if equal:
            yield from work(restore_attributes, source, opened.stat)
    finally:
        source.close()
    return equal


def _missing_pieces(part: PartFile, opened: Opened, observer: Observer) -> Steps[list[Piece]]:
    """Return the pieces that an earlier part does not hold."""
    if not part.found_bytes:
        return opened.pieces
    missing: list[Piece] = []
    pipeline = Pipeline(CHECK_WINDOW)
    for piece in opened.pieces:

        def checked(held: bool, piece: Piece = piece) -> None:
            if held:
                observer.progress(piece.length, piece.length)
            else:
                missing.append(piece)

        yield from pipeline.submit(Work(part.holds, (piece,)), checked)
    yield from pipeline.drain()
    return missing


def _step_end(opened: Opened, position: int, end: int) -> int:
    """Return the end of the step from `position`: a chunk's end, or `end`."""
    covered = opened.overlapping(position, min(STREAM_BYTES, end - position))
    last = covered[-1]
    boundary = last.offset + last.length
    if boundary > position + STREAM_BYTES and len(covered) > 1:
        boundary = last.offset
    return min(boundary, end)
