"""Compares processes on several mounts with the same processes on a local folder: the same steps, the same results.

One step ends before the next begins, whichever process does it, so the local folder's result is the right one.  It must
be the mount's at once for whatever opens, makes, changes, removes or renames.  Two kinds of answers may be older for a
while, as the kernel gives them from its caches and asks nobody:

- what `stat`, `readlink` and a listing say;
- a name's absence, presence or kind, as the error of any step, where another process has changed that name.

Such a step is done again until its answer is the right one; it must be in the end.  A step that succeeds is never done
again: nothing that succeeds may rest upon an older answer.  At the end all mounts must show the tree.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mount.model import INNER, POLL_S, SETTLE_S, Difference
from tests.mount.shared import place
from tests.mount.shared.oracle import Oracle
from tests.mount.shared.steps import CUT, KILL, OF_TREE, READS, RankStep, paths_of
from tests.mount.shared.worker import Worker, WorkerHangs
from tests.mount.snapshot import Tree, difference, tree
from tests.mount.steps import Step

OLDER: Final = ("ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ELOOP", "EINVAL")
"""Errors that the kernel gives for a name that it remembers otherwise."""


@dataclass(frozen=True)
class SharedGround:
    """A plain folder, and a folder of one bucket on each mount with the process that works there."""

    plain: Path
    mounts: tuple[Path, ...]
    workers: Sequence[Worker]
    cut: Callable[[int], None] = lambda rank: None
    """Loses the connection of a mount."""
    kill: Callable[[int], None] = lambda rank: None
    """Kills a mount and mounts it again."""


def run(steps: Sequence[RankStep], ground: SharedGround, name: str, *, settle_s: float = SETTLE_S) -> Difference | None:
    """Run a sequence in new folders called `name`, which are removed at the end; None when nothing differs.

    `settle_s`: how long an answer may be older than it should be.
    """
    shared = _Shared(ground, name, settle_s)
    found: Difference | None = None
    try:
        for position, (rank, step) in enumerate(steps):
            if what := shared.do(rank, step):
                return Difference(position, what)
        if what := shared.finish():
            found = Difference(len(steps), what)
    except WorkerHangs as error:
        found = Difference(1 << 30, str(error))
    finally:
        shared.clean_up()
    return found


class _Shared:
    """One sequence being run."""

    def __init__(self, ground: SharedGround, name: str, settle_s: float) -> None:
        self._ground = ground
        self._settle_s = settle_s
        self._plain = ground.plain / name
        self._outer = [folder / name for folder in ground.mounts]
        (self._plain / INNER).mkdir(parents=True)
        (self._outer[0] / INNER).mkdir(parents=True)
        for outer in self._outer:
            _wait(lambda outer=outer: "" if os.path.isdir(outer / INNER) else "no folder")  # type: ignore[misc]
        self._oracle = Oracle(self._plain / INNER, len(self._outer))
        self._changes: list[tuple[int, set[str]]] = []
        """Each step that changed names: its rank, and the paths that came, went or changed their kind."""
        self._changed_by: set[int] = set()
        """Ranks that have changed anything."""

    def do(self, rank: int, step: Step) -> str:
        """Do a step on both sides; return the difference, empty when they agree."""
        if step.call == CUT:
            self._ground.cut(rank)
            return ""
        if step.call == KILL:
            self._kill(rank)
            return ""
        if not self._oracle.does(rank, step):
            return ""
        if step.call == "read_all":
            got = self._call(rank, step)
            is_right = self._oracle.may_show(rank, int(step.arguments[0]), got)
            return "" if is_right else f"an open file shows {_short(got)}"
        before = self._oracle.names()
        expected = self._oracle.do(rank, step)
        self._note(rank, step, before)
        got = self._call(rank, step)
        until = time.monotonic() + self._settle_s
        while got != expected and self._may_be_older(rank, step, expected, got):
            if time.monotonic() > until:
                return f"expected {_short(expected)}, got {_short(got)} even after {self._settle_s:.0f} s"
            time.sleep(POLL_S)
            got = self._call(rank, step)
        return "" if got == expected else f"expected {_short(expected)}, got {_short(got)}"

    def _call(self, rank: int, step: Step) -> object:
        folder = str(self._outer[rank] / INNER)
        return self._ground.workers[rank].call(place.do, folder, step.call, step.arguments)

    def _kill(self, rank: int) -> None:
        self._oracle.lose(rank)
        self._ground.kill(rank)
        self._ground.workers[rank].call(place.leave, str(self._outer[rank] / INNER))

    def _note(self, rank: int, step: Step, before: dict[str, tuple[str, int]]) -> None:
        after = self._oracle.names()
        changed = {
            path for path in {*before, *after} if before.get(path, ("",))[0] != after.get(path, ("",))[0]
        }  # fmt: skip
        # A link's target may have changed though its name and kind have not.
        changed |= {path for path, found in after.items() if found[0] == "link" and before.get(path) != found}
        if changed:
            self._changes.append((rank, changed))
        if step.call not in READS:
            self._changed_by.add(rank)

    def _may_be_older(self, rank: int, step: Step, expected: object, got: object) -> bool:
        if step.call in READS and self._changed_by - {rank}:
            return True
        if step.call in ("pwrite", "fsync", "close") or not _is_older_answer(step, expected, got):
            return False
        concerned = self._concerned(step)
        by_others = [paths for other, paths in self._changes if other != rank]
        if step.call in OF_TREE:
            below = tuple(f"{path}/" for path in paths_of(step))
            if any(path.startswith(below) for paths in by_others for path in paths):
                return True
        return any(concerned & paths for paths in by_others)

    def _concerned(self, step: Step) -> set[str]:
        """Return the paths that a step's paths lead through, and where links on the way lead."""
        found: set[str] = set()
        pending = paths_of(step)
        links = {name for _, paths in self._changes for name in paths}
        for path in pending:
            parts = path.split("/")
            found.update("/".join(parts[:count]) for count in range(1, len(parts) + 1))
        folder = self._plain / INNER
        if any(os.path.islink(folder / path) for path in found):
            return found | links
        return found

    # --- the end -------------------------------------------------------------------------------------

    def finish(self) -> str:
        """Close all; then every mount must show the tree."""
        for rank in range(len(self._outer)):
            for slot in self._oracle.open_slots(rank):
                if what := self.do(rank, Step("close", (slot,))):
                    return f"closing slot {slot} of rank {rank} at the end: {what}"
        expected = tree(str(self._plain))
        for rank, outer in enumerate(self._outer):
            if what := _wait(lambda outer=outer: _differs(expected, outer), self._settle_s):  # type: ignore[misc]
                return f"on mount {rank}: {what}"
        return ""

    def clean_up(self) -> None:
        """Remove what the sequence made."""
        for rank, outer in enumerate(self._outer):
            self._oracle.lose(rank)
            try:
                self._ground.workers[rank].call(place.leave, str(outer / INNER))
            except WorkerHangs:
                return
        shutil.rmtree(self._plain)
        _wait(lambda: _removed(self._outer[0]))


def _differs(expected: Tree, folder: Path) -> str:
    try:
        return difference(expected, tree(str(folder)))
    except OSError as error:
        return f"the tree cannot be read: {error}"


def _removed(folder: Path) -> str:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return "" if not os.path.lexists(folder) else "a name in it was removed elsewhere"
    except OSError as error:
        return str(error)
    return ""


def _is_older_answer(step: Step, expected: object, got: object) -> bool:
    """Return True if the kernel alone may have answered so, with no change made."""
    if _is_error(got):
        assert isinstance(got, tuple)
        return got[1] in OLDER or (got[1] == "ENOTEMPTY" and step.call in ("remove_all", "rename", "rename_new"))
    # Two names of what the kernel takes for one file: it renames nothing, and succeeds.
    return step.call in ("rename", "rename_new") and expected == (OSError, "ENOENT")


def _is_error(came: object) -> bool:
    return isinstance(came, tuple) and came[:1] == (OSError,)


def _short(came: object) -> str:
    if isinstance(came, bytes) and len(came) > 24:
        return f"{len(came)} bytes {came[:24]!r}..."
    if isinstance(came, tuple) and came[:1] == (OSError,):
        return str(came[1])
    return repr(came)


def _wait(check: Callable[[], str], limit_s: float = SETTLE_S) -> str:
    until = time.monotonic() + limit_s
    while (what := check()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return what
