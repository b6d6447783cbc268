"""An engine with small files that may be told at which step to die: see `engine.failpoints`."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.failpoints import POINTS, START_POINTS, UPKEEP_POINTS, VARIABLE
from tests.e2e.served import WAIT_S, Served, environment

SMALL_LAKE: Final = [sys.executable, "-m", "tests.crash.small_lake"]
_RARE: Final = ("segment.header-synced", "segment.durable", "segment.full", "journal-file.")
REBUILDS: Final = ("recovery.rebuilt", "recovery.index-replaced")
"""Steps that only a start without an index comes to."""


class SmallEngine(Served):
    """As `Served`, with small files and S3; `start` is not the only thing that may fail."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.failpoint = ""
        self.program = SMALL_LAKE
        self.wrapped: Callable[[list[str]], list[str]] = list
        """What the command becomes: under another program."""
        super().__init__(folder, *options)

    def start(self) -> None:
        """Start; the engine must come up."""
        self.failpoint = ""
        assert self.try_start(), f"the engine ended with {self.wait()}: {self.printed}"

    def try_start(self, failpoint: str = "") -> bool:
        """Start with that step armed, "" for none; whether the engine serves, or has died there."""
        self.failpoint = failpoint
        command = [*self.program, "serve", "--data", str(self.data), "--socket", str(self.socket)]
        self.process = subprocess.Popen(
            self.wrapped([*command, "--admin", "off", "--s3", "127.0.0.1:0", *self._options]),
            stdout=subprocess.PIPE,
            text=True,
            env=environment("unix:/nowhere/lake.sock") | ({VARIABLE: failpoint} if failpoint else {}),
        )
        assert self.process.stdout is not None
        self.printed = []
        for line in self.process.stdout:
            self.printed.append(line.rstrip("\n"))
            if line == "ready\n":
                return True
        code = self.process.wait(WAIT_S)
        assert failpoint, f"the engine ended with {code}: {self.printed}"
        assert code == -signal.SIGKILL, f"{failpoint}: the engine ended with {code}: {self.printed}"
        self.process.stdout.close()
        return False

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(WAIT_S)


def some_failpoint(generator: random.Random) -> str:
    """A step, and how often it is passed before: as a cycle of load comes to it."""
    point = generator.choice(POINTS)
    if point in START_POINTS:
        count = 1
    elif point in UPKEEP_POINTS or point.startswith(_RARE):
        count = generator.randrange(1, 4)
    else:
        count = generator.randrange(1, 40)
    return f"{point}:{count}"
