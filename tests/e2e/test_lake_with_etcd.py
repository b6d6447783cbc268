"""A lake whose coordinator is an etcd, as an operator moves it there, breaks it, and takes it back."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lakefs
from engine.coordinator.records import ReplicaRecord, decode
from engine.lake.etcd_place import EtcdPlace
from engine.lake.machine import read_machine
from tests.e2e.test_lake_on_devices import content, processes
from tests.e2e.test_lake_on_machines import Machine, eventually
from tests.etcd_rig import EtcdCluster, etcdctl, running_etcd

pytestmark = [pytest.mark.slow]
LONG = content(3, 5_000_001)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path / "etcd", 3) as cluster:
        yield cluster


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "machine", 2)
    try:
        yield machine
    finally:
        if machine.process is not None and machine.process.poll() is None:
            assert machine.stop() == 0


def etcd_of(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = machine.status()["etcd"]
    return found


def check_heads_and_settings(machine: Machine) -> None:
    """Change settings of a lake of one machine, and look at its head."""
    machine.good("cluster", "set", "out-after=20m", "out-stops=machine")
    said = machine.good("cluster", "status").text
    assert "after 1200 s of silence, while no more than a machine is away" in said
    [head] = machine.status()["heads"]
    assert head["has_members"]
    assert f"head {head['pid']} " in said
    assert machine("cluster", "set", "out-after=1s").code == 2
    assert machine("cluster", "set", "out=1s").code == 2


def test_a_lake_moves_to_an_etcd_outlives_its_faults_and_moves_back(etcd: EtcdCluster, machine: Machine) -> None:
    machine.init("prod", "--protect", "1+1", "--accept-loss")
    machine.start()
    machine.put("before", LONG)
    assert "etcd" not in machine.status()
    assert machine.stop() == 0

    machine.init("prod", "--etcd", ",".join(etcd.urls))
    machine.start()
    assert machine.get("before") == LONG
    machine.put("there", LONG)
    found = etcd_of(machine)
    assert found["endpoints"] == list(etcd.urls)
    assert found["reachable"]
    assert found["cluster"]
    said = machine.good("cluster", "status").text
    assert f"etcd                                    {etcd.urls[0]}, " in said
    check_heads_and_settings(machine)

    machine.lose_power()
    machine.start()
    assert machine.get("there") == LONG
    etcd.leader().kill()
    machine.put("without its leader", LONG)
    assert machine.get("without its leader") == LONG
    machine.good("gc")

    for node in etcd.nodes:
        node.kill()
    [member] = machine.members(1)
    os.kill(member, signal.SIGKILL)
    eventually(lambda: machine.members(1) not in ([], [member]), "the member's process is not started again")
    eventually(lambda: machine("stat", "bucket/there").code != 0, "names are served without a lease")
    assert machine("put", "-", "bucket/without etcd", stdin=LONG).code == 69
    failed = machine("stat", "bucket/there")
    assert failed.code == 69
    assert "names" in failed.err
    for node in etcd.nodes:
        node.start(etcd.names)
    eventually(lambda: machine("stat", "bucket/there").code == 0, "names are not served again")
    assert etcd_of(machine)["reachable"]
    assert machine("stat", "bucket/without etcd").code != 0
    eventually(lambda: goes(machine, "behind that"), "its members are not back at the etcd")
    machine.good("gc")
    assert machine.stop() == 0

    machine.init("prod", "--no-etcd")
    machine.start()
    assert "etcd" not in machine.status()
    assert machine.status()["out_after_s"] == 1200, "settings move with the lake"
    for key in ("before", "there", "without its leader", "behind that"):
        assert machine.get(key) == LONG
    machine.put("back", LONG)
    for node in etcd.nodes:
        node.kill()
    machine.lose_power()
    machine.start()
    assert machine.get("back") == LONG


class MachineWithHeads(Machine):
    """A machine whose clients are served by two more processes."""

    def __init__(self, folder: Path, devices: int) -> None:
        super().__init__(folder, devices)
        self._options = ("--heads", "2")

    def heads(self) -> list[int]:
        return [pid for pid, arguments in processes() if "--head" in arguments and str(self.socket) in arguments]


@contextmanager
def machines_of(folder: Path) -> Iterator[tuple[MachineWithHeads, MachineWithHeads]]:
    machines = MachineWithHeads(folder / "first", 2), MachineWithHeads(folder / "second", 1)
    try:
        yield machines
    finally:
        for machine in machines[::-1]:
            if machine.process is not None and machine.process.poll() is None:
                assert machine.stop() == 0


def goes(machine: Machine, key: str) -> bool:
    """Return True if a machine stores and reads."""
    return machine("put", "-", f"bucket/{key}", stdin=LONG).code == 0 and machine("cat", f"bucket/{key}").out == LONG


def replicas_of(etcd: EtcdCluster) -> list[int]:
    """Return the last group that each replica of the names has, as they have said."""
    said = etcdctl(etcd.urls, "get", "--prefix", "/lake/", "--write-out=json")
    found = {
        base64.b64decode(entry["key"]): base64.b64decode(entry.get("value", "")) for entry in json.loads(said)["kvs"]
    }
    return [decode(ReplicaRecord, value).kept for key, value in found.items() if b"/names/0000/replicas/" in key]


def etcd_in(machine: Machine) -> EtcdPlace | None:
    record = read_machine(machine.devices[0])
    assert record is not None
    return record.etcd


@pytest.mark.thorough
def test_machines_find_the_names_by_the_etcd_and_learn_that_there_is_one_or_none(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd") as etcd, machines_of(tmp_path) as (first, second):
        first.init("prod", "--protect", "1+1", "--accept-loss")
        first.start()
        second.join(first)
        second.start()
        assert goes(second, "before")

        assert first.stop() == 0
        first.init("prod", "--etcd", etcd.urls[0])
        first.start()
        assert second.get("before") == LONG, "one that does not know it yet reads on"
        assert second.stop() == 0
        second.start()
        learned = etcd_in(second)
        assert learned is not None
        assert learned.is_settled
        assert learned == etcd_in(first)
        second.join(first)
        assert etcd_in(second) == learned, "joining says the same"
        assert goes(first, "first")
        assert goes(second, "second")
        assert first.get("second") == second.get("first") == LONG
        with lakefs.connect(second.server) as client:
            assert client.get("bucket/first") == LONG
            asked = [pid for pid in second.heads() if is_connected(pid, first.listen)]
            assert asked, "heads ask the names at the address of their leader"

        eventually(lambda: len(replicas_of(etcd)) == 2, "the second machine has no replica of the names")
        eventually(lambda: len(set(replicas_of(etcd))) == 1, "a replica stays behind")
        first.lose_power()
        moving = ("mv", "bucket/first", "bucket/moved")
        eventually(lambda: second(*moving).code == 0, "the second machine's replica does not lead")
        first.start()
        eventually(lambda: goes(first, "again"), "the first machine does not find the names")
        assert first.get("moved") == second.get("second") == LONG

        assert first.stop() == 0
        first.init("prod", "--no-etcd")
        first.start()
        assert first.get("again") == LONG
        assert not goes(second, "stale"), "its coordinator is not the lake's any more"
        assert second.stop() == 0
        second.start()
        assert etcd_in(second) is None, "it has learned that from the names"
        assert goes(second, "without")
        etcd.nodes[0].kill()
        assert first.get("without") == second.get("again") == LONG


def is_connected(pid: int, address: str) -> bool:
    """Return True if a process has a connection to an address of IPv4."""
    host, _, port = address.rpartition(":")
    wanted = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{int(port):04X}"
    ours = {os.readlink(each.path) for each in os.scandir(f"/proc/{pid}/fd") if each.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(fields[2] == wanted and f"socket:[{fields[9]}]" in ours for fields in lines)
