"""The real folder that LMDB works in beside a simulated disk, and the states a power loss may leave it in."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import weakref
from collections import deque
from pathlib import Path
from typing import Final

INDEX: Final = "index"
_COPIES: Final = 3
_MEMORY_FOLDER: Final = "/dev/shm"  # LMDB's syncs are free there


class RealIndex:
    """A folder of the machine, made when first needed and removed with this object."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._copies: deque[bytes] = deque(maxlen=_COPIES)

    def path(self, path: str) -> Path:
        """The real path of a path of the simulated disk."""
        if self._folder is None:
            parent = _MEMORY_FOLDER if os.path.isdir(_MEMORY_FOLDER) else None
            self._folder = Path(tempfile.mkdtemp(prefix="lake-sim-", dir=parent))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / path

    @property
    def exists(self) -> bool:
        """Whether there is an index."""
        return self._folder is not None and self.path(INDEX).exists()

    def read(self) -> bytes | None:
        """The file as it is now, which is what a killed process leaves."""
        try:
            return self.path(f"{INDEX}/data.mdb").read_bytes()
        except FileNotFoundError:
            return None

    def put(self, content: bytes | None) -> None:
        """Begin with that file, or with none."""
        if content is not None:
            self.path(INDEX).mkdir(mode=0o700)
            self.path(f"{INDEX}/data.mdb").write_bytes(content)
            self._copies.append(content)

    def note_commit(self) -> None:
        """LMDB has committed: its file is one of the states a power loss may leave."""
        content = self.read()
        if content is not None:
            self._copies.append(content)

    def after_power_loss(self, rng: random.Random) -> bytes | None:
        """The last commit, the one before it (less often), or nothing."""
        choice = rng.randrange(4)
        if choice == 3 or not self._copies:
            return None
        return self._copies[-2] if choice == 2 and len(self._copies) > 1 else self._copies[-1]
