"""One lake on several machines, as an operator makes, breaks and mends it.

The machines are processes with folders and a loopback address of their own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.e2e.served import WAIT_S, lake
from tests.e2e.test_lake_on_devices import ServedLake, content

PORT: Final = 9100
OBJECTS: Final = {"short": content(1, 100), "page": content(2, 70_000), "long": content(3, 9_000_001)}


class Machine(ServedLake):
    """A machine of the lake: its folders and its address."""

    def __init__(self, folder: Path, devices: int) -> None:
        folder.mkdir()
        host = f"127.{random.randint(1, 250)}.{random.randint(0, 255)}.{random.randint(1, 250)}"  # of this test alone
        self.listen = f"{host}:{PORT}"
        super().__init__(folder, [folder / f"disk{number}" for number in range(1, devices + 1)], start=False)

    def init(self, name: str, *options: str) -> None:
        done = lake("cluster", "init", name, "--listen", self.listen, *self._folders(), *options)
        assert done.code == 0, done

    def join(self, names: Machine) -> None:
        done = self.joining(names)
        assert done.code == 0, done

    def joining(self, names: Machine, *options: str) -> Any:
        token = names.devices[0] / "cluster.token"
        where = (names.listen, "--token-file", token, "--listen", self.listen)
        return lake("cluster", "join", *where, *self._folders(), *options)

    def processes(self) -> list[int]:
        """Return the members' processes, and the one that serves."""
        assert self.process is not None
        return [self.process.pid, *self.members(*range(1, len(self.devices) + 1))]

    def lose_power(self) -> None:
        """Kill everything on this machine at once."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.kill()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.good("cluster", "status", "--json").out)
        return found


def eventually(happens: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 2 * WAIT_S
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@contextmanager
def made(folder: Path, devices: list[int], *options: str) -> Iterator[list[Machine]]:
    """Make a lake over machines with so many devices each, the names on the first; all have a place in the table."""
    machines = [Machine(folder / f"machine{number}", count) for number, count in enumerate(devices, 1)]
    first, *others = machines
    try:
        first.init("prod", *options)
        first.start()
        for machine in others:
            machine.join(first)
            machine.start()
        eventually(lambda: is_whole(first, sum(devices)), "the machines are not members")
        yield machines
    finally:
        for machine in machines[::-1]:
            if machine.process is not None and machine.process.poll() is None:
                assert machine.stop() == 0


def is_whole(machine: Machine, members: int) -> bool:
    """Return True if all members are up and have places, and nothing waits to be moved."""
    found = machine.status()
    up = [each for each in found["members"] if each["up"] and each["places"]]
    return len(up) == members and found["ring_epochs"] == 1 and not found["walker"]["dirty_partitions"]


def test_a_machine_is_lost_and_nothing_is(tmp_path: Path) -> None:
    with made(tmp_path, [2, 1, 1], "--protect", "2+1", "--accept-loss") as (first, second, third):
        for key, payload in OBJECTS.items():
            second.put(key, payload)
        assert {third.get(key) == payload for key, payload in OBJECTS.items()} == {True}
        outlived = {"devices": 1, "machines": 1}
        eventually(lambda: first.status()["outlives"] == outlived, "shards are not on all machines")
        assert third.printed[0].startswith("lake    prod  (1 members, protection 2+1, names at ")
        second.lose_power()
        for key, payload in OBJECTS.items():
            assert third.get(key) == payload
        first.put("meanwhile", OBJECTS["long"][::-1])
        second.start()
        assert second.get("meanwhile") == OBJECTS["long"][::-1]
        eventually(lambda: is_whole(first, 4), "it was not healed")
