"""The contents of a folder as values to compare: names, kinds, contents, sizes, modes, owners, attributes.

The page cache is asked to forget contents before they are read, so that a mount has to answer itself.  Times of
modification count when they lie in the past, where only an explicit setting puts them: everything else is `now`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import Final

PAST_NS: Final = 1_200_000_000 * 10**9
"""Times before this were set by somebody; the test sets none after it."""

Tree = dict[str, "Entry"]


@dataclass(frozen=True)
class Entry:
    """One name."""

    kind: str
    mode: str
    owner: tuple[int, int]
    size: int
    content: str
    attributes: tuple[tuple[str, bytes], ...]
    mtime: int | str

    def differences(self, other: Entry) -> str:
        """Return the fields that are not equal, with both values."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__]
        return ", ".join(f"{name} {mine!r} became {theirs!r}" for name, mine, theirs in pairs if mine != theirs)


def tree(folder: str, *, mtimes: bool = True) -> Tree:
    """Return all names below a folder, by path."""
    found: Tree = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        for name in sorted(os.listdir(f"{folder}/{prefix}")):
            path = prefix + name
            entry = _entry(f"{folder}/{path}", mtimes)
            found[path] = entry
            if entry.kind == "folder":
                pending.append(f"{path}/")
    return found


def difference(expected: Tree, got: Tree) -> str:
    """Return what is wrong with each name, one a line; empty when the trees are equal."""
    lines: list[str] = []
    for path in sorted({*expected, *got}):
        if path not in got:
            lines.append(f"{path!r} is missing")
        elif path not in expected:
            lines.append(f"{path!r} should not be there")
        elif expected[path] != got[path]:
            lines.append(f"{path!r}: {expected[path].differences(got[path])}")
    return "\n".join(lines)


def _entry(path: str, mtimes: bool) -> Entry:
    status = os.lstat(path)
    kind, size, content = "other", status.st_size, ""
    attributes: tuple[tuple[str, bytes], ...] = ()
    if stat.S_ISLNK(status.st_mode):
        kind, content = "link", os.readlink(path)
    elif stat.S_ISDIR(status.st_mode):
        kind, size = "folder", 0
    elif stat.S_ISREG(status.st_mode):
        kind, content = "file", _content(path)
    if kind in ("file", "folder"):
        names = sorted(name for name in os.listxattr(path) if name.startswith("user."))
        attributes = tuple((name, os.getxattr(path, name)) for name in names)
    past = mtimes and kind != "folder" and status.st_mtime_ns < PAST_NS
    mtime: int | str = status.st_mtime_ns if past else "now"
    owner = (status.st_uid, status.st_gid)
    return Entry(kind, oct(status.st_mode), owner, size, content, attributes, mtime)


def _content(path: str) -> str:
    """Return length and digest of what a reader gets."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        hasher = hashlib.blake2b(digest_size=8)
        length = 0
        while piece := os.read(descriptor, 1 << 20):
            hasher.update(piece)
            length += len(piece)
        return f"{length} bytes, {hasher.hexdigest()}"
    finally:
        os.close(descriptor)
