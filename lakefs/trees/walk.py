"""Trees: the walk over local folders, and the outcomes and comparisons that putting and getting trees share.

A tree operation continues when one file fails: each file ends in one `FileOutcome`, reported to the `Observer` when
it happens, and counted in `Totals`.  Errors that every further file would meet too (`is_fatal`) end the operation.

The walk blocks; operations call `next_batch` as `Work`.  It holds one sorted list of names for each level of the tree
that it is in, and never follows a link back to a folder that contains it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from lakefs.content.verify import matches_id
from lakefs.errors import (
    BucketNotFound,
    ChunkNotFound,
    InvalidArgument,
    InvalidName,
    LakeError,
    LocalFileError,
    OperationalError,
    PermissionDenied,
    SessionLost,
    StaleGrant,
)
from lakefs.get.opened import Opened, Piece
from lakefs.ids import BlobId, ChunkKind, kind_of
from lakefs.limits import CHECK_WINDOW, KEY_BYTES_MAX
from lakefs.put.sources import FileSource
from lakefs.steps.steps import Pipeline, Steps, Work
from lakefs.trees.part_files import is_part
from lakefs.wire.messages import ObjectStat

FRAME_FILES = 256


class Fate(StrEnum):
    """Result for one file."""

    STORED = "stored"
    FETCHED = "fetched"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class FileOutcome:
    """The end of one file.  `notice` gives the reason for skipping it, `error` the failure.

    `is_missing`: it was skipped though it was wanted, so what was made is not the whole.  `is_there`: it was skipped
    because the target exists and was to be left, however it differs.
    """

    path: str
    name: str
    fate: Fate
    size_bytes: int = 0
    new_bytes: int = 0
    notice: str = ""
    error: LakeError | None = None
    is_missing: bool = False
    is_there: bool = False


@dataclass
class Totals:
    """Counts of files by fate; `size_bytes` of the files now in place, `new_bytes` of the bytes moved.

    `missing`: how many of the skipped ones were wanted; `there`: how many were left because they exist.
    """

    files: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    size_bytes: int = 0
    new_bytes: int = 0
    missing: int = 0
    there: int = 0
    first_error: LakeError | None = None

    def count(self, outcome: FileOutcome) -> None:
        """Add one file."""
        self.files[outcome.fate] += 1
        if outcome.fate in (Fate.STORED, Fate.FETCHED, Fate.UNCHANGED):
            self.size_bytes += outcome.size_bytes
            self.new_bytes += outcome.new_bytes
        self.missing += outcome.is_missing
        self.there += outcome.is_there
        self.first_error = self.first_error or outcome.error


def _no_outcome(outcome: FileOutcome) -> None:
    """Do nothing; the observer's default."""


@dataclass(frozen=True)
class Observer:
    """Callbacks: `outcome` once for each file, `progress` with increments (bytes done, of those already present)."""

    outcome: Callable[[FileOutcome], None] = _no_outcome
    progress: Callable[[int, int], None] = lambda done, present: None


def is_fatal(error: LakeError) -> bool:
    """Return True if the files that follow would fail the same way."""
    if isinstance(error, OperationalError):
        return not isinstance(error, (ChunkNotFound, SessionLost, StaleGrant))
    return isinstance(error, BucketNotFound) or (isinstance(error, PermissionDenied) and not error.subject)


@dataclass(frozen=True)
class LocalEntry:
    """One entry of a walk: a regular file, a folder without entries, or one that already has its outcome (`ended`).

    `is_left`: a folder with entries, which came before it.
    """

    path: str
    key: str
    size_bytes: int = 0
    mode: int = 0
    is_folder: bool = False
    is_left: bool = False
    ended: FileOutcome | None = None


@dataclass(frozen=True)
class WalkOptions:
    """`follow`: follow symbolic links, else skip them.  `refused`: (device, inode) of folders that must not be
    read.  `folders`: give folders with entries too, each behind all that is below it."""

    follow: bool = False
    folders: bool = False
    refused: frozenset[tuple[int, int]] = frozenset()


class Walk:
    """Iterates over the files below a folder, or one file alone, with the keys that they get."""

    def __init__(self, root: str, key: str, options: WalkOptions) -> None:
        """Give a folder's entries `key` (empty, or ending in `/`) and their path below it; give a file `key`."""
        self._root = root
        self._options = options
        self._entries = self._from_root(key)

    def next_batch(self, limit: int) -> list[LocalEntry]:
        """Return up to `limit` more entries, names in byte order; none at the end.

        Blocks.  LocalFileError if the root does not exist; InvalidArgument if the walk meets a refused folder.
        """
        batch: list[LocalEntry] = []
        for entry in self._entries:
            batch.append(entry)
            if len(batch) == limit:
                break
        return batch

    def _from_root(self, key: str) -> Iterator[LocalEntry]:
        try:
            found = os.stat(self._root)
        except OSError as error:
            raise LocalFileError(f"{self._root}: {error.strerror}", subject=self._root) from error
        if stat.S_ISDIR(found.st_mode):
            yield from self._below(self._open(self._root, key, found))
        elif stat.S_ISREG(found.st_mode):
            yield LocalEntry(self._root, key, found.st_size, stat.S_IMODE(found.st_mode))
        else:
            yield _skipped(self._root, key, "not a regular file")

    def _below(self, root: _Level | LocalEntry) -> Iterator[LocalEntry]:
        """Yield entries depth first, without recursion: a path may be deeper than the interpreter's stack."""
        if isinstance(root, LocalEntry):
            yield root
            return
        levels = [root]
        while levels:
            name = next(levels[-1].names, None)
            if name is None:
                left = levels.pop()
                if self._options.folders:
                    yield LocalEntry(left.path, left.key, mode=left.mode, is_folder=True, is_left=True)
                continue
            met = self._meet(levels, name)
            if isinstance(met, _Level):
                levels.append(met)
            else:
                yield met

    def _meet(self, levels: list[_Level], name: str) -> _Level | LocalEntry:
        """Return the entry of the innermost folder as an entry of the walk, or as a level to enter."""
        path, key = os.path.join(levels[-1].path, name), levels[-1].key + name
        try:
            key_bytes = len(key.encode())
            found = os.stat(path, follow_symlinks=self._options.follow)
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            return _failed(path, key, InvalidName(f"{shown}: the name is not UTF-8; rename it", subject=shown))
        except OSError as error:
            return _failed(path, key, LocalFileError(f"{path}: {error.strerror}", subject=path))
        if key_bytes > KEY_BYTES_MAX:
            reason = f"{path}: its key would be longer than {KEY_BYTES_MAX} bytes"
            return _failed(path, key, InvalidName(reason, subject=path))
        if is_part(path):
            return _skipped(path, key, "a part of a get that did not end")
        if stat.S_ISREG(found.st_mode):
            return LocalEntry(path, key, found.st_size, stat.S_IMODE(found.st_mode))
        if stat.S_ISLNK(found.st_mode):
            return _skipped(path, key, "a symbolic link; --follow stores what it points to")
        if not stat.S_ISDIR(found.st_mode):
            return _skipped(path, key, "not a regular file")
        if any(level.identity == (found.st_dev, found.st_ino) for level in levels):
            return _skipped(path, key, "a symbolic link back to a folder above it")
        return self._open(path, key + "/", found)

    def _open(self, folder: str, key: str, found: os.stat_result) -> _Level | LocalEntry:
        """Return a level for a folder, or an entry if the folder is empty or cannot be read."""
        identity = (found.st_dev, found.st_ino)
        if identity in self._options.refused:
            raise InvalidArgument(
                f"{folder} is the data folder of the store that is written to; put the folders beside it",
                subject=folder,
            )
        try:
            names = sorted(os.listdir(folder), key=os.fsencode)
        except OSError as error:
            return _failed(folder, key, LocalFileError(f"{folder}: {error.strerror}", subject=folder))
        mode = stat.S_IMODE(found.st_mode)
        if not names:
            return LocalEntry(folder, key, mode=mode, is_folder=True)
        return _Level(folder, key, identity, mode, iter(names))


@dataclass(frozen=True)
class _Level:
    """A folder that the walk is in."""

    path: str
    key: str
    identity: tuple[int, int]
    mode: int
    names: Iterator[str]


def file_holds_blob(source: FileSource, stat_: ObjectStat) -> bool | None:
    """Return True if a file of one chunk is the object; None if its blob has a manifest, so that the layout is
    needed.

    Blocks.  The sizes are equal.
    """
    if not stat_.blob:
        return False
    if kind_of(BlobId(stat_.blob)) is ChunkKind.MANIFEST:
        return None
    return matches_id(stat_.blob, source.read_at(0, source.size_bytes))


def same_content(source: FileSource, opened: Opened) -> Steps[bool]:
    """Return True if a local file has the object's bytes, compared at the object's own cuts until the first
    difference."""
    if source.size_bytes != opened.stat.size_bytes:
        return False
    differing: list[Piece] = []
    pipeline = Pipeline(CHECK_WINDOW)
    for piece in opened.pieces:
        if differing:
            break

        def compared(equal: bool, piece: Piece = piece) -> None:
            if not equal:
                differing.append(piece)

        yield from pipeline.submit(Work(_piece_equal, (source, piece)), compared)
    yield from pipeline.drain()
    return not differing


def _piece_equal(source: FileSource, piece: Piece) -> bool:
    return matches_id(piece.chunk, source.read_at(piece.offset, piece.length))


def _skipped(path: str, key: str, notice: str) -> LocalEntry:
    return LocalEntry(path, key, ended=FileOutcome(path, key, Fate.SKIPPED, notice=notice))


def _failed(path: str, key: str, error: LakeError) -> LocalEntry:
    return LocalEntry(path, key, ended=FileOutcome(path, key, Fate.FAILED, error=error))
