"""Getting one object: into a local file, complete or absent, or handed on as a stream.

A file is written through a `PartFile`, in which the chunks that an earlier, killed get had written are kept.

Rules kept here:
- With `compare`, a local file that has the object's bytes already (size first, then content at the object's cuts)
  is not fetched; it gets the object's mode and time.
- A target has its old content or the new one, whole.  A part is removed when its get fails, but kept when the
  engine was lost: the next get goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class GetOptions:
    """`compare`: leave alone what is already there; `replace`: overwrite files that exist.

    `follow`: of a tree, folders below the target's may be symbolic links; else what is below one fails.
    """

    compare: bool = True
    replace: bool = True
    follow: bool = False


def get_to_file(
    lake: LakeSteps, name: Name, target: str, options: GetOptions, observer: Observer
) -> Steps[FileOutcome]:
    """One object into a local file, complete or absent.  A symbolic link that has the target's name is replaced.

    KeyNotFound, IsAFolder, ChunkDamaged, AlreadyExists (without `replace`), LocalFileError.
    """
    access = lake.access(observer.progress)
    opened = yield from open_object(access, name)
    try:
        return (yield from get_opened(access, opened, LocalTarget.at(target), options, observer))
    finally:
        yield from close_object(opened)


def replace_file(lake: LakeSteps, name: Name, target: str, observer: Observer) -> Steps[ObjectStat]:
    """As `get_to_file`, whatever the target holds; what the object was."""
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
    """Hand a range to `write` (called as work, in order), fetching ahead; the number of bytes.

    Steps end where chunks end, so that whole chunks are checked by their ids.
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
    """One opened object through a part file; as `get_to_file`."""
    size = opened.stat.size_bytes
    if options.compare and (yield from _is_there(opened, target)):
        observer.progress(size, size)
        return FileOutcome(target.path, str(opened.name), Fate.UNCHANGED, size)
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


def _finish(part: PartFile, stat_: ObjectStat, options: GetOptions) -> None:
    part.finish(stat_, replace=options.replace)


def _is_there(opened: Opened, target: LocalTarget) -> Steps[bool]:
    """Whether the target has the object's bytes; then its mode and time are set."""
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
    """Pieces that an earlier part does not hold."""
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
    """Where the step from `position` ends: at a chunk's end, or at `end`."""
    covered = opened.overlapping(position, min(STREAM_BYTES, end - position))
    last = covered[-1]
    boundary = last.offset + last.length
    if boundary > position + STREAM_BYTES and len(covered) > 1:
        boundary = last.offset
    return min(boundary, end)
