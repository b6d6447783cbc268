"""The right answers: a local folder, used as by several processes whose writes are seen when they close.

Steps that open, change and close are done on the local folder as they are.  A handle that stays open for writing keeps
what is written to itself until a commit (fsync, close); then

- what O_APPEND wrote goes behind the content that the file has then;
- other writes replace all of it by what the file had when it was opened, with the writes over it: the last close wins,
  whole;
- a file that another process has removed or renamed is not written to: ESTALE.  One that another has replaced, so that
  the name has other content and the file no name, is committed over that: the last close wins;
- a file that the process itself has removed takes the writes with it.

A handle that stays open for reading may show the content as it was opened, what its own machine has written since, and
what begins with such a content: an append.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.mount.place import outcome, pattern
from tests.mount.shared.place import READ_MAX, SharedPlace
from tests.mount.shared.steps import paths_of
from tests.mount.steps import Argument, Step

CONTENT_CALLS: Final = ("append", "create_new", "edit", "save", "write_file", "truncate", "read_file", "stat", "lstat")
"""Calls that show or change a file's bytes: not of a file that the same process writes to by a handle."""
ATTRIBUTE_CALLS: Final = ("chmod", "utime", "setxattr", "removexattr")
"""Calls that are not made of a file that anybody writes to by a handle: whose attributes a commit keeps is not
promised."""
HANDLE_CALLS: Final = ("pwrite", "fsync", "close", "read_all")


@dataclass
class Held:
    """One handle that stays open."""

    path: str
    descriptor: int
    node: int
    flags: int
    base: bytes
    """The content that it was opened with, or has committed."""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    is_dirty: bool = False
    is_removed: bool = False
    """True when the process itself has removed or replaced the name."""
    is_lost: bool = False
    """True while another process has taken its name away."""
    shown: list[bytes] = field(default_factory=list)
    """The contents that a handle for reading may show."""

    @property
    def is_for_writing(self) -> bool:
        return bool(self.flags & (os.O_WRONLY | os.O_RDWR))

    def content(self, now: bytes) -> bytes:
        """Return what a commit makes of the file, which has `now`."""
        if self.flags & os.O_APPEND:
            return now + b"".join(written for _, written in self.writes)
        content = bytearray(self.base)
        for offset, written in self.writes:
            content += bytes(max(0, offset - len(content)))
            content[offset : offset + len(written)] = written
        return bytes(content)


class Oracle:
    """The local folder, and what each process has open."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self._places = [SharedPlace(folder) for _ in range(ranks)]
        self._held: list[dict[int, Held]] = [{} for _ in range(ranks)]

    # --- steps ---------------------------------------------------------------------------------------

    def does(self, rank: int, step: Step) -> bool:
        """Return True if the right answer to a step is known; others are left out."""
        if step.call in HANDLE_CALLS:
            held = self._held[rank].get(int(step.arguments[0]))
            return held is not None and self._knows(held, step.call)
        if any(held.is_lost and held.path in paths_of(step) for held in self._held[rank].values()):
            return False  # what its own mount shows of a file that it writes to is not promised
        nodes = {node for path in paths_of(step) for node in self._nodes(path)}
        if step.call == "hold":
            is_free = int(step.arguments[0]) not in self._held[rank]
            open_nodes = {held.node for held in self._held[rank].values()}
            return is_free and not nodes & open_nodes and not os.path.isdir(self._at(str(step.arguments[1])))
        if step.call in CONTENT_CALLS or step.call in ("rename", "rename_new"):
            return not nodes & self._written([rank])
        return step.call not in ATTRIBUTE_CALLS or not nodes & self._written(range(len(self._held)))

    def _knows(self, held: Held, call: str) -> bool:
        if call == "close":
            return True
        if held.is_for_writing:
            return call != "read_all" and self._has_name(held)
        return call == "read_all"

    def do(self, rank: int, step: Step) -> object:
        """Do a step; return its outcome."""
        if step.call == "hold":
            return outcome(lambda: self._hold(rank, step.arguments))
        if step.call in HANDLE_CALLS:
            return outcome(lambda: self._with_handle(rank, step))
        place = self._places[rank]
        done = outcome(lambda: getattr(place, step.call)(*step.arguments))
        self._follow(rank)
        return done

    def may_show(self, rank: int, slot: int, content: object) -> bool:
        """Return True if a handle for reading may show a content."""
        return content in self._held[rank][slot].shown

    def lose(self, rank: int) -> None:
        """Close all handles of a process without a commit: its machine is gone."""
        for held in self._held[rank].values():
            os.close(held.descriptor)
        self._held[rank].clear()

    def open_slots(self, rank: int) -> list[int]:
        """Return the slots that hold an open file."""
        return sorted(self._held[rank])

    # --- handles -------------------------------------------------------------------------------------

    def _hold(self, rank: int, arguments: tuple[Argument, ...]) -> object:
        slot, path, flags, key, size = arguments
        assert isinstance(slot, int) and isinstance(path, str) and isinstance(flags, int)  # noqa: PT018
        assert isinstance(key, int) and isinstance(size, int)  # noqa: PT018
        # A file is opened for the check alone: what O_TRUNC removes is seen at the commit.
        descriptor = os.open(self._at(path), flags & ~os.O_TRUNC | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        real = os.path.relpath(os.path.realpath(self._at(path)), os.path.realpath(self.folder))
        content = Path(self._at(real)).read_bytes() if stat.S_ISREG(found.st_mode) else b""
        held = Held(real, descriptor, found.st_ino, flags, b"" if flags & os.O_TRUNC else content)
        held.is_dirty = bool(flags & os.O_TRUNC)
        held.shown = [content]
        self._held[rank][slot] = held
        if not size:
            return "opened"
        return self._write(held, 0, key, size)

    def _with_handle(self, rank: int, step: Step) -> object:
        slot = int(step.arguments[0])
        held = self._held[rank][slot]
        if step.call == "pwrite":
            _, offset, key, size = step.arguments
            return self._write(held, int(offset), int(key), int(size))
        if step.call == "read_all":
            return held.shown[-1]
        if step.call == "fsync":
            self._commit(held)
            self._follow(rank)
            return None
        del self._held[rank][slot]
        try:
            self._commit(held)
        finally:
            os.close(held.descriptor)
        self._follow(rank)
        return "closed"

    def _write(self, held: Held, offset: int, key: int, size: int) -> int:
        held.writes.append((offset, pattern(key, size)))
        held.is_dirty = True
        return size

    def _commit(self, held: Held) -> None:
        if not (held.is_for_writing and held.is_dirty) or held.is_removed:
            return
        path = Path(self._at(held.path))
        if not self._has_name(held):
            self._take_over(held, path)
        held.base = held.content(path.read_bytes())
        with path.open("r+b") as file:
            file.truncate(0)
            file.write(held.base)
        held.writes.clear()
        held.is_dirty = False

    def _take_over(self, held: Held, path: Path) -> None:
        """Have the handle commit to the file that has taken its name.  ESTALE if there is none."""
        names = {node for _, node in self.names().values()}
        is_file = path.is_file() and not path.is_symlink() and not self._is_behind_link(held.path)
        if held.node in names or not is_file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        os.close(held.descriptor)
        held.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        held.node = os.fstat(held.descriptor).st_ino

    def _is_behind_link(self, path: str) -> bool:
        """Return True if a folder of a path has become a link: it leads elsewhere."""
        parts = path.split("/")
        return any(os.path.islink(self._at("/".join(parts[:count]))) for count in range(1, len(parts)))

    def _has_name(self, held: Held) -> bool:
        try:
            return os.lstat(self._at(held.path)).st_ino == held.node
        except OSError:
            return False

    def _follow(self, rank: int) -> None:
        """Follow what a step of one process did to the files that are open, and to what their handles may show."""
        names = {node: path for path, (_, node) in self.names().items()}
        for owner, slots in enumerate(self._held):
            for held in slots.values():
                if self._has_name(held):
                    held.is_lost = False
                elif owner != rank or held.is_lost:
                    held.is_lost = True
                elif held.node in names:
                    held.path = names[held.node]
                else:
                    held.is_removed = True
                if not held.is_for_writing:
                    _follow_content(held, is_own=owner == rank)

    # --- names ---------------------------------------------------------------------------------------

    def names(self) -> dict[str, tuple[str, int]]:
        """Return kind and node of each name in the folder, by path."""
        return dict(_names(str(self.folder), ""))

    def _at(self, path: str) -> str:
        return f"{self.folder}/{path}"

    def _nodes(self, path: str) -> set[int]:
        found: set[int] = set()
        for look in (os.stat, os.lstat):
            try:
                found.add(look(self._at(path)).st_ino)
            except OSError:
                continue
        return found

    def _written(self, ranks: range | list[int]) -> set[int]:
        return {held.node for rank in ranks for held in self._held[rank].values() if held.is_for_writing}


def _names(folder: str, prefix: str) -> Iterator[tuple[str, tuple[str, int]]]:
    with os.scandir(f"{folder}/{prefix}") as entries:
        for entry in entries:
            kind = "link" if entry.is_symlink() else "folder" if entry.is_dir() else "file"
            yield prefix + entry.name, (kind, entry.inode())
            if kind == "folder":
                yield from _names(folder, f"{prefix}{entry.name}/")


def _follow_content(held: Held, *, is_own: bool) -> None:
    if not stat.S_ISREG(os.fstat(held.descriptor).st_mode):
        return
    now = os.pread(held.descriptor, READ_MAX, 0)
    if now not in held.shown and (is_own or any(now.startswith(shown) for shown in held.shown)):
        held.shown.append(now)
