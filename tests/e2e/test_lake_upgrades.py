"""Processes of neighbouring releases serve one lake together, and one after the other is upgraded under load."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import lakefs
from tests.e2e.served import Process, environment
from tests.e2e.test_lake_heads import heads_of
from tests.e2e.test_lake_on_devices import ServedLake
from tests.e2e.test_lake_on_machines import eventually

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
OPTIONS: Final = ("--protect", "2+1", "--accept-loss", "--heads", "2")
SIZES: Final = (100, 70_000, 600_000)


class Upgraded(ServedLake):
    """A lake each of whose processes is of the release that `release` names when it starts."""

    def __init__(self, folder: Path, devices: list[Path], release: str) -> None:
        self.release_file = folder / "release"
        self.release(release)
        super().__init__(folder, devices, *OPTIONS, start=False)

    def release(self, name: str) -> None:
        self.release_file.write_text(name)

    def begin_to_serve(self) -> Process:
        served = ["serve", *self.data_options, "--socket", str(self.socket), "--admin", "off", "--s3", "off"]
        command = [sys.executable, "-m", "tests.neighbour", str(self.release_file), *served, *self._options]
        found = environment("unix:/nowhere/lake.sock")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=found)
        return self.process

    def upgrade_member(self, number: int, release: str) -> None:
        """Restart a member, cleanly; return when it is up, and has what it missed."""
        self.release(release)
        [before] = self.members(number)
        os.kill(before, signal.SIGTERM)
        eventually(lambda: before not in self.members(number) and self.is_up(number), f"member {number} is not back")
        eventually(lambda: not self.status()["walker"]["dirty_partitions"], f"member {number} is not healed")

    def upgrade_head(self, index: int, release: str) -> None:
        """Restart a head, cleanly; return when there are two again."""
        self.release(release)
        before = heads_of(self)[index]
        os.kill(before, signal.SIGTERM)
        eventually(lambda: len(set(heads_of(self)) - {before}) == 2, "the head is not back")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.good("cluster", "status", "--json").out)
        return found

    def is_up(self, number: int) -> bool:
        found = self.status()
        folder = found["folders"][number - 1]
        up = {member["id"] for member in found["members"] if member["up"]}
        return bool(folder["serves"]) and folder["member"] in up


class Load:
    """Clients that put, read and look keys up, and keep what fails."""

    def __init__(self, lake_: Upgraded) -> None:
        self.failures: list[str] = []
        self.rounds = self.hits = 0
        self._server = lake_.server
        self._ending = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run for the block."""
        self._ending.clear()
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()
        assert self.failures == []

    def _run(self, number: int) -> None:
        choose = random.Random(number + 100 * self.rounds)
        try:
            while not self._ending.wait(0.1):
                self._round(f"{number}-{self.rounds}", choose)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - told when the load ends
            self.failures.append(repr(error))

    def _round(self, name: str, choose: random.Random) -> None:
        with lakefs.connect(self._server) as client:
            for size in SIZES:
                payload = choose.randbytes(size)
                client.put(f"bucket/{name}-{size}", payload)
                assert client.get(f"bucket/{name}-{size}") == payload
            space = client.space("space")
            key, value = choose.randbytes(32), choose.randbytes(4096)
            space.put_many([key], [value])
            found = bytearray(len(value))
            [length] = space.get_many_into([key], [found])
            assert not length or found == value, "keys of a member that is away are misses"
            self.hits += bool(length)


def test_a_lake_is_upgraded_process_by_process_under_load(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(5)]  # a head may take some seconds to find a member again
    lake_ = Upgraded(tmp_path, folders, "previous")
    lake_.start()
    try:
        lake_.good("bucket", "create", "bucket")
        lake_.good("kv", "set", "space", "--quota", "64M")
        load = Load(lake_)
        with load.running():
            lake_.upgrade_member(1, "today")
            lake_.upgrade_member(2, "next")
            lake_.upgrade_head(0, "today")
        lake_.release("today")
        assert lake_.stop() == 0
        lake_.start()
        with load.running():
            lake_.upgrade_member(3, "previous")
            lake_.upgrade_head(0, "next")
            assert lake_.good("gc").code == 0
        assert min(load.rounds, load.hits) > 5
        eventually(lambda: lake_.status()["walker"]["healed"], "it is not healed")
        report = json.loads(lake_.good("fsck", "--full", "--json").out)
        assert (report["damage"], report["notes"]) == (0, 0), report
    finally:
        assert lake_.process is not None
        if lake_.process.poll() is None:
            assert lake_.stop() == 0
