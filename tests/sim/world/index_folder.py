"""The real folder that LMDB works in beside a simulated disk, and the states a power loss may leave it in.

LMDB writes the pages of a commit, syncs them, writes the meta page (less than a sector) and syncs that.  So between two
commits a power loss leaves the older meta page with any sectors of the newer one's pages, which nothing refers to, or
all of them and the newer meta page.  The file is copied at every commit; two copies, one commit apart, give every state
between.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
import weakref
from collections import Counter, deque
from functools import cache
from pathlib import Path
from typing import Final

from tests.sim.world.medium import PAGE, SECTOR

INDEX: Final = "index"
_COPIES: Final = 3
_MEMORY_FOLDER: Final = "/dev/shm"  # LMDB's syncs are free there
_META_PAGES: Final = 2
_TXNID: Final = struct.Struct("<Q")
_TXNID_OFFSET: Final = 144
"""Offset in a meta page: after 16 bytes of header, 24 of magic to size, two trees of 48, and the last page's number."""


_PREFIX: Final = "lake-sim-"


@cache
def _remove_orphans(parent: Path) -> None:
    """Remove the folders of processes that ended without cleaning up: killed, or as those of a pool do."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)


class RealIndex:
    """A folder of the machine, made when first needed and removed with this object."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._file_number = 0
        self._copies: deque[bytes] = deque(maxlen=_COPIES)

    def path(self, path: str) -> Path:
        """Return the real path of a path of the simulated disk."""
        if self._folder is None:
            parent = _MEMORY_FOLDER if os.path.isdir(_MEMORY_FOLDER) else None
            if parent is not None:
                _remove_orphans(Path(parent))
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / path

    @property
    def exists(self) -> bool:
        """True when there is an index."""
        return self._folder is not None and self.path(INDEX).exists()

    def read(self) -> bytes | None:
        """Return the file as it is now, which is what a killed process leaves."""
        try:
            return self.path(f"{INDEX}/data.mdb").read_bytes()
        except FileNotFoundError:
            return None

    def put(self, content: bytes | None) -> None:
        """Begin with that file, or with none."""
        if content is not None:
            self.path(INDEX).mkdir(mode=0o700)
            self.path(f"{INDEX}/data.mdb").write_bytes(content)
            self._note_file()
            self._copies.append(content)

    def note_commit(self) -> None:
        """Note that LMDB has committed: its file is one of the states that a power loss may leave."""
        content = self.read()
        if content is not None:
            self._note_file()
            self._copies.append(content)

    def _note_file(self) -> None:
        """Forget the copies when the index was built anew: the new file's commits do not continue the old one's."""
        number = self.path(f"{INDEX}/data.mdb").stat().st_ino
        if number != self._file_number:
            self._copies.clear()
        self._file_number = number

    def after_power_loss(self, rng: random.Random, met: Counter[str]) -> bytes | None:
        """Return the last commit, the one before it, one that was under way, or nothing; `met` counts which."""
        if not self.exists:
            return None
        left, state = self._left(rng)
        met[f"index {left}"] += 1
        return state

    def _left(self, rng: random.Random) -> tuple[str, bytes | None]:
        """Return the state that is left, in words and bytes."""
        choice = rng.randrange(6)
        current = self.read()
        if current is not None:
            self._note_file()
        states = list(self._copies)
        if current is not None and states and current != states[-1]:
            states.append(current)  # a commit during which the power failed
        if choice < 3 and len(states) > 1 and _commits(states[-2]) + 1 == _commits(states[-1]):
            return _half_written(rng, states[-2], states[-1])
        if choice == 5 or not self._copies:
            return "lost", None
        is_older = choice == 4 and len(self._copies) > 1
        what = "as at the commit before the last" if is_older else "as at the last commit"
        return what, self._copies[-2 if is_older else -1]


def _commits(content: bytes) -> int:
    """Return the number of the newest commit in LMDB's file; -1 when it has no meta pages."""
    if len(content) < _META_PAGES * PAGE:
        return -1
    return max(int(_TXNID.unpack_from(content, page * PAGE + _TXNID_OFFSET)[0]) for page in range(_META_PAGES))


def _half_written(rng: random.Random, before: bytes, after: bytes) -> tuple[str, bytes]:
    """Keep, drop or tear pages of the later commit; its meta page is only there when all are.  Returns words, too."""
    kept = rng.choice((0.0, 0.5, 0.9, 1.0))
    if kept == 1.0 and rng.randrange(2):
        return "with a commit that was not answered", after
    unit = rng.choice((SECTOR, PAGE))
    end = len(after) if kept == 1.0 else max(len(before), rng.randrange(len(after) // PAGE + 1) * PAGE)
    state = bytearray(before.ljust(end, b"\0"))
    for offset in range(_META_PAGES * PAGE, end, unit):
        piece = after[offset : offset + unit]
        if piece != state[offset : offset + unit] and rng.random() < kept:
            state[offset : offset + len(piece)] = piece
    return "with torn pages" if unit == SECTOR else "with dropped pages", bytes(state)
