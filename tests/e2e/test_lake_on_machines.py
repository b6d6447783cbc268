"""One lake on several machines, as an operator makes, breaks and mends it.

The machines are processes with folders and a loopback address of their own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.served import WAIT_S, Served, lake
from tests.e2e.test_lake_on_devices import ServedLake, content

PORT: Final = 9100
pytestmark = [pytest.mark.slow]
OBJECTS: Final = {"short": content(1, 100), "page": content(2, 70_000), "long": content(3, 9_000_001)}


class Machine(ServedLake):
    """A machine of the lake: its folders and its address."""

    def __init__(self, folder: Path, devices: int) -> None:
        folder.mkdir()
        host = f"127.{random.randint(1, 250)}.{random.randint(0, 255)}.{random.randint(1, 250)}"  # of this test alone
        self.listen = f"{host}:{PORT}"
        super().__init__(folder, [folder / f"disk{number}" for number in range(1, devices + 1)], start=False)

    def init(self, name: str, *options: str) -> None:
        done = lake("cluster", "init", name, "--listen", self.listen, *self.data_options, *options)
        assert done.code == 0, done

    def join(self, names: Machine) -> None:
        done = self.joining(names)
        assert done.code == 0, done

    def joining(self, names: Machine, *options: str) -> Any:
        token = names.devices[0] / "cluster.token"
        where = (names.listen, "--token-file", token, "--listen", self.listen)
        return lake("cluster", "join", *where, *self.data_options, *options)

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


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Three machines with two, one and one devices, the names on the first; each test leaves them whole."""
    folder = tmp_path_factory.mktemp("machines")
    machines = [Machine(folder / f"machine{number}", count) for number, count in enumerate([2, 1, 1], 1)]
    first, *others = machines
    try:
        first.init("prod", "--protect", "2+1", "--accept-loss")
        first.start()
        for machine in others:
            machine.join(first)
            machine.start()
        eventually(lambda: is_whole(first, 4), "the machines are not members, with shards on each")
        yield machines
    finally:
        for machine in machines[::-1]:
            if machine.process is not None and machine.process.poll() is None:
                assert machine.stop() == 0


def is_whole(machine: Machine, members: int) -> bool:
    """Return True if all members are up and have places, nothing waits to be moved, and any machine may be lost."""
    found = machine.status()
    up = [each for each in found["members"] if each["up"] and each["places"]]
    is_settled = found["ring_epochs"] == 1 and not found["walker"]["dirty_partitions"]
    return len(up) == members and is_settled and found["outlives"] == {"devices": 1, "machines": 1}


def test_each_machine_serves_what_any_other_stored(machines: list[Machine]) -> None:
    first, second, third = machines
    for number, writer in enumerate(machines):
        for key, payload in OBJECTS.items():
            writer.put(f"{key} {number}", payload)
    for reader in machines:
        for number in range(3):
            assert all(reader.get(f"{key} {number}") == payload for key, payload in OBJECTS.items())
    second.good("mv", "bucket/short 0", "bucket/moved")
    assert third.get("moved") == OBJECTS["short"]
    assert "short 0" not in first.good("ls", "bucket/").text
    assert third.printed[0].startswith("lake    prod  (1 members, protection 2+1, names at ")
    said = third.good("cluster", "status").text
    assert "outlives 1 more device, 1 machine (not the one with the names)" in said
    assert all(f"at {host_of(machine)}:" in said for machine in machines)


def host_of(machine: Machine) -> str:
    return machine.listen.rpartition(":")[0]


def test_a_machine_is_lost_and_nothing_is(machines: list[Machine]) -> None:
    first, second, third = machines
    second.put("kept", OBJECTS["long"])
    second.lose_power()
    assert third.get("kept") == OBJECTS["long"]
    first.put("meanwhile", OBJECTS["long"][::-1])
    second.start()
    assert second.get("meanwhile") == OBJECTS["long"][::-1]
    eventually(lambda: is_whole(first, 4), "it was not healed")
    third.lose_power()
    assert second.get("meanwhile") == OBJECTS["long"][::-1]
    third.start()
    eventually(lambda: is_whole(first, 4), "it was not healed")


@pytest.mark.thorough
def test_clients_of_other_machines_go_on_when_the_names_restart(machines: list[Machine]) -> None:
    first, second, third = machines
    second.put("before", OBJECTS["long"])
    first.lose_power()
    refused = third("cat", "bucket/before")
    assert refused.code == 69, refused
    assert "the names of this lake cannot be reached" in refused.err
    first.start()
    eventually(lambda: third("cat", "bucket/before").out == OBJECTS["long"], "it does not find the names again")
    put = ("put", "-", "bucket/after")
    eventually(lambda: second(*put, stdin=OBJECTS["page"]).code == 0, "nothing can be stored")
    assert third.get("after") == OBJECTS["page"]
    eventually(lambda: is_whole(first, 4), "it was not healed")


@pytest.mark.thorough
def test_who_may_not_join_is_refused_by_a_sentence(machines: list[Machine], tmp_path: Path) -> None:
    first, second, _ = machines
    stranger = Machine(tmp_path / "stranger", 1)
    token = tmp_path / "token"
    token.write_text("wrong\n")

    def refused(names: str, file: Path, *folders: str) -> str:
        where = (names, "--token-file", file, "--listen", stranger.listen)
        done = lake("cluster", "join", *where, *(folders or stranger.data_options))
        assert done.code not in (0, 70), done
        return done.err

    assert "is open to others; run: chmod 600" in refused(first.listen, token)
    token.chmod(0o600)
    assert "token" in refused(first.listen, token)
    right = first.devices[0] / "cluster.token"
    assert "UnsupportedVersion" not in refused(f"{host_of(first)}:{PORT + 1}", right)
    assert "refused" in refused("127.0.0.1:1", right)
    assert "is the one to join" in refused(first.listen, right, "--data", str(first.devices[0]))
    engine = Served(tmp_path / "stranger")
    assert engine.stop() == 0
    assert "is the store of one engine" in refused(first.listen, right, "--data", str(engine.data))
    assert not any((device / "machine.json").exists() for device in stranger.devices)
    assert second.joining(first).code == 0, "joining may be repeated"
    for socket in (second.socket, tmp_path / "other"):
        again = lake("serve", *second.data_options, "--socket", socket, "--s3", "off", "--admin", "off")
        assert again.code in (71, 75), again
    assert again.code == 75
    assert "is open in another process, which serves it" in again.err


@pytest.mark.thorough
def test_devices_are_added_and_replaced_while_all_is_served(machines: list[Machine]) -> None:
    first, second, third = machines
    second.put("kept", OBJECTS["long"])
    third.stop()
    new = third.devices[0].with_name("new")
    third.devices.append(new)
    third.start()
    assert not new.exists() or not list(new.iterdir())
    third.good("cluster", "add", new, *third.data_options)
    eventually(lambda: is_whole(first, 5), "the new device is not used")
    lost = third.devices[0]
    [pid] = third.members(1)
    shutil.rmtree(lost)
    lost.mkdir()
    os.kill(pid, signal.SIGKILL)
    [member] = [each["id"] for each in first.status()["members"] if f"{host_of(third)}:{PORT + 1}" in str(each)]
    eventually(lambda: not third.members(1), "a member serves without its device")
    for _ in range(2):  # stopped between its steps, it is repeated
        third.good("cluster", "replace", member[:12], lost)
    eventually(lambda: is_whole(first, 5), "the replaced device is not used")
    third.good("cluster", "replace", member, lost)
    refused = third("cluster", "replace", first.status()["members"][0]["id"], lost)
    assert (refused.code, f"added in place of {member}" in refused.err) == (73, True), refused
    third.good("cluster", "remove", member, "--accept-loss")
    assert member not in [each["id"] for each in first.status()["members"]]
    assert third.get("kept") == OBJECTS["long"]
