"""Movers: copy files and objects from one side to the other, in batches, each file whole or not at all.

Local files travel in the frames of `lakefs.trees.put_tree`, objects to local files in the fetches of
`lakefs.trees.get_tree`; from name to name in one lake no byte moves.

Rules kept here:
- A file that changed while it was read is read once more at the end, and has failed if it changed again.
- A copy has the source's content, mode, modification time, and all other attributes that both sides keep.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from lakefs.content.manifest import kept_etag
from lakefs.errors import LakeError, LocalFileError, SourceChanged
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import COPY_WINDOW
from lakefs.names import Name
from lakefs.put.upload import only_result
from lakefs.steps.steps import Pipeline, Send, Steps, send, work
from lakefs.sync.entries import Entry
from lakefs.sync.report import Done, SyncObserver, SyncOutcome
from lakefs.sync.sides import BucketSide, FolderSide
from lakefs.trees.folder_modes import set_modes
from lakefs.trees.get_file import KEPT_NEWER, GetOptions
from lakefs.trees.get_tree import OPEN_BATCH, TreeGet
from lakefs.trees.part_files import MODE_MASK
from lakefs.trees.put_tree import PutOptions, TreePut
from lakefs.trees.walk import FRAME_FILES, Fate, FileOutcome, LocalEntry, Observer, is_fatal
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Copy, MakeFolder, ObjectAttributes, ObjectStat

READ_AGAIN_MAX: Final = 1000
"""Most files that are kept to be read once more."""
_BELOW_A_FILE: Final = "a part of its path is a file at the target"
"""Values of `ObjectAttributes.etag_kind`."""


class Mover(Protocol):
    """Copies entries of the source; folders among them are made.  Outcomes may be reported later, until `finish`."""

    def take(self, entries: Sequence[Entry]) -> Steps[None]: ...

    def finish(self) -> Steps[None]: ...


class Upload:
    """From a local folder into the lake."""

    def __init__(
        self, lake: LakeSteps, source: FolderSide, target: BucketSide, options: PutOptions, observer: SyncObserver
    ) -> None:
        self._source = source
        self._prefix = target.name.key
        self._observer = observer
        self._again: list[str] = []
        self._is_last_try = False
        shown_bytes = len(str(target.name))
        inner = Observer(lambda outcome: self._ended(outcome, shown_bytes), observer.progress)
        self._put = TreePut(lake, target.name.bucket, options, inner)
        self._folders = LakeFolders(target.name, observer, create_bucket=options.create_bucket)

    def take(self, entries: Sequence[Entry]) -> Steps[None]:
        yield from self._folders.make(entries)
        files = [self._local(entry) for entry in entries if not entry.is_folder]
        for start in range(0, len(files), FRAME_FILES):
            yield from self._put.take(files[start : start + FRAME_FILES])

    def finish(self) -> Steps[None]:
        yield from self._put.pipeline.drain()
        self._is_last_try = True
        again, self._again = self._again, []
        if again:
            yield from self._put.take((yield from work(self._looked_at_again, again)))
            yield from self._put.pipeline.drain()
        yield from self._folders.set_modes()

    def _local(self, entry: Entry) -> LocalEntry:
        key, path = self._prefix + entry.path, self._source.path_of(entry.path)
        return LocalEntry(path, key, entry.size_bytes, entry.mode)

    def _looked_at_again(self, paths: Sequence[str]) -> list[LocalEntry]:
        found: list[LocalEntry] = []
        for path in paths:
            local, key = self._source.path_of(path), self._prefix + path
            try:
                status = os.stat(local)
                found.append(LocalEntry(local, key, status.st_size, stat.S_IMODE(status.st_mode)))
            except OSError as error:
                failure = LocalFileError(f"{local}: {error.strerror}", subject=local)
                found.append(LocalEntry(local, key, ended=FileOutcome(local, key, Fate.FAILED, error=failure)))
        return found

    def _ended(self, outcome: FileOutcome, shown_bytes: int) -> None:
        path = outcome.name[shown_bytes:]
        may_try = not self._is_last_try and len(self._again) < READ_AGAIN_MAX
        if isinstance(outcome.error, SourceChanged) and may_try:
            self._again.append(path)
        else:
            self._observer.outcome(_of_file(outcome, path))


class Download:
    """From the lake into a local folder."""

    def __init__(
        self, lake: LakeSteps, source: BucketSide, target: FolderSide, options: GetOptions, observer: SyncObserver
    ) -> None:
        self._target = target
        self._observer = observer
        shown_bytes = len(str(source.name))
        inner = Observer(
            lambda outcome: observer.outcome(_of_fetched(outcome, outcome.name[shown_bytes:])), observer.progress
        )
        self._get = TreeGet(lake, source.name, target.root, options, inner)
        self._has_root = False

    def take(self, entries: Sequence[Entry]) -> Steps[None]:
        if not self._has_root:
            yield from work(self._make_root)
            self._has_root = True
        for start in range(0, len(entries), OPEN_BATCH):
            batch = entries[start : start + OPEN_BATCH]
            refusals: list[str] = yield from work(self._refusals, batch)
            for entry, refusal in zip(batch, refusals, strict=True):
                if refusal and (entry.is_bare or not entry.is_folder):  # else what is in the folder is reported
                    self._observer.outcome(SyncOutcome(entry.path, Done.SKIPPED, refusal, entry.size_bytes))
            fitting = [entry for entry, refusal in zip(batch, refusals, strict=True) if not refusal]
            listed = [entry.listed for entry in fitting if entry.listed is not None]
            yield from self._get.take(listed)
            if listed:
                yield from self._get.leave_folders(listed[-1].key)

    def finish(self) -> Steps[None]:
        yield from self._get.leave_folders("")

    def _make_root(self) -> None:
        try:
            os.makedirs(self._target.root, exist_ok=True)
        except OSError as error:
            raise LocalFileError(f"{self._target.root}: {error.strerror}", subject=self._target.root) from error

    def _refusals(self, entries: Sequence[Entry]) -> list[str]:
        """Return for each entry the reason why its path is not to be had: something of the other kind has it."""
        files: set[str] = set()
        refusals: list[str] = []
        for entry in entries:
            parts = entry.path.removesuffix("/").split("/")
            above = {"/".join(parts[:count]) for count in range(1, len(parts) + entry.is_folder)}
            refusals.append(_BELOW_A_FILE if above & files else self._refusal(entry))
            if not refusals[-1] and not entry.is_folder:
                files.add(entry.path)
        return refusals

    def _refusal(self, entry: Entry) -> str:
        try:
            found = os.lstat(self._target.path_of(entry.path.removesuffix("/")))
        except NotADirectoryError:
            return _BELOW_A_FILE
        except OSError:
            return ""
        if entry.is_folder:
            return "" if stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode) else "a file at the target"
        return "a folder at the target" if stat.S_ISDIR(found.st_mode) else ""


class NameCopies:
    """From name to name in one lake: no byte moves."""

    def __init__(
        self, lake: LakeSteps, source: BucketSide, target: BucketSide, observer: SyncObserver, *, create_bucket: bool
    ) -> None:
        self._lake = lake
        self._source = source.name
        self._target = target.name
        self._observer = observer
        self._create_bucket = create_bucket
        self._folders = LakeFolders(target.name, observer, create_bucket=create_bucket)
        self._pipeline = Pipeline(COPY_WINDOW)

    def take(self, entries: Sequence[Entry]) -> Steps[None]:
        files = [entry for entry in entries if not entry.is_folder]
        for start in range(0, len(files), FRAME_FILES):
            batch = files[start : start + FRAME_FILES]
            names = [Name(self._source.bucket, self._source.key + entry.path) for entry in batch]
            stats = yield from self._lake.stat_many(names)
            for entry, name, found in zip(batch, names, stats, strict=True):
                if isinstance(found, LakeError):
                    self._observer.outcome(failed(entry.path, found))
                    continue
                request = Copy(
                    *name,
                    self._target.bucket,
                    self._target.key + entry.path,
                    attributes=attributes_of(found),
                    create_bucket=self._create_bucket,
                )
                yield from self._pipeline.submit(Send(request), self._done(entry, found.blob), self._failed(entry))
        yield from self._folders.make(entries)

    def finish(self) -> Steps[None]:
        yield from self._pipeline.drain()
        yield from self._folders.set_modes()

    def _done(self, entry: Entry, blob: bytes) -> Callable[[Reply], None]:
        def done(reply: Reply) -> None:
            try:
                if only_result(reply).blob != blob:  # then the attributes are those of the object before it
                    raise SourceChanged(f"{self._source}{entry.path} changed while it was copied")
            except LakeError as error:
                self._observer.outcome(failed(entry.path, error))
                return
            self._observer.progress(entry.size_bytes, entry.size_bytes)
            self._observer.outcome(SyncOutcome(entry.path, Done.COPIED, size_bytes=entry.size_bytes))

        return done

    def _failed(self, entry: Entry) -> Callable[[Exception], None]:
        def on_error(error: Exception) -> None:
            if not isinstance(error, LakeError):
                raise error
            self._observer.outcome(failed(entry.path, error))

        return on_error


class LakeFolders:
    """Folders of a target in the lake: empty ones are made at once, and modes set when all files are there.

    Memory: FRAME_FILES folders; before there are more, the modes of these are set.
    """

    def __init__(self, target: Name, observer: SyncObserver, *, create_bucket: bool) -> None:
        self._target = target
        self._observer = observer
        self._create_bucket = create_bucket
        self._modes: list[tuple[str, int]] = []

    def make(self, entries: Sequence[Entry]) -> Steps[None]:
        """Make the empty folders among entries, and note the modes of all; one that fails is an outcome."""
        for entry in entries:
            if not entry.is_folder:
                continue
            if len(self._modes) == FRAME_FILES:
                yield from self.set_modes()
            self._modes.append((entry.path, entry.mode & MODE_MASK))
            if entry.is_bare:
                request = MakeFolder(self._target.bucket, self._key(entry.path), create_bucket=self._create_bucket)
                try:
                    yield from send(request)
                except LakeError as error:
                    self._observer.outcome(failed(entry.path, error))

    def set_modes(self) -> Steps[None]:
        """Set the modes that were noted; a folder that is gone, or has no file yet, is left out."""
        modes, self._modes = self._modes, []
        failures = yield from set_modes(self._target.bucket, [(self._key(path), mode) for path, mode in modes])
        for (path, _), failure in zip(modes, failures, strict=True):
            if failure is not None:
                self._observer.outcome(failed(path, failure))

    def _key(self, path: str) -> str:
        return self._target.key + path


def failed(path: str, error: LakeError) -> SyncOutcome:
    """Return the outcome of a name that failed; raise an error that the other names would meet too."""
    if is_fatal(error):
        raise error
    return SyncOutcome(path, Done.FAILED, error.message, error=error)


def attributes_of(found: ObjectStat) -> ObjectAttributes:
    """Return the attributes with which a copy of an object is as the object is shown."""
    kind, etag = kept_etag(found.etag, found.blob, found.chunk_count)
    return ObjectAttributes(
        mode=found.mode,
        uid=found.uid,
        gid=found.gid,
        mtime_ns=found.mtime_ns,
        content_type=found.content_type,
        user_metadata=found.user_metadata,
        headers=found.headers,
        etag_kind=kind,
        etag=etag,
        checksums=found.checksums,
        xattrs=found.xattrs,
        atime_ns=found.atime_ns,
        tags=found.tags,
    )


def _of_fetched(outcome: FileOutcome, path: str) -> SyncOutcome:
    """Return the outcome of a fetched file; of one that was left because it is newer, in the words of a sync."""
    if outcome.notice == KEPT_NEWER:
        return SyncOutcome(path, Done.SKIPPED, "newer at the target", outcome.size_bytes)
    return _of_file(outcome, path)


def _of_file(outcome: FileOutcome, path: str) -> SyncOutcome:
    done = Done.COPIED
    if outcome.fate in (Fate.FAILED, Fate.SKIPPED):
        done = Done(outcome.fate.value)
    reason = outcome.error.message if outcome.error is not None else outcome.notice
    return SyncOutcome(path, done, reason, outcome.size_bytes, outcome.new_bytes, outcome.error)
