"""A program on a mount that keeps a journal: what it was about to do, what returned, what must be durable.

Each writer has a folder of its own and does one thing at a time.  A value of a name is the digest of a file's content,
FOLDER, or None where nothing is.  `Known` compares what the mount promises (docs/mount.md) with the journal:

- a change that returned is there as long as the engine lives, whatever happens to the mount
- a synced change outlives the engine as well: `fsync` of a file covers its content, `fsync` of a folder all before it,
  and on a mount with `--sync` each change is synced when it returns
- of the other changes the engine's death loses the last ones, never one in between; and a file is old or new, whole
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

FOLDER: Final = "folder"
FOLDERS: Final = ("d0", "d1", "d2")
_FILES: Final = tuple(f"{folder}g{n}" for folder in ("", *(f"{name}/" for name in FOLDERS)) for n in range(3))
_SIZES: Final = (0, 10, 3_000, 70_000, 70_000, 1_500_000)
_ACTIONS: Final = {
    "write": 6, "synced": 4, "replace": 5, "edit": 3, "rename": 4, "unlink": 2, "mkdir": 3, "rmdir": 1,
    "turn": 1, "settle": 3,
}  # fmt: skip
State = dict[str, str | None]


def digest_of(content: bytes | bytearray) -> str:
    """Return the value of a file."""
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def state_below(folder: Path) -> State:
    """Return what a mount shows below the folder."""
    found: State = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = FOLDER if path.is_dir() else digest_of(path.read_bytes())
    return found


@dataclass
class Known:
    """The contents of a journal."""

    states: list[State] = field(default_factory=lambda: [{}])
    """The state after the last change that must be durable, and after each that returned since."""
    may: dict[str, set[str | None]] = field(default_factory=dict)
    """Values of names that are not known to be durable, and the one before them."""
    doubt: State | None = None
    error: str = ""
    """The error of the change in doubt."""
    returned: int = 0

    @property
    def last(self) -> State:
        """The state after all that returned."""
        return self.states[-1]

    def complaint(self, found: State, lost: str) -> str:
        """Say what is wrong after the loss of "mount", "engine" or "both"; empty when nothing is."""
        after_doubt = [_with(self.last, self.doubt)] if self.doubt else []
        if lost == "engine":
            return self._complaint_by_name(found)
        allowed = [*(self.states if lost == "both" else [self.last]), *after_doubt]
        if found in [_present(state) for state in allowed]:
            return ""
        differs = sorted(name for name in {*found, *self.last} if found.get(name) != self.last.get(name))
        return (
            f"{ {name: (found.get(name), self.last.get(name)) for name in differs} } (found, last returned) "
            f"is none of {len(allowed)} states allowed; in doubt: {self.doubt} ({self.error})"
        )

    def _complaint_by_name(self, found: State) -> str:
        doubt = self.doubt or {}
        for name in sorted({*found, *self.last, *doubt, *self.may}):
            allowed = {self.last.get(name), *self.may.get(name, ())}
            if name in doubt:
                allowed |= self._values(doubt, name)
            if found.get(name) not in allowed:
                return f"{name} is {found.get(name)}, not one of {allowed} ({self.error or 'nothing failed'})"
        return ""

    def _values(self, change: State, name: str) -> set[str | None]:
        """Return the values that a change may give a name: a rename moves its source's, which may be an older one."""
        value = change[name]
        sources = [
            source
            for source, left in change.items()
            if value is not None and left is None and self.last.get(source) == value
        ]
        return {value}.union(*(self.may.get(source, ()) for source in sources))

    def returns(self, change: State, durable: bool | list[str]) -> None:
        """Note that a change returned without an error."""
        before = self.last
        state = _with(before, change)
        values = {name: self._values(change, name) for name in change}
        for name in change:
            self.may.setdefault(name, {before.get(name)}).update(values[name])
        if durable is True:
            self.may.clear()
        for name in durable if isinstance(durable, list) else ():
            self.may[name] = {state.get(name)}
        self.states = [state] if durable else [*self.states, state]
        self.doubt = None
        self.returned += 1


def _with(state: State, change: State | None) -> State:
    return state | (change or {})


def _present(state: State) -> State:
    return {name: value for name, value in state.items() if value is not None}


def read_known(journal: Path) -> Known:
    """Replay a journal."""
    known = Known()
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        if "found" in entry:
            known = Known([entry["found"]])
        elif "after" in entry:
            known.doubt = entry["after"]
        elif "failed" in entry:
            known.error = entry["failed"]
        else:
            assert known.doubt is not None
            known.returns(known.doubt, entry["durable"])
    return known


def resolve(journal: Path, found: State) -> None:
    """Write to the journal, after a check, that what was found is durable; it goes on from there."""
    journal.write_text(json.dumps({"found": found}) + "\n")


class FileWriter:
    """Changes files below a folder, each change between two lines of the journal."""

    def __init__(self, folder: Path, journal: Path, seed: str, told: int, *, synced: bool) -> None:
        self._folder = folder
        self._journal = journal
        self._generator = random.Random(seed)
        self._told = told
        self._is_synced = synced
        self._known = read_known(journal)

    def run(self, stop: Event) -> None:
        """Work until `stop` is set, or until something fails; then the error is in the journal."""
        with self._journal.open("ab", buffering=0) as journal:
            while not stop.is_set():
                action = self._generator.choices(list(_ACTIONS), list(_ACTIONS.values()))[0]
                try:
                    for after, call, durable in getattr(self, f"_{action}")():
                        journal.write(json.dumps({"after": after}).encode() + b"\n")
                        call()
                        covered = list(after) if self._is_synced and not durable else durable
                        journal.write(json.dumps({"durable": covered}).encode() + b"\n")
                        self._known.returns(after, covered)
                        os.write(self._told, b".")
                except OSError as error:
                    failed = errno.errorcode.get(error.errno or 0, str(error))
                    journal.write(json.dumps({"failed": f"{action}: {failed}"}).encode() + b"\n")
                    return

    # Each returns its steps: the changes of names, the call, and what is durable when the call returns.

    def _write(self, *, sync: bool = False, name: str = "") -> Steps:
        name = name or self._place()
        content = self._content()

        def write() -> None:
            with (self._folder / name).open("wb", buffering=0) as file:
                _write_all(file.fileno(), content)
                if sync:
                    os.fsync(file.fileno())

        return [({name: digest_of(content)}, write, [name] if sync else [])]

    def _synced(self) -> Steps:
        return self._write(sync=True)

    def _replace(self) -> Steps:
        target = self._place()
        written = self._write(sync=True, name="tmp")
        value = written[0][0]["tmp"]
        rename: Steps = [({"tmp": None, target: value}, self._renaming("tmp", target), [])]
        return [*written, *rename, *(self._settle() if self._generator.random() < 0.5 else [])]

    def _edit(self) -> Steps:
        present = self._present()
        if not present:
            return self._write()
        name = self._generator.choice(present)
        piece = self._generator.randbytes(self._generator.choice((1, 500, 100_000)))
        sync = self._generator.random() < 0.5
        file = (self._folder / name).open("r+b", buffering=0)  # opened again, it could be what another engine has
        content = bytearray(file.readall())
        read = digest_of(content)  # an engine that died unseen may have lost what was not durable
        allowed = {self._known.last[name], *self._known.may.get(name, ())}
        assert read in allowed, f"{name} reads as {read}, not one of {allowed}"
        at = self._generator.choice((0, len(content) // 2, len(content)))
        content[at : at + len(piece)] = piece

        def edit() -> None:
            with file:
                file.seek(at)
                _write_all(file.fileno(), piece)
                if sync:
                    os.fsync(file.fileno())

        return [({name: digest_of(content)}, edit, [name] if sync else [])]

    def _rename(self) -> Steps:
        present = self._present()
        target = self._place()
        if not present or target in present[:1]:
            return self._write()
        source = present[0]
        return [({source: None, target: self._known.last[source]}, self._renaming(source, target), [])]

    def _turn(self) -> Steps:
        """Rename a folder, with all that is in it."""
        there = [name for name in FOLDERS if self._known.last.get(name)]
        free = [name for name in FOLDERS if name not in there]
        if not there or not free:
            return self._mkdir()
        source, target = there[0], free[0]
        inside = [name for name in self._present() if name.startswith(f"{source}/")]
        after: State = {source: None, target: FOLDER}
        for name in inside:
            after |= {name: None, f"{target}{name.removeprefix(source)}": self._known.last[name]}
        return [(after, self._renaming(source, target), [])]

    def _unlink(self) -> Steps:
        present = self._present()
        if not present:
            return self._write()
        name = self._generator.choice(present)
        return [({name: None}, lambda: (self._folder / name).unlink(), [])]

    def _mkdir(self) -> Steps:
        free = [name for name in FOLDERS if not self._known.last.get(name)]
        if not free:
            return self._rmdir()
        return [({free[0]: FOLDER}, lambda: (self._folder / free[0]).mkdir(), [])]

    def _rmdir(self) -> Steps:
        empty = [
            name
            for name in FOLDERS
            if self._known.last.get(name) and not any(at.startswith(f"{name}/") for at in self._present())
        ]
        if not empty:
            return self._write()
        return [({empty[0]: None}, lambda: (self._folder / empty[0]).rmdir(), [])]

    def _settle(self) -> Steps:
        """Sync every folder: all before is durable then."""
        folders = [self._folder, *(self._folder / name for name in FOLDERS if self._known.last.get(name))]

        def sync() -> None:
            for folder in folders:
                sync_path(folder)

        return [({}, sync, True)]

    def _renaming(self, source: str, target: str) -> Callable[[], None]:
        return lambda: os.rename(self._folder / source, self._folder / target)

    def _present(self) -> list[str]:
        files = [name for name in _FILES if self._known.last.get(name)]
        self._generator.shuffle(files)
        return files

    def _place(self) -> str:
        """Return the name of a file in a folder that exists."""
        return self._generator.choice(
            [name for name in _FILES if "/" not in name or self._known.last.get(name.partition("/")[0])]
        )

    def _content(self) -> bytes:
        return self._generator.randbytes(self._generator.choice(_SIZES))


Steps = list[tuple[State, Callable[[], object], bool | list[str]]]


def sync_path(path: Path) -> None:
    """Call fsync on a folder, or on a file that nobody changes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    """Write in several calls, so that a file is half written for a while."""
    for at in range(0, len(content), 40_000):
        os.write(descriptor, content[at : at + 40_000])
