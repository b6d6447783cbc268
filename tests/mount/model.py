"""Compares a mounted folder with a plain one: the same steps on both, the same results.

One process does each system call of a sequence in a folder of the local disk and in one of the mount, and compares the
results, errno included; now and then, and at the end, it compares the whole trees.  When a second mount of the same
store is given, a sequence may close all and go on there, and at its end both mounts must show the tree: what was closed
on one is seen whole on the other.  No event says when that is so; the test waits for it, up to `SETTLE_S`.

Left out, because a mount differs from a local disk on purpose or may: hard links, device nodes, FIFOs, atime and ctime,
times of folders, of files changed through a mapping and of files truncated to the size that they have, st_blocks and
SEEK_HOLE, locks, fallocate, RENAME_EXCHANGE, set-id bits, times before 1970, names that are not UTF-8 or longer than a
local disk allows, touching a mapping after the file's end, the mount's root itself.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mount.place import Place, outcome
from tests.mount.snapshot import Tree, difference, tree
from tests.mount.steps import ANY, CHECK, SWITCH, Step

SETTLE_S: Final = 15.0
"""The mount promises a second; a slow machine must not fail a test."""
POLL_S: Final = 0.02
INNER: Final = "in"


@dataclass(frozen=True)
class Ground:
    """The folders of a run: a plain one, and one or two on mounts that must behave like it."""

    plain: Path
    mounts: tuple[Path, ...]


@dataclass(frozen=True)
class Difference:
    """The first result that differs from the local disk's."""

    position: int
    what: str


def run(steps: Sequence[Step], ground: Ground, name: str) -> Difference | None:
    """Run a sequence in new folders called `name`, which are removed at the end; None when nothing differs."""
    pair = _Pair(ground, name)
    found: Difference | None = None
    for position, step in enumerate(steps):
        if what := pair.do(step):
            found = Difference(position, what)
            break
    if found is None and (what := pair.finish()):
        found = Difference(len(steps), what)
    left = pair.clean_up()
    return found or (Difference(len(steps), left) if left else None)


class _Pair:
    """One sequence being run."""

    def __init__(self, ground: Ground, name: str) -> None:
        # One more folder around the place: a symlink to `../a` must not lead to where others work.
        self._plain = Place(ground.plain / name / INNER)
        self._mounts = [Place(folder / name / INNER) for folder in ground.mounts]
        self._here = 0
        self._mtimes = True
        os.makedirs(self._plain.folder)
        os.makedirs(self._mounts[0].folder)

    @property
    def _mount(self) -> Place:
        return self._mounts[self._here]

    def do(self, step: Step) -> str:
        """Do a step on both sides; return the difference, empty when they agree."""
        if step.call == CHECK:
            return self._check()
        if step.call == SWITCH:
            return self._switch()
        if step.call == "map" and step.arguments[3]:
            self._mtimes = False
        expected, got = _outcome(self._plain, step), _outcome(self._mount, step)
        self._mtimes = self._mtimes and not self._plain.same_size_truncated
        return "" if expected == got else f"expected {_short(expected)}, got {_short(got)}{_where(expected, got)}"

    def _check(self) -> str:
        expected = tree(_outer(self._plain), mtimes=self._mtimes)
        try:
            return difference(expected, tree(_outer(self._mount), mtimes=self._mtimes))
        except OSError as error:
            return f"the tree cannot be read: {error}"

    def _switch(self) -> str:
        if what := self._end() or self._check():
            return what
        self._here = (self._here + 1) % len(self._mounts)
        return self._settle(self._mount)

    def _end(self) -> str:
        expected, got = _outcome(self._plain, Step("end")), _outcome(self._mount, Step("end"))
        return "" if expected == got else f"closing all: expected {_short(expected)}, got {_short(got)}"

    def _settle(self, place: Place) -> str:
        """Wait until a mount shows what the local disk has."""
        expected = tree(_outer(self._plain), mtimes=self._mtimes)
        # Not the tree's names: a name may be found through a symlink.
        names = {name for name in ANY if os.path.lexists(f"{self._plain.folder}/{name}")}
        return _wait(lambda: _shown(expected, names, place, self._mtimes))

    def finish(self) -> str:
        """Close all; then every mount must show the tree."""
        if what := self._end() or self._check():
            return what
        for place in self._mounts:
            if what := self._settle(place):
                return f"on {'this' if place is self._mount else 'the other'} mount: {what}"
        return ""

    def clean_up(self) -> str:
        """Remove what the sequence made; then it must be gone on all mounts."""
        for place in (self._plain, self._mount):
            _outcome(place, Step("end"))
            try:
                shutil.rmtree(_outer(place))
            except OSError as error:
                return f"the folder cannot be removed: {error}"
        for place in self._mounts:
            if what := _wait(lambda place=place: _gone(_outer(place))):  # type: ignore[misc]
                return what
        return ""


def _outer(place: Place) -> str:
    return os.path.dirname(place.folder)


def _shown(expected: Tree, names: set[str], place: Place, mtimes: bool) -> str:
    """Return how a mount's tree is wrong; also names that can still be opened though no folder lists them."""
    try:
        what = difference(expected, tree(_outer(place), mtimes=mtimes))
        stale = [name for name in ANY if name not in names and os.path.lexists(f"{place.folder}/{name}")]
    except OSError as error:
        return f"the tree cannot be read: {error}"
    return what or (f"names that are gone are still found: {stale}" if stale else "")


def _gone(folder: str) -> str:
    return f"{folder} is still there" if os.path.lexists(folder) else ""


def _wait(check: Callable[[], str]) -> str:
    """Wait until nothing is wrong, or the time is over; return what is wrong."""
    until = time.monotonic() + SETTLE_S
    while (what := check()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return what


def _outcome(place: Place, step: Step) -> object:
    return outcome(lambda: getattr(place, step.call)(*step.arguments))


def _short(came: object) -> str:
    if isinstance(came, bytes) and len(came) > 24:
        return f"{len(came)} bytes {came[:24]!r}..."
    if isinstance(came, tuple) and came[:1] == (OSError,):
        return str(came[1])
    return repr(came)


def _where(expected: object, got: object) -> str:
    if not (isinstance(expected, bytes) and isinstance(got, bytes)):
        return ""
    common = min(len(expected), len(got))
    first = next((index for index in range(common) if expected[index] != got[index]), common)
    return f", different from byte {first}: {expected[first : first + 16]!r} became {got[first : first + 16]!r}"
