"""The order of a process's system calls, and what durability requires of it.

`traced` runs a command under strace; `read_calls` turns its output into a list of calls, each with the moments at which
it began and ended; `complaints` says where a sync of a file or folder is missing.  A write is durable when a sync of
its file began after the write ended; a name (a new file, a rename, an unlink, a new folder) when an fsync of its folder
did.

Required, in a store at `root`:

- a file written under a temporary name is synced before its rename, and its folder after the rename: before the file is
  written to, before anything that it supersedes is unlinked, and in any case; for the token, before any answer
- a segment's header and name are durable before payload is written behind the header
- payload is durable before the journal's group that follows it is written; payload and group before the answer, when
  one client asks for one thing at a time
- a new folder's name is durable before the superblock
- an unlink is durable when the process has ended
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACED: Final = "openat,mkdir,write,pwrite64,pwritev,pwritev2,fsync,fdatasync,rename,unlink,sendto,sendmsg,ftruncate"
_LINE: Final = re.compile(r"^(\d+)\s+(?:<\.\.\. (\w+) resumed>)?(.*)$")
_RESULT: Final = re.compile(r"\)\s+= (-?\d+)")
_DESCRIPTOR: Final = re.compile(r"^\w+\((\d+)<([^>]*)>")
_PATHS: Final = re.compile(r'"([^"]*)"')
_OFFSETS: Final = {
    "pwrite64": re.compile(r", (\d+)\)\s+="),
    "pwritev": re.compile(r", (\d+)\)\s+="),
    "pwritev2": re.compile(r", (\d+), \w+\)\s+="),
}
_PAGE: Final = 4096
_WAKE_BYTES: Final = 1
"""Length of the message by which a thread wakes the loop, on a socket of the process with itself."""


@dataclass(frozen=True)
class Call:
    """One system call that succeeded."""

    name: str
    began: int
    ended: int
    path: str
    """The descriptor's path, or the first path argument."""
    target: str = ""
    """The new path, for a rename."""
    offset: int = 0
    size: int = 0
    """The call's return value."""
    creates: bool = False

    @property
    def folder(self) -> str:
        """The folder whose entry the call changes."""
        return str(Path(self.target or self.path).parent)


def traced(command: list[str], output: Path) -> list[str]:
    """Return the command under strace: all threads, paths beside descriptors, in the command's own process."""
    tracer = ["strace", "-D", "-f", "-y", "-q", "--seccomp-bpf", "-s", "0"]
    return [*tracer, "-e", f"trace={TRACED}", "-e", "signal=none", "-o", str(output), *command]


def read_calls(text: str) -> list[Call]:
    """Return the calls that succeeded, in the order of their beginning."""
    calls: list[Call] = []
    pending: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines()):
        matched = _LINE.match(line)
        assert matched, line
        process, resumed, rest = matched.groups()
        began = number
        if rest.startswith("+++"):
            continue
        if rest.endswith("<unfinished ...>"):
            pending[process] = (number, rest.removesuffix("<unfinished ...>"))
            continue
        if resumed:
            began, begun = pending.pop(process)
            rest = begun + rest
        call = _parsed(rest, began, number)
        if call is not None:
            calls.append(call)
    return sorted(calls, key=lambda call: call.began)


def read_ended(output: Path, process: int) -> str:
    """Return the whole trace of a process that has ended, once strace has written it."""
    ends = re.compile(rf"^{process} +\+\+\+ ", re.MULTILINE)
    while not ends.search(output.read_text()):
        time.sleep(0.01)
    return output.read_text()


def _parsed(text: str, began: int, ended: int) -> Call | None:
    result = _RESULT.search(text)
    if result is None or int(result[1]) < 0:
        return None
    name = text.partition("(")[0]
    paths = _PATHS.findall(text)
    if name == "openat":
        return Call(name, began, ended, paths[0], creates="O_CREAT" in text) if paths else None
    if name in ("mkdir", "unlink"):
        return Call(name, began, ended, paths[0])
    if name == "rename":
        return Call(name, began, ended, paths[0], target=paths[1])
    descriptor = _DESCRIPTOR.match(text)
    if descriptor is None:
        return None
    offset = _OFFSETS[name].search(text) if name in _OFFSETS else None
    return Call(name, began, ended, descriptor[2], offset=int(offset[1]) if offset else 0, size=int(result[1]))


class Order:
    """The calls of one process, and the store that it had open."""

    def __init__(self, calls: list[Call], root: Path) -> None:
        self._calls = calls
        self._root = str(root)
        self._syncs: dict[str, list[Call]] = {}
        for call in calls:
            if call.name in ("fsync", "fdatasync"):
                self._syncs.setdefault(call.path, []).append(call)
        self.checked = 0
        """Number of orders that were checked: a trace in which nothing happens proves nothing."""

    def complaints(self) -> list[str]:
        """List the places where a sync is missing."""
        return [
            *self._renames(),
            *self._new_segments(),
            *self._groups(),
            *self._answers(),
            *self._folders(),
            *self._unlinks(),
        ]

    def made(self) -> list[str]:
        """Return the files that got their names: created, or renamed from a temporary one."""
        return [call.target or call.path for call in self._calls if call.name == "rename" or call.creates]

    def _synced(self, path: str, after: int, before: int) -> bool:
        """Return whether a sync of the path began and ended between the two moments."""
        self.checked += 1
        return any(sync.began > after and sync.ended < before for sync in self._syncs.get(path, ()))

    def _named(self, *names: str, below: str = "") -> Iterator[Call]:
        for call in self._calls:
            if call.name in names and call.path.startswith(f"{self._root}/{below}"):
                yield call

    def _writes(self, below: str = "") -> Iterator[Call]:
        return self._named("write", "pwrite64", "pwritev", "pwritev2", below=below)

    def _renames(self) -> Iterator[str]:
        for rename in self._named("rename"):
            if "/index" in rename.path:
                continue  # LMDB's folder: when it is lost, the next start makes it again
            written = [call.ended for call in self._writes() if call.path == rename.path and call.ended < rename.began]
            if not self._synced(rename.path, max(written), rename.began):
                yield f"{rename.path} is renamed before it is synced"
            if not self._synced(rename.folder, rename.ended, self._first_use(rename)):
                yield f"{rename.folder} is not synced behind the rename to {rename.target}"

    def _first_use(self, rename: Call) -> int:
        """Return the moment at which somebody first relies on the new name."""
        uses = [call.began for call in self._writes() if call.path == rename.target and call.began > rename.ended]
        if "/checkpoints/" in rename.target:
            uses += [call.began for call in self._named("unlink") if call.began > rename.ended]
        if rename.target.endswith("/native.token"):
            uses += [call.began for call in self._answers_of_the_engine() if call.began > rename.ended]
        return min(uses, default=1 << 60)

    def _new_segments(self) -> Iterator[str]:
        for made in self._named("openat", below="segments/"):
            if not made.creates:
                continue
            payload = [w for w in self._writes("segments/") if w.path == made.path and w.offset >= _PAGE]
            first = min((call.began for call in payload if call.began > made.ended), default=1 << 60)
            for path in (made.path, made.folder):
                if not self._synced(path, made.ended, first):
                    yield f"{path} is not synced before payload is written to {made.path}"

    def _groups(self) -> Iterator[str]:
        """Check payload before each group: of small segments always, of large ones where the trace has one client."""
        for group in self._named("pwritev2", "pwritev", below="journal/"):
            for write in self._last_writes("segments/", group.began):
                if not self._synced(write.path, write.ended, group.began) and not self._is_fill(write):
                    yield f"{write.path} is not synced before the journal's group at {group.offset}"

    def _is_fill(self, write: Call) -> bool:
        """Return whether the call writes zeros ahead of the payload that follows them."""
        return write.name == "pwrite64" and write.path.endswith(".small") and write.offset >= _PAGE

    def _answers(self) -> Iterator[str]:
        for answer in self._answers_of_the_engine():
            for below in ("segments/", "journal/"):
                for write in self._last_writes(below, answer.began):
                    if not self._synced(write.path, write.ended, answer.began) and not self._is_fill(write):
                        yield f"an answer leaves before {write.path} is synced"

    def _answers_of_the_engine(self) -> Iterator[Call]:
        for call in self._calls:
            if call.name in ("sendmsg", "sendto") and call.size > _WAKE_BYTES:
                yield call

    def _last_writes(self, below: str, before: int) -> list[Call]:
        """Return the last write, to each file below that folder, that began before a moment."""
        last = {call.path: call for call in self._writes(below) if call.began < before}
        return list(last.values())

    def _folders(self) -> Iterator[str]:
        superblocks = [call.began for call in self._named("rename") if call.target.endswith("/superblock")]
        for made in self._calls:
            below = made.path.startswith(self._root) or self._root.startswith(f"{made.path}/")
            if made.name != "mkdir" or not below or "/index" in made.path or made.path.endswith("/spares"):
                continue  # both are made again by the next start when they are lost
            if not self._synced(made.folder, made.ended, min(superblocks, default=1 << 60)):
                yield f"{made.folder} is not synced behind the new folder {made.path}"

    def _unlinks(self) -> Iterator[str]:
        for unlink in self._named("unlink"):
            kept = unlink.path.endswith(".new") or "/index" in unlink.path or Path(unlink.path).name == "crash"
            if not kept and not self._synced(unlink.folder, unlink.ended, 1 << 60):
                yield f"{unlink.folder} is not synced behind the removal of {unlink.path}"
