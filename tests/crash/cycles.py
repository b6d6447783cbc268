"""Cycles of load, SIGKILL and check on one store: `test_kill_cycles` runs a few of them, `make torture` a thousand.

One cycle: the engine is started, more than half of the time with a step armed at which it dies
(`engine.host.failpoints`).  Writers write through the native protocol and through S3, one of them versions; a reader
reads through both; one client collects garbage and compacts, one scrubs.  The engine is killed, at its step or after a
number of acknowledgements.  It is started again, and everything is compared with the writers' journals.  After some
cycles the store is examined without an engine: what gc leaves and fsck finds, twice.

    python -m tests.crash.cycles --cycles 1000 --seed 7
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self
from urllib.parse import urlsplit

from engine.host.failpoints import FIRST_START_POINTS, POINTS, REBUILD_POINTS, UPKEEP_POINTS
from engine.superblock.secret_files import TOKEN_FILE
from lakefs.client.connect import connect
from lakefs.errors import EngineUnreachable
from tests.crash.bystanders import collect_all_the_time, read_all_the_time, scrub_all_the_time
from tests.crash.quiet_store import inspect
from tests.crash.s3_hand import S3Hand
from tests.crash.small_engine import WarmEngine, some_failpoint
from tests.crash.store_check import check_store, check_writer
from tests.crash.version_writer import BUCKET as KEPT, check_versions, write_versions
from tests.crash.writer import write, write_with
from tests.e2e.s3_client import KEYS_ARE_FRESH_S, url_of
from tests.e2e.s3_raw import Signer
from tests.e2e.served import WAIT_S

NATIVE: Final = ("ann", "bob")
S3: Final = ("sue", "tom")
WRITERS: Final = NATIVE + S3
_ARMED_CHANGES: Final = 100
"""Acknowledged changes after which an armed step counts as missed."""
_ARMED_CHANGES_OF_UPKEEP: Final = 400
"""The same for a step of upkeep: compaction finds something to move only after a cycle of gc or two."""
_LEAVES_A_FILE: Final = ("journal-file.renamed", "journal-file.durable")
_LMDB_HEADERS_BYTES: Final = 8192
_FORK: Final = multiprocessing.get_context("fork")
_Process = Any  # multiprocessing's class of the chosen context


@dataclass
class Tally:
    """The results of the cycles."""

    began: float = field(default_factory=time.monotonic)
    cycles: int = 0
    acknowledged: int = 0
    at_steps: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    steps_missed: int = 0
    looks: int = 0

    @property
    def never_reached(self) -> list[str]:
        """Named steps at which no engine died."""
        return [point for point in POINTS if not self.at_steps[point]]

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        return (
            f"{self.cycles} cycles of SIGKILL in {seconds:.0f} s, {sum(self.at_steps.values())} of them at "
            f"{len(self.at_steps)} named steps ({self.steps_missed} armed steps were not reached), "
            f"{self.acknowledged} acknowledged changes held, {self.looks} looks without an engine; "
            f"never reached: {', '.join(self.never_reached) or 'none'}"
        )


class Cycles:
    """One store under cycles.  `close` ends what runs."""

    def __init__(self, folder: Path, seed: str) -> None:
        self._folder = folder
        self._seed = seed
        self._generator = random.Random(seed)
        self.tally = Tally()
        self._last_step = ""
        self.engine = WarmEngine(folder, "--log-level", "warning")
        self._key = json.loads(self.engine.good("key", "create", "--json").text)
        with connect(self.engine.server) as client:
            client.create_bucket("crash")
            client.create_bucket(KEPT)
            client.set_bucket(KEPT, versioning="enabled")
        time.sleep(KEYS_ARE_FRESH_S)
        self.engine.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def run(self, count: int, *, look_every: int, said: Callable[[str], None] = lambda _: None) -> None:
        """Run so many cycles; an AssertionError says how to repeat the one that failed."""
        for number in range(count):
            try:
                self._cycle(number)
                if (number + 1) % look_every == 0:
                    self._look()
            except AssertionError as error:
                again = f"python -m tests.crash.cycles --seed {self._seed} --cycles {number + 1}"
                raise AssertionError(f"cycle {number}: {error}\nagain, as far as the clock allows: {again}") from error
            self.tally.cycles += 1
            if (number + 1) % look_every == 0:
                said(str(self.tally))
        self.engine.start()
        self._check()
        self.engine.kill()
        self._look()

    def _cycle(self, number: int) -> None:
        """Start, check what the last cycle left, load, kill."""
        failpoint = self._chosen_step()
        point = failpoint.partition(":")[0]
        if point in FIRST_START_POINTS:
            self._first_start(failpoint)
            failpoint = point = ""
        if point in REBUILD_POINTS:
            with (self.engine.data / "index" / "data.mdb").open("r+b") as index:
                index.write(bytes(_LMDB_HEADERS_BYTES))
        died = not self._start_and_check(failpoint)
        if not died:
            died = self._load(f"{self._seed} {number}", failpoint)
        if died:
            self._died_at(point)
        self.tally.steps_missed += bool(failpoint) and not died
        if self.engine.process is not None and self.engine.process.poll() is None:
            self.engine.kill()  # the first one died at a start; this one was started for the check

    def _chosen_step(self) -> str:
        if self._last_step in _LEAVES_A_FILE:
            self._last_step = ""
            return "recovery.stale-removed:1"
        return some_failpoint(self._generator, self.tally.tried) if self._generator.random() < 0.6 else ""

    def _died_at(self, point: str) -> None:
        self.tally.at_steps[point] += 1
        self._last_step = point

    def _first_start(self, failpoint: str) -> None:
        """Start on a new store, which must die at the step; the next start must serve."""
        with TemporaryDirectory(prefix="lake-first-") as name:
            first = self.engine.another(Path(name), "--native", "127.0.0.1:0")
            assert not first.try_start(failpoint), f"{failpoint} was not reached"
            self._died_at(failpoint.partition(":")[0])
            first.start()
            with connect(first.server) as client:
                client.put("bkt/x", b"content", create_bucket=True)
            first.kill()
            assert (first.data / TOKEN_FILE).read_text().strip()
            first.start()
            with connect(first.server) as client:
                assert client.get("bkt/x") == b"content"
                assert client.fsck(full=True)["damage"] == 0
            first.kill()

    def _start_and_check(self, failpoint: str) -> bool:
        """Start the engine and check the store; return whether that engine still lives.

        If it died at its step on the way, another one, with no step armed, has served the check.
        """
        try:
            if self.engine.try_start(failpoint):
                self._check()
                return True
        except EngineUnreachable:
            assert failpoint, "the engine is gone"
            assert self.engine.wait() == -signal.SIGKILL, failpoint
        self.engine.start()
        self._check()
        return False

    def _check(self) -> None:
        for writer in WRITERS:
            journal = self._folder / f"{writer}.journal"
            self.tally.acknowledged += check_writer(self.engine.server, journal, writer, self.engine.failpoint)
        check_store(self.engine.server, WRITERS, self.engine.failpoint)
        self.tally.acknowledged += check_versions(
            self._signer(), self._folder / "versions.journal", self.engine.failpoint
        )

    def _load(self, seed: str, failpoint: str) -> bool:
        """Let clients work until the engine dies at its step (return True) or is killed after some acknowledgements."""
        reading, writing = os.pipe()
        writers, others = self._clients(seed, writing)
        os.close(writing)
        wanted = self._changes_until_killed(failpoint.partition(":")[0])
        while wanted > 0 and (told := os.read(reading, wanted)):
            wanted -= len(told)
        died = wanted > 0
        process = self.engine.process
        assert process is not None
        if died:
            try:
                code = process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"all writers gave up while the engine lives ({failpoint})") from None
            assert code == -signal.SIGKILL, f"{failpoint}: the engine ended with {code}"
            self.engine.wait()
        else:
            self.engine.kill()
        for client in (*writers, *others):
            client.join(0.05)  # a client that found something wrong prints it before it is ended
            client.kill()
            client.join()
            assert client.exitcode in (0, -signal.SIGKILL), f"{client.name} failed: see its traceback"
        os.close(reading)
        return died

    def _changes_until_killed(self, point: str) -> int:
        if not point:
            return self._generator.randrange(3, 60)
        return _ARMED_CHANGES_OF_UPKEEP if point in UPKEEP_POINTS else _ARMED_CHANGES

    def _clients(self, seed: str, told: int) -> tuple[list[_Process], list[_Process]]:
        server, folder, signer = self.engine.server, self._folder, self._signer()
        writers = [
            _FORK.Process(target=write, args=(server, name, seed, folder / f"{name}.journal", told), name=name)
            for name in NATIVE
        ]
        writers += [
            _FORK.Process(target=_write_s3, args=(signer, name, seed, folder / f"{name}.journal", told), name=name)
            for name in S3
        ]
        writers.append(
            _FORK.Process(
                target=write_versions, args=(signer, seed, folder / "versions.journal", told), name="versions"
            )
        )
        for writer in WRITERS:
            (folder / f"{writer}.journal").touch()
        others = [
            _FORK.Process(target=_without, args=(told, read_all_the_time, server, signer, folder, WRITERS, seed)),
            _FORK.Process(target=_without, args=(told, collect_all_the_time, server)),
            _FORK.Process(target=_without, args=(told, scrub_all_the_time, server)),
        ]
        for client in (*writers, *others):
            client.start()
        return writers, others

    def _signer(self) -> Signer:
        parts = urlsplit(url_of(self.engine))
        assert parts.hostname is not None
        assert parts.port is not None
        return Signer(self._key["access_key"], self._key["secret_key"], (parts.hostname, parts.port))

    def _look(self) -> None:
        """Examine the store without an engine: no damage, no leak, and a second look finds what the first left."""
        first, second = inspect(self.engine.data), inspect(self.engine.data)
        for found in (first, second):
            assert found.fsck["damage"] == 0, found.fsck
            assert found.leaked_bytes <= 0, found
        assert second.gc.freed_chunks == 0, second
        assert second.fsck["findings"] == [], second.fsck
        self.tally.looks += 2


def _write_s3(signer: Signer, writer: str, seed: str, journal: Path, told: int) -> None:
    write_with(S3Hand(signer), writer, seed, journal, told)


def _without(told: int, target: Callable[..., None], *arguments: object) -> None:
    """Run `target` without the writers' pipe, whose end means that no writer is left."""
    os.close(told)
    target(*arguments)


def main() -> int:
    """Run cycles and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.cycles")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--look-every", type=int, default=25)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="lake-") as name, Cycles(Path(name), arguments.seed) as cycles:
        cycles.run(arguments.cycles, look_every=arguments.look_every, said=_say)
    _say(str(cycles.tally))
    return 0


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    raise SystemExit(main())
