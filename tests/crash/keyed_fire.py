"""Keyed blobs under fire, with SIGKILL: `test_keyed_fire` runs a little of it, `make torture` ten minutes.

One life: the engine is started, half of the time with a step armed at which it dies.  Writers put, remove and read in
spaces of their own and in a shared one that is evicted to its quota all the time; one reader, which outlives engines,
matches, gets and loads; gc and compaction run one after the other.  The engine is killed.  In the next one every key
of every space is compared with the journals: what a writer's own space has is known, and a value of the shared space
may be missing only if the engine noted its eviction.

    python -m tests.crash.keyed_fire --minutes 10 --seed 7
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from engine.host.failpoints import UPKEEP_POINTS, WRITE_POINTS
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable
from tests.crash.keyed_clients import (
    POOL_BYTES,
    SHARED,
    collect,
    keys_in,
    read,
    read_some,
    spaces_of,
    write,
    write_in_trio,
)
from tests.crash.keyed_contents import Journal, KeyState, States, key_of, read_journal
from tests.crash.keyed_lake import BEGUN, DURABLE, STARTED, VARIABLE
from tests.crash.quiet_store import inspect
from tests.crash.small_engine import SmallEngine
from tests.e2e.served import WAIT_S
from tests.sim.__main__ import say

BLOCKING: Final = ("ann", "bob")
TRIO: Final = "tri"
WRITERS: Final = (*BLOCKING, TRIO)
CALL_S_MAX: Final = 15.0
"""Longest call of a client while engines come and go: it waits 5 s for an engine, as often as it tries again."""
EVICTED_MIN: Final = 300
"""Evictions beside which keys are read when nothing is killed."""
_READ_AT_ONCE: Final = 8
_MATCH_AT_ONCE: Final = 48
_FORK: Final = multiprocessing.get_context("fork")
_Process = Any  # multiprocessing's class of the chosen context


class KeyedFire:
    """One store with keyed blobs, over many lives of its engine.  `close` ends what runs."""

    def __init__(self, folder: Path, seed: str, bug: str = "none") -> None:
        self._folder = folder
        self._seed = seed
        self._chance = random.Random(seed)
        self._evicted = folder / "evicted"
        self.figures: Counter[str] = Counter()
        self._answered: dict[str, int] = {}
        """Answered keys of each space, by all journals."""
        os.environ[VARIABLE] = str(self._evicted)
        self._evicted.touch()
        self.engine = SmallEngine(folder, "--log-level", "error", started=False)
        self.engine.program = [sys.executable, "-m", "tests.crash.keyed_lake", bug]
        self._reader: _Process = None
        self._reader_ends = -1
        self._longest = _FORK.Value("d", 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.kill()
            self._reader.join()
        process = self.engine.process
        if process is not None and process.poll() is None:
            self.engine.kill()
        elif process is not None and process.stdout is not None:
            process.stdout.close()  # of an engine that died by itself

    def run(self, minutes: float, *, said: Callable[[str], None] = lambda _: None) -> None:
        """Live until the time is over, then look at the store; AssertionError says what was wrong."""
        until = time.monotonic() + minutes * 60
        self.engine.start()
        while time.monotonic() < until:
            self._life()
            if self.figures["lives"] % 20 == 0:
                said(str(self))
        self._end_reader()
        self._look()

    def read_beside(self, count: int) -> None:
        """Match and load so many keys, and more until many were evicted, beside writers, gc and compaction; no kill."""
        self.engine.start()
        answers, clients = self._begin_clients(self._seed)
        with connect(self.engine.server, check=Check.CRC32C) as lake, lake.pool(size_bytes=POOL_BYTES) as pool:
            spaces = spaces_of(lake, [*WRITERS, SHARED])
            until = time.monotonic() + 5 * WAIT_S
            while self.figures["matched"] + self.figures["loaded"] < count or self.figures["evicted"] < EVICTED_MIN:
                assert time.monotonic() < until, f"too slow: {self}"
                name = self._chance.choice((*WRITERS, SHARED, SHARED, SHARED))
                numbers = self._chance.sample(
                    range(keys_in(name)), _MATCH_AT_ONCE if self._chance.random() < 0.8 else 8
                )
                if len(numbers) == _MATCH_AT_ONCE:
                    spaces[name].match([key_of(name, number) for number in numbers])
                    self.figures["matched"] += len(numbers)
                else:
                    read_some(spaces[name], name, numbers, self._chance.choice((pool, None)))
                    self.figures["loaded"] += len(numbers)
                    self.figures["evicted"] = lake.status()["keyed"]["evicted"]
            assert all(client.is_alive() for client in clients), "a client ended: see its traceback"
        self.engine.kill()
        os.close(answers)
        _end_clients(clients)
        self.engine.start()
        self._check()
        self._look()

    def _life(self) -> None:
        """Load, kill, start again, check.  The engine serves when this begins and when it ends."""
        self.figures["lives"] += 1
        self._load(f"{self._seed} {self.figures['lives']}")
        point = self._chance.choice((*WRITE_POINTS, *UPKEEP_POINTS)) if self._chance.random() < 0.5 else ""
        failpoint = f"{point}:{self._chance.randrange(1, 30)}" if point else ""
        try:
            is_alive = self.engine.try_start(failpoint)
            if is_alive:
                self._check()
        except EngineUnreachable:
            is_alive = False
        if not is_alive:
            if self.engine.process is not None and self.engine.process.poll() is None:
                self.engine.wait()
            self.figures["died at a start or check"] += 1
            self.engine.start()
            self._check()

    # --- load ------------------------------------------------------------------------------------------

    def _load(self, seed: str) -> None:
        """Let clients work until the engine dies at its step, or is killed after some answers."""
        if self._reader is None:
            self._begin_reader()
        reading, clients = self._begin_clients(seed)
        wanted = self._chance.randrange(20, 160)
        until = time.monotonic() + WAIT_S
        while wanted > 0 and (told := os.read(reading, wanted)):
            wanted -= len(told)
            assert time.monotonic() < until, "the writers are slow"
        os.close(reading)
        self._kill(died=wanted > 0)
        _end_clients(clients)
        assert self._reader.is_alive(), "the reader failed: see its traceback"

    def _begin_clients(self, seed: str) -> tuple[int, list[_Process]]:
        """Begin the writers and the collector; returns a pipe with a byte for each answered batch, and the clients."""
        reading, writing = os.pipe()
        server, folder = self.engine.server, self._folder
        roles = [(write, name) for name in BLOCKING] + [(write_in_trio, TRIO)]
        clients = [
            _FORK.Process(target=role, args=(server, name, seed, folder, writing), name=name) for role, name in roles
        ]
        clients.append(_FORK.Process(target=collect, args=(server,), name="collector"))
        for client in clients:
            client.start()
        os.close(writing)
        return reading, clients

    def _kill(self, *, died: bool) -> None:
        process = self.engine.process
        assert process is not None
        if not died:
            self.engine.kill()
            self.figures["kills"] += 1
            return
        try:
            code = process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError("all writers gave up while the engine lives") from None
        assert code == -signal.SIGKILL, f"{self.engine.failpoint}: the engine ended with {code}"
        self.engine.wait()
        self.figures["died at a step"] += 1

    def _begin_reader(self) -> None:
        ended, self._reader_ends = os.pipe()
        os.set_inheritable(self._reader_ends, False)
        self._reader = _FORK.Process(
            target=_read_alone, args=(self._reader_ends, self.engine.server, WRITERS, self._seed, ended, self._longest)
        )
        self._reader.start()
        os.close(ended)

    def _end_reader(self) -> None:
        if self._reader is not None:
            os.close(self._reader_ends)
            self._reader.join(WAIT_S)
            assert self._reader.exitcode == 0, f"the reader ended with {self._reader.exitcode}"
            assert self._longest.value < CALL_S_MAX, f"a call of the reader took {self._longest.value:.1f} s"

    # --- check -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        with connect(self.engine.server) as lake:
            for name in (*WRITERS, SHARED):
                self._check_space(lake, name)
            report = lake.fsck()
            assert report["damage"] == 0, report

    def _check_space(self, lake: Lake, name: str) -> None:
        """Compare a space with the journals, and note what was found in them."""
        states: States = {}
        writers = WRITERS if name == SHARED else (name,)
        answered = sum(
            read_journal(self._folder / f"{writer}.journal", name, states, alone=name != SHARED) for writer in writers
        )
        space = spaces_of(lake, [name])[name]
        evicted = self._evictions(space.number)
        numbers = range(keys_in(name)) if name != SHARED else sorted(states)
        found: dict[int, str | None] = {}
        for first in range(0, len(numbers), _READ_AT_ONCE):
            found |= read_some(space, name, numbers[first : first + _READ_AT_ONCE], None)
        evicted_again = self._evictions(space.number)  # more may have gone while keys were read
        for number, label in found.items():
            state, key = states.get(number, KeyState()), key_of(name, number)
            if name != SHARED:
                assert key not in evicted_again, f"a value of space {name} was evicted below its quota"
                assert label in state.may_be, f"{name} {number} has {label}, not one of {state.may_be}"
                continue
            gone_at = max(evicted.get(key, -1), evicted_again.get(key, -1))
            assert label is None or label in state.labels, f"{name} {number} has {label}, which nobody put there"
            if label is None and state.held_at >= 0:
                assert gone_at >= state.held_at, f"{name} {number} was lost: nothing evicted it"
                self.figures["evicted keys told apart"] += 1
            if label is not None and state.stored:
                assert label == state.stored or gone_at >= state.stored_at, f"{name} {number} was replaced"
        self.figures[f"checked values of {'the shared space' if name == SHARED else 'own spaces'}"] += sum(
            label is not None for label in found.values()
        )
        self._answered[name] = answered
        if name != SHARED:
            journal = Journal(self._folder / f"{name}.journal")
            journal.found(name, found)
            journal.close()

    def _evictions(self, number: int) -> dict[bytes, float]:
        """Return the time of the last eviction of each key of a space: when it was durable, or its engine's life ended.

        The time of one that may be under way is still to come.
        """
        last: dict[bytes, float] = {}
        for line in self._evicted.read_bytes().splitlines():
            what, at, of, key = line.split()
            if what == STARTED:
                last = {gone: min(until, int(at)) for gone, until in last.items()}
            elif int(of) == number:
                last[bytes.fromhex(key.decode())] = int(at) if what == DURABLE else math.inf
        return last

    def _look(self) -> None:
        """Check every byte, with and without an engine: nothing is damaged, nothing is leaked."""
        with connect(self.engine.server) as lake:
            assert lake.fsck(full=True)["damage"] == 0
            for _ in range(2):
                lake.gc(compact=True)
            self.figures["evictions noted"] = self._evicted.read_bytes().count(BEGUN)
        self.engine.kill()
        for _ in range(2):
            found = inspect(self.engine.data)
            assert found.fsck["damage"] == 0, found.fsck
            assert found.leaked_bytes <= 0, found

    def __str__(self) -> str:
        figures = ", ".join(f"{count} {name}" for name, count in sorted(self.figures.items()))
        answered, longest_s = sum(self._answered.values()), self._longest.value
        return f"{answered} answered keys, {figures}; longest call of the reader {longest_s:.1f} s"


def _end_clients(clients: Sequence[_Process]) -> None:
    for client in clients:
        client.join(0.1)  # one that found something wrong prints it before it is ended
        client.kill()
        client.join()
        assert client.exitcode in (0, -signal.SIGKILL), f"{client.name} failed: see its traceback"


def _read_alone(not_mine: int, *arguments: Any) -> None:
    """Run the reader without the end of its pipe that its parent closes."""
    os.close(not_mine)
    read(*arguments)


def main() -> int:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.keyed_fire")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default=str(int(time.time())))
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="lake-") as folder, KeyedFire(Path(folder), asked.seed) as fire:
        try:
            fire.run(asked.minutes, said=say)
        except AssertionError as error:
            say(f"{error}\nagain, as far as the clock allows: python -m tests.crash.keyed_fire --seed {asked.seed}")
            say(f"FAILED after {fire}")
            return 1
        say(f"keyed blobs under fire for {asked.minutes:g} minutes: {fire}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
