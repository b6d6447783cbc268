"""Random sequences of steps of several processes; each is a rank and a step, one after another.

A seed gives a sequence, always the same, and each part of a sequence is one too.  A few names are used again and again,
and the next step is mostly another rank's, often of the name of the step before: one mount acts upon what it knew.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Final, NamedTuple

from tests.mount.steps import PAST, Argument, Step

FILES: Final = ("a", "b", "d/a", "d/b", "d/e/a", "f/a", "l")
FOLDERS: Final = ("d", "d/e", "f", "f/e", "a")
TARGETS: Final = ("a", "b", "d", "d/a", "nowhere")
MODES: Final = (0o600, 0o644, 0o755)
SIZES: Final = (1, 7, 100, 4096, 5000, 70_000)
OFFSETS: Final = (0, 1, 50, 4096, 6000)
SLOTS: Final = 2
KILL: Final = "kill"
CUT: Final = "cut"

PATHS: Final[dict[str, tuple[int, ...]]] = {
    "hold": (1,),
    "rename": (0, 1),
    "rename_new": (0, 1),
    "symlink": (1,),
    "save": (0, 1),
}
"""The arguments of a call that are paths; of all others it is the first."""
READS: Final = ("stat", "lstat", "listdir", "readlink", "getxattr", "listxattr")
"""Calls whose answers may be those of the kernel's caches."""
OF_TREE: Final = ("listdir", "remove_all")
"""Calls that also depend on the names in the folder."""


class RankStep(NamedTuple):
    """A step, and the process that does it."""

    rank: int
    step: Step

    def __str__(self) -> str:
        return f"{self.rank}: {self.step.call}{self.step.arguments}"


def paths_of(step: Step) -> list[str]:
    """Return the paths that a step names."""
    if step.call in ("pwrite", "fsync", "close", "read_all", KILL, CUT):
        return []
    return [str(step.arguments[index]) for index in PATHS.get(step.call, (0,))]


class _Chooser:
    """The choices of one sequence."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"shared {seed}")
        self.last = ""
        self.rank = 0

    def file(self) -> str:
        """Choose a file's name, often that of the step before."""
        if self.last in FILES and self.random.random() < 0.5:
            return self.last
        self.last = self.random.choice(FILES[:2] if self.random.random() < 0.3 else FILES)
        return self.last

    def folder(self) -> str:
        """Choose a folder's name, often that of the step before."""
        if self.last in FOLDERS and self.random.random() < 0.5:
            return self.last
        self.last = self.random.choice(FOLDERS)
        return self.last

    def any(self) -> str:
        """Choose any name."""
        return self.file() if self.random.random() < 0.6 else self.folder()

    def key(self) -> int:
        """Choose which bytes to write."""
        return self.random.randrange(1, 60)

    def size(self) -> int:
        """Choose a number of bytes."""
        return self.random.choice(SIZES)

    def offset(self) -> int:
        """Choose where to write."""
        return self.random.choice(OFFSETS)

    def slot(self) -> int:
        """Choose a slot."""
        return self.random.randrange(SLOTS)


Maker = Callable[[_Chooser], tuple[Argument, ...]]


def _hold(c: _Chooser) -> tuple[Argument, ...]:
    flags = c.random.choice((os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY, os.O_WRONLY | os.O_TRUNC))
    # What is written over depends on when the writing begins, so it begins with the open.
    size = 0 if flags in (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC) else c.size()
    return (c.slot(), c.file(), flags, c.key(), size)


def _save(c: _Chooser) -> tuple[Argument, ...]:
    path = c.file()
    return (path, f"{path}~{c.rank}", c.key(), c.size())


MENU: Final[dict[str, tuple[int, Maker]]] = {
    "append": (10, lambda c: (c.file(), c.key(), c.size())),
    "create_new": (7, lambda c: (c.file(), c.key(), c.size())),
    "write_file": (7, lambda c: (c.file(), c.key(), c.size())),
    "edit": (6, lambda c: (c.file(), c.offset(), c.key(), c.size())),
    "save": (4, _save),
    "truncate": (2, lambda c: (c.file(), c.offset())),
    "read_file": (8, lambda c: (c.file(),)),
    "mkdir": (6, lambda c: (c.folder(), c.random.choice(MODES))),
    "make_folders": (5, lambda c: (c.folder(),)),
    "remove_all": (2, lambda c: (c.folder(),)),
    "rmdir": (3, lambda c: (c.folder(),)),
    "unlink": (6, lambda c: (c.file(),)),
    "rename": (9, lambda c: (c.any(), c.any())),
    "rename_new": (3, lambda c: (c.any(), c.any())),
    "symlink": (3, lambda c: (c.random.choice(TARGETS), c.random.choice(FILES))),
    "readlink": (1, lambda c: ("l",)),
    "stat": (5, lambda c: (c.any(),)),
    "lstat": (3, lambda c: (c.any(),)),
    "listdir": (5, lambda c: (c.random.choice(("", *FOLDERS)),)),
    "chmod": (3, lambda c: (c.any(), c.random.choice(MODES))),
    "utime": (2, lambda c: (c.any(), c.random.choice(PAST), True)),
    "setxattr": (1, lambda c: (c.any(), "x", c.key(), 20, 0)),
    "hold": (9, _hold),
    "pwrite": (7, lambda c: (c.slot(), c.offset(), c.key(), c.size())),
    "fsync": (2, lambda c: (c.slot(),)),
    "read_all": (4, lambda c: (c.slot(),)),
    "close": (8, lambda c: (c.slot(),)),
}


def sequence(seed: int, *, ranks: int, cuts: bool = False, kills: bool = False, holds: bool = True) -> list[RankStep]:
    """Return the steps of a seed; `cuts`: some connections are lost, `kills`: one mount is killed and mounted again.

    `holds` False: no handle stays open, so that even local folders do not differ.
    """
    chooser = _Chooser(seed)
    names = [name for name in MENU if holds or name != "hold"]
    weights = [MENU[name][0] for name in names]
    steps = [
        RankStep(chooser.random.randrange(ranks), Step("make_folders", (folder,)))
        for folder in ("d", "d/e", "f")
        if chooser.random.random() < 0.7
    ]
    for name in chooser.random.choices(names, weights, k=chooser.random.randint(15, 60)):
        if chooser.random.random() < 0.8:
            chooser.rank = chooser.random.randrange(ranks)
        steps.append(RankStep(chooser.rank, Step(name, MENU[name][1](chooser))))
        if cuts and chooser.random.random() < 0.03:
            steps.append(RankStep(chooser.random.randrange(ranks), Step(CUT)))
    if kills:
        at = chooser.random.randrange(len(steps) // 3, len(steps))
        steps.insert(at, RankStep(chooser.random.randrange(ranks), Step(KILL)))
    return steps
