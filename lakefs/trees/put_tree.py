"""Puts trees: many local files, each under its own name, as steps over `LakeSteps`.

Small files travel together: one piece of work reads a frame of at most 4 MiB and 256 files, and one `PutObjects`
stores it; a few frames are in flight.  A file of more than one chunk is put alone; over a Unix socket the engine
reads it.

Rules kept here:
- A file that changed while it was read is not stored; the others continue.
- With `compare`, a file whose content and mode are already stored under its name is left alone: sizes are compared
  first, then the bytes, at the stored object's own cuts.  Times decide nothing.
- A folder has the mode of the local one, if the walk gives folders (`lakefs.trees.folder_modes`).
- A small file is cut as `put` would cut it: one that has more than one chunk (a safetensors file) is put alone.
- Memory: twice `jobs` frames, each of 4 MiB, or of 8 MiB if its files grew since the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from lakefs.content.chunking import plan_file
from lakefs.errors import BucketNotFound, KeyNotFound, LakeError, UserError
from lakefs.get.objects import close_object, open_object
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CHUNK_BYTES, FRAME_BYTES, FRAMES_PER_JOB
from lakefs.names import Name
from lakefs.put.objects import put
from lakefs.put.remote import put_remotely
from lakefs.put.sources import FileSource
from lakefs.put.upload import PutResult, result_of
from lakefs.steps.steps import Pipeline, Send, Steps, Work, send, work
from lakefs.trees.folder_modes import sent_mode, set_modes
from lakefs.trees.walk import (
    FRAME_FILES,
    Fate,
    FileOutcome,
    LocalEntry,
    Observer,
    Totals,
    Walk,
    file_holds_blob,
    is_fatal,
    same_content,
)
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    Condition,
    MakeFolder,
    NameChange,
    NameResult,
    NameResults,
    ObjectAttributes,
    ObjectStat,
    PutObjects,
    StatNames,
)

T = TypeVar("T")


@dataclass(frozen=True)
class PutOptions:
    """`compare`: leave alone what is already stored; `jobs`: frames of small files in flight.

    `create_bucket`: create the bucket, if it is missing, with the first file that is stored.  `follow`: a file may be a
    symbolic link; without it, one that became a link since the walk saw it has failed.
    """

    compare: bool = True
    if_absent: bool = False
    create_bucket: bool = False
    content_type: str = ""
    follow: bool = True
    jobs: int = 4


def put_tree(
    lake: LakeSteps, walks: Iterable[Walk], bucket: str, options: PutOptions, observer: Observer
) -> Steps[Totals]:
    """Store all files of the walks in a bucket, under the walks' keys.  Each file is durable when its outcome is
    reported.

    Raises only errors that end everything: the engine is gone or full, the bucket is missing and not to be created,
    or a root does not exist.  Files stored until then stay.
    """
    run = TreePut(lake, bucket, options, observer)
    for walk in walks:
        while batch := (yield from work(walk.next_batch, FRAME_FILES)):
            yield from run.take(batch)
    yield from run.end_folders()
    return run.totals


@dataclass(frozen=True)
class _Read:
    """A small file as read: its payload, or its fate or error instead."""

    entry: LocalEntry
    payload: memoryview | None = None
    attributes: ObjectAttributes | None = None
    fate: Fate | None = None
    error: LakeError | None = None


class TreePut:
    """One tree operation: its pipeline of frames, and its counts."""

    def __init__(self, lake: LakeSteps, bucket: str, options: PutOptions, observer: Observer) -> None:
        self.pipeline = Pipeline(FRAMES_PER_JOB * options.jobs)
        self.totals = Totals()
        self._lake = lake
        self._bucket = bucket
        self._options = options
        self._observer = observer
        self._condition = Condition(absent=options.if_absent)
        self._modes: list[tuple[LocalEntry, int]] = []
        """Folders that get a mode, once their files are stored."""

    def take(self, batch: Sequence[LocalEntry]) -> Steps[None]:
        """Handle a batch of the walk; frames may still be in flight on return."""
        files: list[LocalEntry] = []
        folders: list[LocalEntry] = []
        for entry in batch:
            if entry.ended is not None:
                self._end(replace(entry.ended, name=f"{self._bucket}/{entry.key}"))
            elif not entry.is_folder:
                files.append(entry)
            elif entry.key:  # the root of a bucket has its own mode
                folders.append(entry)
        found = (yield from self._found([*files, *folders])) if self._options.compare else {}
        stored = {entry.key: found[entry.key] for entry in files if self._may_be(found.get(entry.key), entry)}
        for entry in folders:
            yield from self._take_folder(entry, found.get(entry.key))
        for frame in _frames(entry for entry in files if entry.size_bytes <= CHUNK_BYTES):
            yield from self.pipeline.submit(Work(self._read_frame, (frame, stored)), self._send_frame)
        for entry in files:
            if entry.size_bytes > CHUNK_BYTES:
                yield from self._put_alone(entry, stored.get(entry.key))

    # --- stored state ------------------------------------------------------------------------------

    def _found(self, entries: Sequence[LocalEntry]) -> Steps[dict[str, ObjectStat]]:
        """Return stats of the keys that exist."""
        if not entries:
            return {}
        reply = yield from send(StatNames([(self._bucket, entry.key) for entry in entries]))
        assert isinstance(reply.message, NameResults)
        results = zip(entries, reply.message.results, strict=True)
        return {entry.key: item.stat for entry, item in results if item.stat is not None}

    def _may_be(self, stat: ObjectStat | None, entry: LocalEntry) -> bool:
        """Return True for an object of the file's size and mode, and of the requested content type."""
        if stat is None:
            return False
        wanted_type = self._options.content_type or stat.content_type
        found = (stat.size_bytes, stat.mode, stat.content_type)
        return found == (entry.size_bytes, entry.mode, wanted_type)

    def _is_stored(self, entry: LocalEntry, stat: ObjectStat) -> Steps[bool]:
        """Return True if the object has the file's bytes."""
        name = Name(self._bucket, entry.key)
        source = yield from work(FileSource, entry.path)
        try:
            opened = yield from open_object(self._lake.access(None), name)
            try:
                return (yield from same_content(source, opened))
            finally:
                yield from close_object(opened)
        except KeyNotFound:
            return False
        finally:
            source.close()

    # --- small files -------------------------------------------------------------------------------

    def _read_frame(self, frame: Sequence[LocalEntry], stored: dict[str, ObjectStat]) -> list[_Read]:
        """Read a frame's files.  Blocks.  A file that grew and no longer fits is left to be put alone."""
        reads: list[_Read] = []
        room = 2 * FRAME_BYTES
        for entry in frame:
            read = self._read_file(entry, stored.get(entry.key), room)
            room -= len(read.payload) if read.payload is not None else 0
            reads.append(read)
        return reads

    def _read_file(self, entry: LocalEntry, stat: ObjectStat | None, room: int) -> _Read:
        try:
            source = FileSource(entry.path, follow_symlinks=self._options.follow)
            try:
                if source.size_bytes > min(room, CHUNK_BYTES):
                    return _Read(entry)
                if stat is not None and stat.size_bytes == source.size_bytes:
                    equal = file_holds_blob(source, stat)
                    if equal is None:
                        return _Read(entry)
                    if equal:
                        return _Read(entry, fate=Fate.UNCHANGED)
                payload = source.read_at(0, source.size_bytes)
                source.verify_unchanged()
                if _has_cuts(payload):
                    return _Read(entry)
                attributes = self._attributes(source)
            finally:
                source.close()
        except LakeError as error:
            return _Read(entry, error=error)
        return _Read(entry, payload, attributes)

    def _attributes(self, source: FileSource) -> ObjectAttributes:
        return ObjectAttributes(mode=source.mode, mtime_ns=source.mtime_ns, content_type=self._options.content_type)

    def _send_frame(self, reads: list[_Read]) -> Steps[None]:
        """Handle a frame that was read: settle the files that need no sending, send the rest."""
        ready: list[_Read] = []
        for read in reads:
            if read.payload is not None:
                ready.append(read)
            elif read.error is not None:
                self._fail(read.entry, read.error)
            elif read.fate is Fate.UNCHANGED:
                self._unchanged(read.entry)
            else:
                yield from self._put_alone(read.entry, None)
        # The frame may have grown to two frames' worth, if files grew between the walk and the read.
        for part in _frames_of_reads(ready):
            try:
                fabric = self._lake.transfer(None).fabric
                reply = yield from put_remotely(fabric, _payloads(part), partial(self._changes, part))
            except LakeError as error:
                yield from self._frame_failed(part)(error)
                continue
            if reply is not None:
                self._frame_stored(part)(reply)
                continue
            yield from self.pipeline.submit(self._put_request(part), self._frame_stored(part), self._frame_failed(part))

    def _put_request(self, reads: Sequence[_Read]) -> Send:
        payloads = _payloads(reads)
        return Send(PutObjects([len(payload) for payload in payloads], self._changes(reads)), body=payloads)

    def _changes(self, reads: Sequence[_Read]) -> list[NameChange]:
        return [self._change(read.entry, read.attributes or ObjectAttributes()) for read in reads]

    def _change(self, entry: LocalEntry, attributes: ObjectAttributes) -> NameChange:
        return NameChange(
            self._bucket, entry.key, b"", attributes, self._condition, create_bucket=self._options.create_bucket
        )

    def _frame_stored(self, reads: Sequence[_Read]) -> Callable[[Reply], None]:
        def done(reply: Reply) -> None:
            assert isinstance(reply.message, NameResults)
            for read, item in zip(reads, reply.message.results, strict=True):
                self._stored_or_failed(read, item)

        return done

    def _frame_failed(self, reads: Sequence[_Read]) -> Callable[[Exception], Steps[None]]:
        """Return a handler that retries a refused request file by file, so that one bad name fails alone."""

        def failed(error: Exception) -> Steps[None]:
            if not isinstance(error, UserError) or len(reads) == 1:
                if not isinstance(error, LakeError):
                    raise error
                for read in reads:
                    self._fail(read.entry, error)
                return
            for read in reads:
                yield from self.pipeline.submit(
                    self._put_request([read]), self._frame_stored([read]), self._frame_failed([read])
                )

        return failed

    def _stored_or_failed(self, read: _Read, item: NameResult) -> None:
        assert read.payload is not None
        try:
            result_of(item)
        except LakeError as error:
            self._fail(read.entry, error)
            return
        size = len(read.payload)
        new_bytes = size if item.fresh else 0
        self._observer.progress(size, size - new_bytes)
        self._end(self._outcome(read.entry, Fate.STORED, size, new_bytes))

    # --- large files and folders -------------------------------------------------------------------

    def _put_file(self, change: NameChange, path: str) -> Steps[PutResult]:
        if self._options.follow:
            return (yield from self._lake.put_file(change, Path(path), self._observer.progress))
        source: FileSource = yield from work(partial(FileSource, path, follow_symlinks=False))
        try:
            attributes = msgspec.structs.replace(change.attributes, mode=source.mode, mtime_ns=source.mtime_ns)
            changed = msgspec.structs.replace(change, attributes=attributes)
            return (yield from put(self._lake.transfer(self._observer.progress), changed, source))
        finally:
            source.close()

    def _put_alone(self, entry: LocalEntry, stat: ObjectStat | None) -> Steps[None]:
        try:
            if self._options.compare and (yield from self._already_stored(entry, stat)):
                self._unchanged(entry)
                return
            change = self._change(entry, ObjectAttributes(content_type=self._options.content_type))
            result = yield from self._put_file(change, entry.path)
        except LakeError as error:
            self._fail(entry, error)
            return
        self._end(self._outcome(entry, Fate.STORED, result.size_bytes, result.new_bytes))

    def _already_stored(self, entry: LocalEntry, stat: ObjectStat | None) -> Steps[bool]:
        if stat is None and entry.size_bytes <= CHUNK_BYTES:
            stat = (yield from self._found([entry])).get(entry.key)
        return stat is not None and self._may_be(stat, entry) and (yield from self._is_stored(entry, stat))

    def _take_folder(self, entry: LocalEntry, stat: ObjectStat | None) -> Steps[None]:
        """Store an empty folder as a folder; one with entries exists by them, and its mode follows them."""
        if not entry.is_left:
            try:
                yield from send(MakeFolder(self._bucket, entry.key, create_bucket=self._options.create_bucket))
            except LakeError as error:
                self._fail(entry, error)
                return
        mode = sent_mode(entry.mode, stat)
        if mode is not None:
            self._modes.append((entry, mode))
        if len(self._modes) >= FRAME_FILES:
            yield from self.end_folders()

    def end_folders(self) -> Steps[None]:
        """Set the modes of the folders that were left, once their files are stored."""
        yield from self.pipeline.drain()
        modes, self._modes = self._modes, []
        failures = yield from set_modes(self._bucket, [(entry.key, mode) for entry, mode in modes])
        for (entry, _), failure in zip(modes, failures, strict=True):
            if failure is not None:
                self._fail(entry, failure)

    # --- ends --------------------------------------------------------------------------------------

    def _outcome(self, entry: LocalEntry, fate: Fate, size_bytes: int, new_bytes: int) -> FileOutcome:
        return FileOutcome(entry.path, f"{self._bucket}/{entry.key}", fate, size_bytes, new_bytes)

    def _unchanged(self, entry: LocalEntry) -> None:
        self._observer.progress(entry.size_bytes, entry.size_bytes)
        self._end(self._outcome(entry, Fate.UNCHANGED, entry.size_bytes, 0))

    def _fail(self, entry: LocalEntry, error: LakeError) -> None:
        """Record a failed file; raise an error that the other files would meet too."""
        if is_fatal(error) or (isinstance(error, BucketNotFound) and not self._options.create_bucket):
            raise error
        name = f"{self._bucket}/{entry.key}"
        self._end(FileOutcome(entry.path, name, Fate.FAILED, entry.size_bytes, error=error))

    def _end(self, outcome: FileOutcome) -> None:
        self.totals.count(outcome)
        self._observer.outcome(outcome)


def _has_cuts(payload: memoryview) -> bool:
    """Return True if a payload of at most one chunk would be cut, as a safetensors file is."""
    plan = plan_file(lambda offset, length: bytes(payload[offset : offset + length]), len(payload))
    return len(list(islice(plan.lengths(), 2))) > 1


def _frames(entries: Iterable[LocalEntry]) -> Iterator[list[LocalEntry]]:
    """Yield runs of entries that fill a frame."""
    return _filled(entries, lambda entry: entry.size_bytes)


def _payloads(reads: Sequence[_Read]) -> list[memoryview]:
    return [read.payload for read in reads if read.payload is not None]


def _frames_of_reads(reads: Iterable[_Read]) -> Iterator[list[_Read]]:
    return _filled(reads, lambda read: len(read.payload or b""))


def _filled(things: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of at most FRAME_BYTES and FRAME_FILES; a larger thing forms a run alone."""
    run: list[T] = []
    size = 0
    for thing in things:
        if run and (size + size_of(thing) > FRAME_BYTES or len(run) == FRAME_FILES):
            yield run
            run, size = [], 0
        run.append(thing)
        size += size_of(thing)
    if run:
        yield run
