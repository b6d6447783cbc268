"""The same system calls on a mount and on a local folder: every difference is a known one, or a bug.

A case is a list of calls, each by some user, in a folder of its own.  After each call both sides are compared: the
result or the errno, and of everything in the folder its type, mode, owner, size and number of names, and *whether* its
times changed, the access time only where a call sets it.  The first difference ends a case: what follows it cannot be
compared.

At a lake a folder's change time may also move by less than a microsecond: when a new file in it is closed for the first
time, and other mounts see the name (docs/mount.md; `test_close_to_open` has that promise).  A mount of one engine shows
that later.

`KNOWN` in `tests.mount.posix_known` lists the differences that are decided, each with its reason. Not tested here: a
mount beside other mounts, or after a crash.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from tests.mount.posix_calls import Outcome, User, answer_calls, status
from tests.mount.posix_known import KNOWN, Known
from tests.served_devices import DEVICES

ROOT: Final = User("root", 0, 0)
ALICE: Final = User("alice", 41001, 41001, (41001, 41010))
BOB: Final = User("bob", 41002, 41002, (41002,))
USERS: Final = (ROOT, ALICE, BOB)
GROUP: Final = 41010
"""A group that alice is in, beside her own."""
_COARSE_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE, the source of a file system's times."""
_FIRST_CLOSE_NS: Final = 1000 if DEVICES else 0
"""A folder's change time moves by less than that, if at all, when a new file in it is stored."""
_NO_TIME: Final = "no time changed"
_SETTING_ACCESS_TIME: Final = ("utimens", "futimens", "utimens_now")


@dataclass(frozen=True)
class Call:
    """One system call by one user."""

    user: User
    name: str
    arguments: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.user.name}.{self.name}({', '.join(map(_printed, self.arguments))})"


def _printed(argument: object) -> str:
    text = repr(argument)
    return text if len(text) < 60 else f"{text[:40]}...({len(text)})"


class By:
    """Makes the calls of a user: `root.mkdir("d", 0o755)`."""

    def __init__(self, user: User) -> None:
        self._user = user

    def __getattr__(self, name: str) -> Callable[..., Call]:
        return lambda *arguments: Call(self._user, name, arguments)


root, alice, bob = By(ROOT), By(ALICE), By(BOB)


@dataclass(frozen=True)
class Case:
    """Calls made one after the other in an empty folder that everybody may write into."""

    name: str
    calls: tuple[Call, ...]
    with_times: bool = True


def case(name: str, *calls: Call, with_times: bool = True) -> Case:
    """Make a case."""
    return Case(name, calls, with_times)


@dataclass(frozen=True)
class Thing:
    """The result of `stat` for one name."""

    status: tuple[object, ...]
    mode: int
    inode: int
    times: tuple[int, int, int]


Tree = dict[str, Thing]


class Side:
    """One of the two places, with a process for each user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        context = multiprocessing.get_context("fork")
        self._pipes: dict[User, Connection] = {}
        self._processes = []
        for user in USERS:
            near, far = context.Pipe()
            process = context.Process(target=answer_calls, args=(user, far), daemon=True)
            process.start()
            far.close()
            self._pipes[user] = near
            self._processes.append(process)

    def call(self, call: Call) -> Outcome:
        """Make a call; return its outcome."""
        pipe = self._pipes[call.user]
        pipe.send((call.name, call.arguments))
        assert pipe.poll(30), f"no answer to {call} in {self.folder}"
        outcome: Outcome = pipe.recv()
        return outcome

    def begin(self, name: str) -> Path:
        """Make a new folder for a case, and have every caller enter it."""
        place = self.folder / name
        place.mkdir()
        place.chmod(0o777)
        for user in USERS:
            self.call(Call(user, "chdir", (str(place),)))
        return place

    def end_case(self) -> None:
        """Close everything that is open."""
        for user in USERS:
            self.call(Call(user, "end", ()))

    def end(self) -> None:
        """End all processes."""
        for pipe in self._pipes.values():
            pipe.send(("stop", ()))
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


class Posix:
    """A mount and a local folder, to be compared."""

    def __init__(self, mount: Side, local: Side) -> None:
        self._mount = mount
        self._local = local
        self._count = 0
        self._waits = not _has_fine_times(local.folder)
        self.seen: set[Known] = set()

    def differences(self, cases: Iterable[Case]) -> list[str]:
        """Return the differences that are not known, one line for each case."""
        return [line for found in cases for line in self._differences(found)]

    def _differences(self, found: Case) -> Iterator[str]:
        self._count += 1
        places = [side.begin(f"{self._count:04}") for side in (self._mount, self._local)]
        trees = [tree(place) for place in places]
        try:
            for number, call in enumerate(found.calls):
                what, trees = self._difference(places, trees, call, found.with_times)
                if what:
                    line = f"{found.name}: {number} {call}: {what}"
                    known = next((known for known in KNOWN if fnmatch.fnmatchcase(line, known.pattern)), None)
                    if known is None:
                        yield line
                    else:
                        self.seen.add(known)
                    return
        finally:
            self._mount.end_case()
            self._local.end_case()

    def _difference(
        self, places: Sequence[Path], before: list[Tree], call: Call, with_times: bool
    ) -> tuple[str, list[Tree]]:
        if self._waits or call.name in _SETTING_ACCESS_TIME:  # a mount gets the coarse clock's time as "now"
            _wait_for_another_time()
        got, expected = self._mount.call(call), self._local.call(call)
        if got != expected:
            return f"gives {_printed(got)}, locally {_printed(expected)}", before
        after = [tree(place) for place in places]
        atime = call.name in _SETTING_ACCESS_TIME and got[0] == "ok"
        if after[0].keys() != after[1].keys():
            return f"leaves {sorted(after[0])}, locally {sorted(after[1])}", after
        for name in after[0]:
            shown, wanted = (
                (side[name].status, with_times and _changed(old, name, side[name], atime))
                for side, old in zip(after, before, strict=True)
            )
            if shown != wanted:
                return f"leaves {name} as {shown}, locally {wanted}", after
        return "", after


def tree(place: Path) -> Tree:
    """Return all names below a folder, and the folder as `.`."""
    found = {".": _thing(str(place))}
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, place)] = _thing(path)
    return found


def _thing(path: str) -> Thing:
    found = os.lstat(path)
    return Thing(status(found), found.st_mode, found.st_ino, (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns))


def _changed(before: Tree, name: str, now: Thing, atime: bool) -> str:
    """Say which times changed; for a new or replaced name only that it is one."""
    was = next((thing for thing in before.values() if thing.inode == now.inode), None)
    if was is None:
        return f"{'replaced' if name in before else 'new'}"
    is_file = stat.S_ISREG(now.mode)  # on a local disk, a look at a folder or symlink changes its access time
    kinds = [
        kind
        for kind, old, new in zip(("atime", "mtime", "ctime"), was.times, now.times, strict=True)
        if old != new and (kind != "atime" or (atime and is_file))
    ]
    if stat.S_ISDIR(now.mode) and kinds == ["ctime"] and 0 < now.times[2] - was.times[2] < _FIRST_CLOSE_NS:
        return _NO_TIME
    return " ".join(kinds) or _NO_TIME


def _has_fine_times(folder: Path) -> bool:
    """Return whether two changes with a look between them always have different times."""
    times: list[int] = []
    for mode in (0o700, 0o777) * 10:
        folder.chmod(mode)
        times.append(folder.stat().st_ctime_ns)
    return len(set(times)) == len(times)


def _wait_for_another_time() -> None:
    """Wait until the clock that gives local file systems their times has gone on."""
    begin = time.clock_gettime_ns(_COARSE_CLOCK)
    while time.clock_gettime_ns(_COARSE_CLOCK) == begin:
        time.sleep(0.0005)


@contextmanager
def comparing(mount: Path, local: Path) -> Iterator[Posix]:
    """Yield both sides, for the block."""
    sides: list[Side] = []
    try:
        for folder in (mount, local):
            folder.chmod(0o777)
            sides.append(Side(folder))
        yield Posix(*sides)
    finally:
        for side in sides:
            side.end()
