"""Random sequences of steps; each step is a value that prints as the line of Python that does it.

A seed gives a sequence, always the same.  Every part of a sequence is one too, so a failing one can be shortened. A few
names, slots and sizes are used again and again, so that steps meet: the interesting things happen when a file is open
twice, renamed, written after its end and unlinked.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Argument = int | str | bool
CHECK: Final = "check"
SWITCH: Final = "switch"

FILES: Final = ("a", "b", "d/a", "d/b", "d/e/a", "d/e/b", "f/a", "ü n", "l")
FOLDERS: Final = ("d", "d/e", "f", "d/e/f", "a", "g")
ANY: Final = (*FILES, *FOLDERS)
TARGETS: Final = ("a", "b", "d", "../a", "e/a", "nowhere", "l", "d/b", "/nowhere/at/all", "x" * 300)
MODES: Final = (0o600, 0o644, 0o755, 0o400, 0o000, 0o666)
PAST: Final = (0, 1, 999_999_999, 1_000_000_000_000_000_001, 1_100_000_000_123_456_789, 86_400 * 10**9)
SIZES: Final = (0, 1, 7, 100, 511, 4095, 4096, 4097, 8192, 12_345, 65_536, 65_537, 131_072 + 5)
LARGE: Final = (1 << 20, (1 << 20) + 3, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (5 << 20) + 7)
SLOTS: Final = 4
FLAG_NAMES: Final = (
    "O_WRONLY", "O_RDWR", "O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND", "O_NOFOLLOW", "O_DIRECTORY", "O_SYNC",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One call on a place, or `check` (compare the trees) or `switch` (go on at the other mount)."""

    call: str
    arguments: tuple[Argument, ...] = ()

    def __str__(self) -> str:
        if self.call in (CHECK, SWITCH):
            return f"# {self.call}"
        return f"place.{self.call}({', '.join(self._printed())})"

    def _printed(self) -> list[str]:
        printed = [repr(argument) for argument in self.arguments]
        if self.call == "open":
            printed[2:] = [_flags(int(self.arguments[2])), f"{int(self.arguments[3]):#o}"]
        if self.call in ("mkdir", "chmod", "fchmod"):
            printed[-1] = f"{int(self.arguments[-1]):#o}"
        return printed


def _flags(flags: int) -> str:
    names = [name for name in FLAG_NAMES if flags & getattr(os, name) == getattr(os, name)]
    return " | ".join(f"os.{name}" for name in names) or "os.O_RDONLY"


class Chooser:
    """The choices of one sequence."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.large = self.random.random() < 0.06
        self.opened: set[int] = set()
        self.mapped: set[int] = set()
        self.there: set[str] = set()

    def slot(self) -> int:
        """Choose a slot, mostly one that holds an open file."""
        if self.opened and self.random.random() < 0.9:
            return self.random.choice(sorted(self.opened))
        return self.random.randrange(SLOTS)

    def new_slot(self) -> int:
        """Choose any slot."""
        return self.random.randrange(SLOTS)

    def mapping(self) -> int:
        """Choose a slot, mostly one that holds a mapping."""
        if self.mapped and self.random.random() < 0.9:
            return self.random.choice(sorted(self.mapped))
        return self.random.randrange(SLOTS)

    def file(self) -> str:
        """Choose a name that is mostly a file, and mostly exists."""
        return self._name(FILES)

    def new_file(self) -> str:
        """Choose a name, existing or not; a few of them more often, so that handles meet on one file."""
        return self.random.choice(FILES[:2]) if self.random.random() < 0.6 else self.random.choice(ANY)

    def folder(self) -> str:
        """Choose a name that is mostly a folder."""
        return self.random.choice(FOLDERS)

    def any(self) -> str:
        """Choose a name, mostly one that exists."""
        return self._name(ANY)

    def _name(self, names: tuple[str, ...]) -> str:
        there = sorted(self.there.intersection(names))
        return self.random.choice(there if there and self.random.random() < 0.8 else names)

    def note(self, step: Step) -> None:
        """Remember what the step probably did, to choose names and slots that are worth a call."""
        call, arguments = step.call, step.arguments
        if call == "open":
            self.opened.add(int(arguments[0]))
            if int(arguments[2]) & os.O_CREAT:
                self.there.add(str(arguments[1]))
        elif call == "close":
            self.opened.discard(int(arguments[0]))
        elif call == "dup" and arguments[1] in self.opened:
            self.opened.add(int(arguments[0]))
        elif call == "map":
            self.mapped.add(int(arguments[0]))
        elif call in ("mkdir", "write_file"):
            self.there.add(str(arguments[0]))
        elif call in ("rmdir", "unlink"):
            self.there.discard(str(arguments[0]))
        elif call == "symlink":
            self.there.add(str(arguments[1]))
        elif call in ("rename", "rename_new") and arguments[0] in self.there:
            self.there.discard(str(arguments[0]))
            self.there.add(str(arguments[1]))
        elif call == SWITCH:
            self.opened.clear()
            self.mapped.clear()

    def key(self) -> int:
        """Choose which bytes to write."""
        return self.random.randrange(1, 60)

    def size(self) -> int:
        """Choose a number of bytes."""
        return self.random.choice(LARGE if self.large and self.random.random() < 0.4 else SIZES)

    def offset(self) -> int:
        """Choose an offset: near the beginning, at the edges of pages, chunks and granules, far after the end."""
        edge = self.random.choice((0, 0, 1, 100, 4096, 8192, 65_536, 131_072, 262_144))
        if self.large:
            edge = self.random.choice((edge, 1 << 20, 4 << 20, 8 << 20, (10 << 20) + 7))
        return max(0, edge + self.random.choice((0, 0, 0, -1, 1, 17)))

    def flags(self) -> int:
        """Choose flags for open."""
        flags = self.random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR, os.O_RDWR))
        extras = (
            (os.O_CREAT, 0.8), (os.O_EXCL, 0.1), (os.O_TRUNC, 0.2), (os.O_APPEND, 0.2),
            (os.O_NOFOLLOW, 0.05), (os.O_DIRECTORY, 0.03), (os.O_SYNC, 0.04),
        )  # fmt: skip
        for extra, share in extras:
            if self.random.random() < share:
                flags |= extra
        # Without O_CREAT the meaning of O_EXCL is undefined.
        return flags if flags & os.O_CREAT else flags & ~os.O_EXCL


Maker = Callable[[Chooser], tuple[Argument, ...]]

CONTENT: Final[dict[str, tuple[int, Maker]]] = {
    "open": (14, lambda c: (c.new_slot(), c.new_file(), c.flags(), c.random.choice(MODES))),
    "dup": (2, lambda c: (c.new_slot(), c.slot())),
    "close": (3, lambda c: (c.slot(),)),
    "read": (4, lambda c: (c.slot(), c.size())),
    "pread": (4, lambda c: (c.slot(), c.offset(), c.size())),
    "write": (9, lambda c: (c.slot(), c.key(), c.size())),
    "pwrite": (9, lambda c: (c.slot(), c.offset(), c.key(), c.size())),
    "lseek": (3, lambda c: (c.slot(), c.random.choice((-1, 0, 1)) * c.offset(), c.random.randrange(3))),
    "ftruncate": (4, lambda c: (c.slot(), c.offset())),
    "fsync": (3, lambda c: (c.slot(),)),
    "fdatasync": (1, lambda c: (c.slot(),)),
    "fstat": (3, lambda c: (c.slot(),)),
    "truncate": (3, lambda c: (c.file(), c.offset())),
    "read_direct": (2, lambda c: (c.file(), c.random.choice((0, 0, 1, 3, 16)), c.random.choice((1, 2, 40)))),
    "copy_range": (2, lambda c: (c.slot(), c.slot(), c.size())),
    "read_file": (3, lambda c: (c.file(),)),
    "write_file": (4, lambda c: (c.new_file(), c.key(), c.size())),
}
NAMES: Final[dict[str, tuple[int, Maker]]] = {
    "mkdir": (5, lambda c: (c.folder(), c.random.choice((0o755, 0o700, 0o777)))),
    "rmdir": (3, lambda c: (c.folder(),)),
    "unlink": (4, lambda c: (c.file(),)),
    "rename": (8, lambda c: (c.any(), c.random.choice((c.any(), c.random.choice(ANY))))),
    "rename_new": (2, lambda c: (c.any(), c.random.choice(ANY))),
    "symlink": (3, lambda c: (c.random.choice(TARGETS), c.random.choice(ANY))),
    "readlink": (1, lambda c: (c.any(),)),
    "stat": (2, lambda c: (c.any(),)),
    "lstat": (2, lambda c: (c.any(),)),
    "listdir": (3, lambda c: (c.random.choice(("", *FOLDERS)),)),
    "write_file": (4, lambda c: (c.new_file(), c.key(), c.size())),
}
ATTRIBUTES: Final[dict[str, tuple[int, Maker]]] = {
    "chmod": (3, lambda c: (c.any(), c.random.choice(MODES))),
    "fchmod": (2, lambda c: (c.slot(), c.random.choice(MODES))),
    "chown": (1, lambda c: (c.any(), c.random.choice((-1, 0, 1000)), c.random.choice((-1, 0, 1001)))),
    "utime": (4, lambda c: (c.any(), c.random.choice(PAST), c.random.random() < 0.7)),
    "futime": (3, lambda c: (c.slot(), c.random.choice(PAST))),
    "setxattr": (
        4,
        lambda c: (
            c.any(),
            c.random.choice("xyz"),
            c.key(),
            c.random.choice((0, 1, 20, 1000)),
            c.random.choice((0, 0, 0, os.XATTR_CREATE, os.XATTR_REPLACE)),
        ),
    ),
    "getxattr": (2, lambda c: (c.any(), c.random.choice("xyz"))),
    "listxattr": (2, lambda c: (c.any(),)),
    "removexattr": (2, lambda c: (c.any(), c.random.choice("xyz"))),
}
MAPPINGS: Final[dict[str, tuple[int, Maker]]] = {
    "map": (9, lambda c: (c.new_slot(), c.slot(), 1 + c.size(), c.random.random() < 0.7)),
    "map_read": (5, lambda c: (c.mapping(), c.random.choice((0, 0, c.offset())), 1 + c.size() // 3)),
    "map_write": (8, lambda c: (c.slot(), c.random.choice((0, 1, 50, c.offset())), c.key(), 1 + c.size() // 9)),
    "msync": (3, lambda c: (c.mapping(),)),
    "unmap": (3, lambda c: (c.mapping(),)),
}
MIXES: Final = (
    (CONTENT, NAMES, ATTRIBUTES),
    (CONTENT, NAMES),
    (CONTENT,),
    (NAMES, ATTRIBUTES),
    (CONTENT, CONTENT, MAPPINGS, NAMES),
)


def sequence(seed: int, *, mounts: int = 1) -> list[Step]:
    """Return the steps of a seed; with two mounts some of them go on at the other one."""
    chooser = Chooser(seed)
    menu = [
        (weight, name, maker) for family in chooser.random.choice(MIXES) for name, (weight, maker) in family.items()
    ]
    weights = [weight for weight, _, _ in menu]
    steps = [Step("mkdir", (name, 0o755)) for name in ("d", "d/e", "f") if chooser.random.random() < 0.7]
    for step in steps:
        chooser.note(step)
    first = [(0, name, CONTENT[name][1]) for name in ("write_file", "open", "write", "open")]
    chosen = chooser.random.choices(menu, weights, k=chooser.random.randint(4, 45))
    for _, name, maker in (*first, *chosen):
        step = Step(name, maker(chooser))
        steps.append(step)
        chooser.note(step)
        if chooser.random.random() < 0.06:
            steps.append(Step(CHECK))
        if mounts > 1 and chooser.random.random() < 0.06:
            steps.append(Step(SWITCH))
            chooser.note(steps[-1])
    return steps
