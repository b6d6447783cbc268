"""An engine with small files that can be made to die at a given step: see `engine.host.failpoints`."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.host.failpoints import FIRST_START_POINTS, POINTS, REBUILD_POINTS, START_POINTS, UPKEEP_POINTS, VARIABLE
from tests.e2e.served import WAIT_S, Process, Served, environment
from tests.warm_lake import WarmLake

SMALL_LAKE: Final = [sys.executable, "-m", "tests.crash.small_lake"]
PLANTED_LAKE: Final = [sys.executable, "-m", "tests.crash.planted_lake"]
_RARE: Final = ("segment.header-synced", "segment.durable", "segment.full", "journal-file.")


class SmallEngine(Served):
    """Like `Served`, with small files and S3, and with a start that may fail, `try_start`."""

    def __init__(self, folder: Path, *options: str, started: bool = True) -> None:
        self.failpoint = ""
        self.program = SMALL_LAKE
        self.wrapped: Callable[[list[str]], list[str]] = list
        """Wraps the command, to run it under another program."""
        super().__init__(folder, *options, started=started)

    def start(self) -> None:
        """Start; the engine must come up."""
        self.failpoint = ""
        assert self.try_start(), f"the engine ended with {self.wait()}: {self.printed}"

    def try_start(self, failpoint: str = "") -> bool:
        """Start with that step armed, "" for none; return whether the engine serves, or died there."""
        self.failpoint = failpoint
        arguments = ["serve", *self.data_options, "--socket", str(self.socket), "--admin", "off"]
        armed = {VARIABLE: failpoint} if failpoint else {}
        self.process = self._spawn(
            [*arguments, "--s3", "127.0.0.1:0", *self._options], environment("unix:/nowhere/lake.sock") | armed
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

    def _spawn(self, arguments: list[str], env: dict[str, str]) -> Process:
        command = self.wrapped([*self.program, *arguments])
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    def wait(self) -> int:
        """Return its exit code, once it has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(WAIT_S)


class WarmEngine(SmallEngine):
    """Like `SmallEngine`, but forked from a process that has most of it imported, unless it has its own program."""

    def __init__(self, folder: Path, *options: str, started: bool = True, warm: WarmLake | None = None) -> None:
        self.warm = WarmLake(small=True) if warm is None else warm
        super().__init__(folder, *options, started=started)

    def another(self, folder: Path, *options: str) -> WarmEngine:
        """Return one that is not started, forked from the same process, which this one closes."""
        other = WarmEngine(folder, *options, started=False, warm=self.warm)
        other.program = self.program
        return other

    def close(self) -> None:
        """Kill the engine if it runs, and end the process that it was forked from."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()  # of an engine that died by itself
        self.warm.close()

    def _spawn(self, arguments: list[str], env: dict[str, str]) -> Process:
        if self.program is not SMALL_LAKE:
            return super()._spawn(arguments, env)
        return self.warm.start(arguments, env)


def some_failpoint(generator: random.Random, tries: Counter[str]) -> str:
    """Choose one of the steps armed least, and at which pass it kills: a number that a cycle of load reaches."""
    least = min(tries[point] for point in POINTS)
    point = generator.choice([point for point in POINTS if tries[point] == least])
    tries[point] += 1
    if point in (*START_POINTS, *REBUILD_POINTS, *FIRST_START_POINTS) or generator.random() < 0.4:
        count = 1
    elif point in UPKEEP_POINTS or point.startswith(_RARE):
        count = generator.randrange(1, 4)
    else:
        count = generator.randrange(1, 40)
    return f"{point}:{count}"
