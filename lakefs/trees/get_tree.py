"""Gets trees: many objects, each into its own local file, as steps over `LakeSteps`.

Small objects are fetched together: one `OpenObjects` for up to 256 names, their chunks in one pipeline, each file
written in one call.  A larger object is fetched alone (`lakefs.trees.get_file`).

Rules kept here:
- No key leads out of the target folder.  Keys with `.`, `..`, empty or absolute parts are skipped, one by one; an
  object below a folder that is a symbolic link here has failed, unless `follow` is set.
- A file that fails ends alone; the others continue.  An object that is not fetched has failed, unless the options say
  to leave it.
- One piece of work writes and names the file of a small object, so no half-written file can be left.
"""

from __future__ import annotations

import os
import stat
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lakefs.errors import EngineUnreachable, InvalidName, LakeError, LocalFileError
from lakefs.get.fetch import fetch_pieces
from lakefs.get.objects import close_leases, close_object, open_objects
from lakefs.get.opened import Opened, Piece
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CHUNK_BYTES, FRAME_BYTES, WRITE_FILES_BATCH, WRITE_FILES_WINDOW
from lakefs.names import Name, is_path
from lakefs.put.sources import FileSource
from lakefs.steps.steps import Pipeline, Steps, Work, work
from lakefs.trees.folder_modes import FetchedFolders
from lakefs.trees.get_file import GetOptions, get_opened, kept_newer
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.part_files import restore_attributes, write_whole
from lakefs.trees.walk import Fate, FileOutcome, Observer, Totals, file_holds_blob, is_fatal
from lakefs.wire.messages import ListEntry, ObjectStat

OPEN_BATCH = 256
OPEN_TOGETHER_BYTES = 32 << 20
"""Largest object opened together with others: up to 65 chunks, so 256 layouts of 80 bytes a chunk are 1.3 MiB, well
inside one control part."""
OBJECT_KIND = 2
NO_STAT = ObjectStat("", "", 0, 0, 0, "", 0)


def get_tree(lake: LakeSteps, source: Name, folder: str, options: GetOptions, observer: Observer) -> Steps[Totals]:
    """Write all objects below a folder of the lake to a local folder, created if missing.

    `source.key` is empty or ends in `/`.  KeyNotFound, BucketNotFound.  Any other error raised ends the whole
    operation (`lakefs.trees.walk.is_fatal`); other failures are outcomes.
    """
    assert source.is_folder
    root = (yield from lake.stat(str(source))) if source.key else None
    run = TreeGet(lake, source, folder, options, observer)
    yield from work(run.make_root, root)
    after = ""
    while True:
        page = yield from lake.list_page(str(source), after=after, folders=True)
        for start in range(0, len(page.entries), OPEN_BATCH):
            batch = page.entries[start : start + OPEN_BATCH]
            yield from run.take(batch)
            yield from run.leave_folders(batch[-1].key)
        after = page.next_after
        if not after:
            yield from run.leave_folders("")
            return run.totals


def local_target(folder: str, relative_key: str, *, follow: bool = False) -> LocalTarget:
    """Return the local file for an object of a folder.  InvalidName for keys that no path below the folder can
    express."""
    parts = relative_key.split("/")
    if not all(parts) or not is_path(relative_key):
        raise InvalidName(
            f"{relative_key!r} cannot be a path below {folder}; get it by itself, under another name",
            subject=relative_key,
        )
    return LocalTarget(folder, tuple(parts[:-1]), parts[-1], follow)


@dataclass(frozen=True)
class _Wanted:
    """An object or a folder, and its local target."""

    entry: ListEntry
    target: LocalTarget

    @property
    def path(self) -> str:
        """The path, as outcomes show it."""
        return self.target.path


@dataclass(frozen=True)
class _Surveyed:
    """State of an object's local path: its outcome, or whether its content still has to be compared."""

    wanted: _Wanted
    ended: FileOutcome | None = None
    compare: bool = False


class TreeGet:
    """One tree operation and its counts."""

    def __init__(self, lake: LakeSteps, source: Name, folder: str, options: GetOptions, observer: Observer) -> None:
        self.totals = Totals()
        self._access = lake.access(observer.progress)
        self._source = source
        self._folder = folder
        self._options = options
        self._observer = observer
        self._folders = FetchedFolders()

    def make_root(self, root: ObjectStat | None) -> None:
        """Create the local folder, with the mode of the lake's, unless it exists.  Blocks.  LocalFileError."""
        is_new = not os.path.isdir(self._folder)
        make_local_folder(self._folder)
        if is_new and root is not None:
            target = LocalTarget(self._folder, (), "")
            with target.folder() as descriptor:
                self._folders.note(self._source.key, target, descriptor, root.mode)

    def leave_folders(self, key: str) -> Steps[None]:
        """Give their modes to the folders that a listing at `key` has behind it; "": to all."""
        if key and not self._folders.are_behind(key):
            return
        for folder, path, failure in (yield from work(self._folders.leave, key)):
            notice = f"it has not its mode: {failure.message}"
            name = f"{self._source.bucket}/{folder}"
            self._end(FileOutcome(path, name, Fate.SKIPPED, notice=notice, is_missing=True))

    def take(self, entries: Sequence[ListEntry]) -> Steps[None]:
        """Fetch one batch of a listing."""
        wanted = [one for entry in entries if (one := self._wanted(entry)) is not None]
        surveyed = yield from work(self._survey, wanted)
        missing: list[_Surveyed] = []
        for found in surveyed:
            if found.ended is None:
                missing.append(found)
                continue
            if found.ended.fate is Fate.UNCHANGED:
                self._observer.progress(found.ended.size_bytes, found.ended.size_bytes)
            self._end(found.ended)
        if missing:
            yield from self._fetch(missing)

    def _wanted(self, entry: ListEntry) -> _Wanted | None:
        """Return the object with its target; None if it has failed, or is the source folder itself."""
        relative = entry.key[len(self._source.key) :]
        if not relative:
            return None
        try:
            target = local_target(self._folder, relative.removesuffix("/"), follow=self._options.follow)
        except InvalidName:
            notice = f"no path below {self._folder} can say that name; get it by itself, under another"
            name = self._name(entry)
            self._end(FileOutcome("", name, Fate.SKIPPED, entry.size_bytes, notice=notice, is_missing=True))
            return None
        wanted = _Wanted(entry, target)
        if entry.kind != OBJECT_KIND and not relative.endswith("/"):
            self._fail(wanted, _not_a_file(self._name(entry)))
            return None
        return wanted

    # --- local state (blocks; runs as work) --------------------------------------------------------

    def _survey(self, wanted: Sequence[_Wanted]) -> list[_Surveyed]:
        """Create folders, and find the objects that are present already."""
        found: list[_Surveyed] = []
        for one in wanted:
            try:
                surveyed = self._survey_one(one)
            except LakeError as error:
                surveyed = _Surveyed(one, self._outcome(one, Fate.FAILED, error=error))
            if surveyed is not None:
                found.append(surveyed)
        return found

    def _survey_one(self, one: _Wanted) -> _Surveyed | None:
        if one.entry.key.endswith("/"):
            inner = LocalTarget(one.target.root, (*one.target.below, one.target.name), "", one.target.follow)
            with inner.folder(make=True) as descriptor:
                self._folders.note(one.entry.key, inner, descriptor, one.entry.mode)
            if one.entry.size_bytes:
                raise _content_of_a_folder(self._name(one.entry))
            return None
        with one.target.folder(make=True) as folder:
            try:
                status = os.stat(one.target.name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return _Surveyed(one)
            except OSError as error:
                raise LocalFileError(f"{one.path}: {error.strerror}", subject=one.path) from error
            if not self._options.replace:
                left = self._outcome(one, Fate.SKIPPED, notice="there already")
                return _Surveyed(one, replace(left, is_there=True))
            if stat.S_ISDIR(status.st_mode):
                raise LocalFileError(f"{one.path}: is a folder", subject=one.path)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                raise LocalFileError(f"{one.path}: is not a regular file", subject=one.path)
            return self._compared(one, status, folder)

    def _compared(self, one: _Wanted, status: os.stat_result, folder: int) -> _Surveyed:
        is_file = stat.S_ISREG(status.st_mode)
        is_kept = self._options.keep_newer and is_file and status.st_mtime_ns > one.entry.mtime_ns
        differs = _Surveyed(one, self._kept_newer(one) if is_kept else None)
        if not (self._options.compare and is_file) or status.st_size != one.entry.size_bytes:
            return differs
        if status.st_size > CHUNK_BYTES:
            return _Surveyed(one, compare=True)
        try:
            source = FileSource(one.path, follow_symlinks=False, folder=folder)
        except LocalFileError:
            return differs  # not readable
        try:
            equal = file_holds_blob(source, _stat_of(one.entry))
            if equal:
                restore_attributes(source, one.entry)
                return _Surveyed(one, self._outcome(one, Fate.UNCHANGED))
        finally:
            source.close()
        return _Surveyed(one, compare=True) if equal is None else differs

    # --- fetching ----------------------------------------------------------------------------------

    def _fetch(self, missing: Sequence[_Surveyed]) -> Steps[None]:
        """Fetch objects.  Those of few chunks are opened together; the layouts of many large ones would not fit in
        one answer."""
        few = [found for found in missing if found.wanted.entry.size_bytes <= OPEN_TOGETHER_BYTES]
        names = [self._name_of(found.wanted) for found in few]
        answers = yield from open_objects(self._access, names, inline_bytes=FRAME_BYTES)
        small: list[tuple[_Wanted, Opened]] = []
        try:
            for found, opened in zip(few, answers, strict=True):
                if isinstance(opened, LakeError):
                    self._fail(found.wanted, opened)
                elif len(opened.pieces) <= 1:
                    small.append((found.wanted, opened))
                else:
                    yield from self._fetch_alone(found.wanted, opened, compare=found.compare)
            yield from self._fetch_small([pair for pair in small if not pair[1].inline])
            yield from self._write_inline([pair for pair in small if pair[1].inline])
        finally:
            yield from close_leases([opened.lease for opened in answers if isinstance(opened, Opened)])
        for found in missing:
            if found.wanted.entry.size_bytes > OPEN_TOGETHER_BYTES:
                yield from self._open_and_fetch(found)

    def _open_and_fetch(self, found: _Surveyed) -> Steps[None]:
        (opened,) = yield from open_objects(self._access, [self._name_of(found.wanted)])
        if isinstance(opened, LakeError):
            self._fail(found.wanted, opened)
            return
        try:
            yield from self._fetch_alone(found.wanted, opened, compare=found.compare)
        finally:
            yield from close_object(opened)

    def _write_inline(self, small: Sequence[tuple[_Wanted, Opened]]) -> Steps[None]:
        """Write objects whose bytes arrived with the answer, in a few pieces of work."""
        pipeline = Pipeline(WRITE_FILES_WINDOW)
        for start in range(0, len(small), WRITE_FILES_BATCH):
            batch = small[start : start + WRITE_FILES_BATCH]
            effect = Work(_write_batch, (batch, self._options.replace))
            yield from pipeline.submit(effect, partial(self._written, batch))
        yield from pipeline.drain()

    def _written(self, batch: Sequence[tuple[_Wanted, Opened]], failures: Sequence[LakeError | None]) -> None:
        for (one, opened), failure in zip(batch, failures, strict=True):
            size = opened.stat.size_bytes
            if failure is not None:
                self._fail(one, failure)
            else:
                self._observer.progress(size, 0)
                self._end(self._outcome(one, Fate.FETCHED, size))

    def _fetch_small(self, small: Sequence[tuple[_Wanted, Opened]]) -> Steps[None]:
        """Fetch objects of one chunk each in one pipeline; after a failure, fetch the remaining ones one by one."""
        joined = _JoinedSink([(one.target, opened) for one, opened in small], replace=self._options.replace)
        try:
            yield from fetch_pieces(self._access, joined.opened, joined.opened.pieces, joined)
        except LakeError as error:
            yield from work(joined.stop)
            if isinstance(error, EngineUnreachable):
                raise
        for index, (one, opened) in enumerate(small):
            failure = joined.failures.get(index)
            if failure is not None:
                self._fail(one, failure)
            elif index in joined.written:
                self._end(self._outcome(one, Fate.FETCHED, opened.stat.size_bytes))
            else:
                yield from self._fetch_alone(one, opened, compare=False)

    def _fetch_alone(self, one: _Wanted, opened: Opened, *, compare: bool) -> Steps[None]:
        options = replace(self._options, compare=compare)
        try:
            outcome = yield from get_opened(self._access, opened, one.target, options, self._observer)
        except LakeError as error:
            self._fail(one, error)
            return
        self._end(outcome)

    # --- ends --------------------------------------------------------------------------------------

    def _name_of(self, one: _Wanted) -> Name:
        return Name(self._source.bucket, one.entry.key)

    def _name(self, entry: ListEntry) -> str:
        return f"{self._source.bucket}/{entry.key}"

    def _outcome(
        self, one: _Wanted, fate: Fate, new_bytes: int = 0, *, notice: str = "", error: LakeError | None = None
    ) -> FileOutcome:
        return FileOutcome(one.path, self._name(one.entry), fate, one.entry.size_bytes, new_bytes, notice, error)

    def _kept_newer(self, one: _Wanted) -> FileOutcome:
        return kept_newer(one.path, self._name(one.entry), one.entry.size_bytes)

    def _fail(self, one: _Wanted, error: LakeError) -> None:
        if is_fatal(error):
            raise error
        self._end(self._outcome(one, Fate.FAILED, error=error))

    def _end(self, outcome: FileOutcome) -> None:
        self.totals.count(outcome)
        self._observer.outcome(outcome)


class _JoinedSink:
    """Sink for many objects of at most one chunk, joined into one opened object whose pieces follow each other.

    `written` holds the indexes of objects whose file is complete, `failures` the errors of those that could not be
    written.  An object in neither was not fetched, or has no bytes.
    """

    in_place = True

    def __init__(self, targets: Sequence[tuple[LocalTarget, Opened]], *, replace: bool) -> None:
        self.written: set[int] = set()
        self.failures: dict[int, LakeError] = {}
        self._targets = targets
        self._replace = replace
        self._lock = threading.Lock()
        self._writing: set[int] = set()
        """The threads that write a file now."""
        self._stopped = False
        self._drained = threading.Lock()
        """Held until this is stopped and nobody writes any more.  No Condition: see `lakefs.host.work_threads`."""
        self._drained.acquire()
        self._starts: list[int] = []
        self._indexes: list[int] = []
        self.opened = self._joined()

    def _joined(self) -> Opened:
        joined = Opened(Name("", ""), NO_STAT, 0, [], {}, {})
        offset = 0
        for index, (_, opened) in enumerate(self._targets):
            joined.grants.update(opened.grants)
            joined.inline.update(opened.inline)
            for piece in opened.pieces:
                joined.pieces.append(Piece(piece.chunk, offset, piece.length))
                self._starts.append(offset)
                self._indexes.append(index)
                offset += piece.length
        return joined

    def memory_for(self, piece: Piece) -> memoryview:
        return memoryview(bytearray(piece.length))

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        index = self._indexes[bisect_right(self._starts, piece.offset) - 1]
        target, opened = self._targets[index]
        me = threading.get_ident()
        try:
            with self._lock:
                if self._stopped:
                    return
                self._writing.add(me)
            write_whole(target, payload, opened.stat, replace=self._replace)
            self.written.add(index)
        except LakeError as error:
            self.failures[index] = error
        finally:
            with self._lock:
                self._writing.discard(me)
                self._note_drained()

    def stop(self) -> None:
        """Start no further file, and wait for those being written.  Blocks."""
        with self._lock:
            self._stopped = True
            self._note_drained()
        with self._drained:
            pass

    def _note_drained(self) -> None:
        if self._stopped and not self._writing and self._drained.locked():
            self._drained.release()


def _write_batch(batch: Sequence[tuple[_Wanted, Opened]], replace: bool) -> list[LakeError | None]:
    """Write each object's file; return for each its error or None.  Blocks."""
    failures: list[LakeError | None] = []
    for one, opened in batch:
        try:
            write_whole(one.target, opened.inline[opened.pieces[0].chunk], opened.stat, replace=replace)
            failures.append(None)
        except LakeError as error:
            failures.append(error)
    return failures


def make_local_folder(path: str) -> None:
    """Make a folder and those above it, unless they exist.  Blocks.  LocalFileError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise LocalFileError(f"{path}: {error.strerror}", subject=path) from error


def _not_a_file(name: str) -> LocalFileError:
    reason = "is no regular file in the lake (a symbolic link, perhaps), and get -r fetches only those"
    return LocalFileError(f"{name} {reason}; to have it, mount the lake", subject=name)


def _content_of_a_folder(name: str) -> LocalFileError:
    reason = "is a folder's own key, and has content, which no folder here can have"
    return LocalFileError(f"{name} {reason}; to have that, give: lake get {name} FILE", subject=name)


def _stat_of(entry: ListEntry) -> ObjectStat:
    return ObjectStat("", entry.key, entry.kind, entry.node, entry.size_bytes, entry.etag, entry.mtime_ns, entry.blob)
