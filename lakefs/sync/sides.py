"""The sides of a sync, listed page by page: a local folder, a bucket or a prefix of it here or at another engine.

Rules kept here:
- A listing has the order of `lakefs.sync.entries`.
- What a listing could not read is in it, as an entry that is not whole.  An engine that cannot list raises.
- Folders that the rules leave out are not read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, Protocol, TypeVar

from lakefs.errors import BucketNotFound, InvalidArgument, KeyNotFound, LocalFileError
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import S3_KEY_BYTES_MAX
from lakefs.names import Name, is_path
from lakefs.steps.steps import Steps, work
from lakefs.sync.entries import Entry
from lakefs.sync.filters import Rules
from lakefs.trees.part_files import NAME_BYTES_MAX, is_part
from lakefs.wire.messages import SPECIAL_KINDS, ListEntry

T = TypeVar("T")
PAGE: Final = 1000
_OBJECT: Final = 2
_NO_RULES: Final = Rules()


class Runner(Protocol):
    """A client of another engine: runs steps to their end, and blocks until then."""

    @property
    def steps(self) -> LakeSteps: ...

    def run(self, steps: Steps[T], /) -> T: ...


class Side(Protocol):
    """One side: `next_page` returns more entries, and None at the end; `is_in_place` says after that whether the folder
    that was listed still has its name."""

    @property
    def shown(self) -> str: ...

    def next_page(self) -> Steps[list[Entry] | None]: ...

    def is_in_place(self) -> Steps[bool]: ...


@dataclass
class FolderSide:
    """A local folder.  LocalFileError if it cannot be read; a file in it that cannot be is an entry.

    `may_miss`: a folder that does not exist is an empty one.
    `prefix_bytes`: length of the keys' beginning at the other side.  `refused`: (device, inode) of folders that must
    not be read.  `mounts`: devices of mounts of a lake; one below the folder is left out, because it may show what the
    sync writes.
    """

    root: str
    rules: Rules = _NO_RULES
    follow: bool = False
    prefix_bytes: int = 0
    refused: frozenset[tuple[int, int]] = frozenset()
    may_miss: bool = False
    mounts: frozenset[int] = frozenset()
    _entries: Iterator[Entry] | None = field(default=None, init=False)
    _root: _Level | None = field(default=None, init=False)

    @property
    def shown(self) -> str:
        return self.root

    def path_of(self, path: str) -> str:
        """Return the local path of an entry's path."""
        return os.path.join(self.root, path)

    def next_page(self) -> Steps[list[Entry] | None]:
        return (yield from work(self.read_page))

    def is_in_place(self) -> Steps[bool]:
        return self._root is None or (yield from work(self._has_its_path, self._root))

    def read_page(self) -> list[Entry] | None:
        """Return more entries, and None at the end.  Blocks.  LocalFileError, InvalidArgument."""
        if self._entries is None:
            self._entries = self._walk()
        return list(islice(self._entries, PAGE)) or None

    def _walk(self) -> Iterator[Entry]:
        try:
            root = _Level("", self._identity(self.root), self._names("", self.root))
        except FileNotFoundError as error:
            if self.may_miss and not os.path.lexists(self.root):
                return
            raise LocalFileError(f"{self.root}: {error.strerror}", subject=self.root) from error
        except NotADirectoryError as error:
            reason = "is no folder, and a sync takes folders; for one file there are lake put and lake get"
            raise LocalFileError(f"{self.root} {reason}", subject=self.root) from error
        except OSError as error:
            raise LocalFileError(f"{self.root}: {error.strerror}", subject=self.root) from error
        self._root = root
        levels = [root]
        while levels:
            met = next(levels[-1].names, None)
            if met is None:
                levels.pop()
                continue
            path, kind = met
            if kind is not None:
                yield from self._entry(path, kind, levels[-1])
                continue
            if self.rules.leaves_out(path):
                continue
            level, entry = self._enter(path, levels)
            if level is not None:
                levels.append(level)
            if entry is not None:
                yield entry

    def _names(self, path: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str] | None]]:
        """Return what is in a folder, in the order of the paths: files and others with their entries, folders
        without.

        A symbolic link that is not followed stands there twice: also as the folder that it may point to.
        """
        found: list[tuple[str, os.DirEntry[str] | None]] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir(follow_symlinks=self.follow)
                except OSError:
                    is_folder = False
                if is_folder:
                    found.append((f"{path}{entry.name}/", None))
                    continue
                found.append((path + entry.name, entry))
                if entry.is_symlink():
                    found.append((f"{path}{entry.name}/", entry))
        found.sort(key=_path_of)
        return iter(found)

    def _identity(self, folder: str) -> tuple[int, int]:
        found = os.stat(folder)
        identity = (found.st_dev, found.st_ino)
        if identity in self.refused:
            raise InvalidArgument(
                f"{folder} is the data folder of a store, which cannot be in a side of its own sync", subject=folder
            )
        return identity

    def _enter(self, path: str, levels: list[_Level]) -> tuple[_Level | None, Entry | None]:
        folder = self.path_of(path)
        refusal = self._bad_name(path)
        if refusal:
            return None, Entry(_shown(path), refusal=refusal, is_bare=True)
        try:
            identity = self._identity(folder)
            if any(level.identity == identity for level in levels):
                return None, Entry(path, refusal="a symbolic link back to a folder above it", is_bare=True)
            if identity[0] in self.mounts:
                return None, Entry(path, refusal="a mount of a lake", is_bare=True)
            names = self._names(path, folder)
            first = next(names, None)
            status = os.stat(folder)
        except OSError as error:
            return None, Entry(path.removesuffix("/"), refusal=error.strerror or "cannot be read", is_whole=False)
        entry = Entry(path, mode=stat.S_IMODE(status.st_mode), mtime_ns=status.st_mtime_ns, is_bare=first is None)
        return _Level(path, identity, chain((first,), names) if first is not None else iter(())), entry

    def _entry(self, path: str, found: os.DirEntry[str], level: _Level) -> Iterator[Entry]:
        if path.endswith("/"):
            yield Entry(path, refusal="a symbolic link")
            return
        refusal = self._bad_name(path)
        shown = _shown(path)
        if not self.rules.takes(shown):
            return
        if refusal:
            yield Entry(shown, refusal=refusal)
            return
        try:
            status = found.stat(follow_symlinks=self.follow)
        except FileNotFoundError:
            if found.is_symlink():
                yield Entry(path, refusal="a symbolic link to nothing")
            elif not self._has_its_path(level):
                yield Entry(path, refusal="its folder is gone, or is another one", is_whole=False)
            return  # else it was removed since the folder was read
        except OSError as error:
            yield Entry(path, refusal=error.strerror or "cannot be read", is_whole=False)
            return
        if stat.S_ISLNK(status.st_mode):
            yield Entry(path, refusal="a symbolic link; --follow takes what it points to")
        elif not stat.S_ISREG(status.st_mode):
            yield Entry(path, refusal="not a regular file")
        elif not is_part(self.path_of(path)):
            yield Entry(path, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode))

    def _has_its_path(self, level: _Level) -> bool:
        """Return True if a folder still has the path under which it was read: a disk may have been unplugged."""
        try:
            found = os.stat(self.path_of(level.path))
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == level.identity

    def _bad_name(self, path: str) -> str:
        """Return the reason why a lake cannot have a name; "" if it can."""
        try:
            key_bytes = len(path.encode()) + self.prefix_bytes
        except UnicodeEncodeError:
            return "the name is not UTF-8"
        return f"its key would be longer than {S3_KEY_BYTES_MAX} bytes" if key_bytes > S3_KEY_BYTES_MAX else ""


@dataclass(frozen=True)
class _Level:
    """A folder that the walk is in."""

    path: str
    identity: tuple[int, int]
    names: Iterator[tuple[str, os.DirEntry[str] | None]]


def _shown(path: str) -> str:
    """Return a path as text that can be encoded, whatever bytes its names have."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _path_of(found: tuple[str, os.DirEntry[str] | None]) -> str:
    return found[0]


@dataclass
class BucketSide:
    """A bucket, or a folder of it (`name.key` ends in `/`).  BucketNotFound and KeyNotFound unless `may_miss`.

    `to_folder`: the other side is a local folder, which cannot have each key.  `runner`: the client of the engine that
    has it; None: the one that runs the steps.
    """

    steps: LakeSteps
    name: Name
    rules: Rules = _NO_RULES
    to_folder: bool = False
    may_miss: bool = False
    runner: Runner | None = None
    _after: str | None = field(default=None, init=False)
    _has_ended: bool = field(default=False, init=False)
    _waiting: list[ListEntry] = field(default_factory=list, init=False)
    _node: int | None = field(default=None, init=False)

    @property
    def shown(self) -> str:
        return str(self.name)

    def asked(self, steps: Steps[T]) -> Steps[T]:
        """Run steps at the engine that has this side."""
        if self.runner is None:
            return (yield from steps)
        result: T = yield from work(self.runner.run, steps)
        return result

    def next_page(self) -> Steps[list[Entry] | None]:
        if self._has_ended:
            return None
        if self._after is None:
            self._after = ""
            if not (yield from self._exists()):
                self._has_ended = True
                return None
        page = yield from self.asked(self.steps.list_page(str(self.name), after=self._after, limit=PAGE, folders=True))
        self._after, self._has_ended = page.next_after, not page.next_after
        # A folder is empty if the next entry is not in it, so the last entry of a page waits for the next page.
        entries = [*self._waiting, *page.entries]
        self._waiting = [] if self._has_ended else entries[-1:]
        following = [*(entry.key for entry in entries[1:]), ""]
        found = [
            entry
            for listed, key in zip(entries[: len(entries) - len(self._waiting)], following, strict=False)
            if (entry := self._entry(listed, is_empty=not key.startswith(listed.key))) is not None
        ]
        return found

    def _exists(self) -> Steps[bool]:
        """Return False for a side that is missing, if it may be."""
        try:
            found = yield from self.asked(self.steps.stat(str(self.name)))
        except (KeyNotFound, BucketNotFound) as error:
            if self.may_miss:
                return False
            if isinstance(error, BucketNotFound):
                raise
            raise KeyNotFound(
                f"{self.name} does not exist, or is an object, and a sync takes folders", subject=str(self.name)
            ) from None
        self._node = found.node
        return True

    def is_in_place(self) -> Steps[bool]:
        try:
            found = yield from self.asked(self.steps.stat(str(self.name)))
        except (KeyNotFound, BucketNotFound):
            return self._node is None
        return found.node == self._node

    def _entry(self, listed: ListEntry, *, is_empty: bool) -> Entry | None:
        path = listed.key[len(self.name.key) :]
        if not path:
            return None
        is_folder = path.endswith("/")
        taken = not self.rules.leaves_out(path) if is_folder else self.rules.takes(path)
        if not taken:
            return None
        return Entry(
            path,
            listed.size_bytes,
            listed.mtime_ns,
            listed.mode,
            listed.blob,
            listed.node,
            refusal=self._refusal(path, listed),
            is_bare=is_folder and is_empty,
            listed=listed,
        )

    def _refusal(self, path: str, listed: ListEntry) -> str:
        if not path.endswith("/") and listed.kind != _OBJECT:
            return f"a {SPECIAL_KINDS.get(listed.kind, 'symbolic link')} in the lake"
        if not self.to_folder:
            return ""
        if not is_path(path):
            return "no path below a folder can say that name"
        if any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
            return f"a part of the name is longer than {NAME_BYTES_MAX} bytes"
        if path.endswith("/") and listed.size_bytes:
            return "a folder's own key that has content"
        return ""
