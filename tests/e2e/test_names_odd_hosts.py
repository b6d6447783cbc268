"""Names on three machines that are odd: a disk that others have filled, a clock an hour off, another name of the host.

Each machine has a small file system of its own.  As in `test_names_replicas`, clients never pause, and what was
acknowledged is read at each machine behind each drill.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.served import LAKE, Process, environment
from tests.e2e.small_disk import ext4, fill
from tests.e2e.test_lake_on_machines import Machine, eventually
from tests.e2e.test_names_replicas import begun, is_whole, leader_of, names_of, serving_with_etcd, used
from tests.etcd_rig import EtcdCluster, running_etcd

pytestmark = pytest.mark.thorough

MIB: Final = 1 << 20
NS: Final = 10**9
ANOTHER_CLOCK: Final = """
import time
offset_s = {offset_s}
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: real() + offset_s, lambda: real_ns() + offset_s * 10**9
"""
"""Run by each Python process of an odd machine as it starts: no namespace has a wall clock of its own."""
ANOTHER_NAME: Final = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$0" "$@"')


class OddMachine(Machine):
    """A machine that may be started with a clock that is wrong, and another name of its host."""

    is_odd = False

    def begin_to_serve(self) -> Process:
        """See `Served`."""
        if not self.is_odd:
            return super().begin_to_serve()
        code = self.devices[0].parent / "odd"
        code.mkdir(exist_ok=True)
        (code / "sitecustomize.py").write_text(ANOTHER_CLOCK.format(offset_s=3600))
        served = ["serve", *self.data_options, "--socket", str(self.socket), "--admin", "off", "--s3", "off"]
        found = environment("unix:/nowhere/lake.sock")
        found["PYTHONPATH"] = os.pathsep.join((str(code), found["PYTHONPATH"]))
        command = [*ANOTHER_NAME, *LAKE, *served, *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=found)
        return self.process


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path_factory.mktemp("etcd") / "etcd", 3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def machines(etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[OddMachine]]:
    """Three machines, each with one device on a small file system, and a replica of the names."""
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"host{number}") for number in range(1, 4)]
        disks = [stack.enter_context(ext4(folder, 256 * MIB)) for folder in folders]
        machines = [OddMachine(disk / "machine", count) for disk, count in zip(disks, [2, 1, 1], strict=True)]
        stack.enter_context(serving_with_etcd(machines, etcd))
        yield machines


def disk_of(machine: Machine) -> Path:
    return machine.devices[0].parent.parent


def test_names_go_on_while_the_disk_of_a_replica_that_follows_is_full(machines: list[OddMachine]) -> None:
    leader, (follower, other) = leader_of(machines)
    filled = disk_of(follower) / "others"
    with used(leader, other) as clients:
        fill(filled)
        for _ in range(5):
            begun(clients)
        filled.unlink()
        eventually(lambda: is_whole(leader), "the one whose disk was full is not whole")


def test_names_go_on_when_the_disk_of_the_replica_that_leads_is_full(machines: list[OddMachine]) -> None:
    leader, others = leader_of(machines)
    filled = disk_of(leader) / "others"
    with used(*others) as clients:
        fill(filled)
        for _ in range(5):
            begun(clients)
        filled.unlink()
        eventually(lambda: is_whole(others[0]), "the one whose disk was full is not whole")


def test_a_machine_with_a_clock_an_hour_off_and_another_host_name_is_the_same_and_may_lead(
    machines: list[OddMachine],
) -> None:
    first, odd, third = machines
    before = ids_of(first)
    with used(first, third) as clients:
        assert odd.stop() == 0
        odd.is_odd = True
        odd.start()
        eventually(lambda: is_whole(first), "the odd machine is not whole")
        begun(clients)
    heads = first.status()["heads"]
    assert "elsewhere" in {each["host"] for each in heads}
    assert any(each["since_ns"] > time.time_ns() + 3000 * NS for each in heads), "its clock is as all others"
    assert ids_of(first) == before
    with used(odd) as clients:
        assert third.stop() == 0
        first.lose_power()
        eventually(lambda: odd("ls", "bucket/").code == 0, "nobody leads")
        assert leader_of([odd])[0] is odd
        first.start()
        third.start()
        begun(clients)
        eventually(lambda: is_whole(odd), "it is not whole again")
    with used(*machines):
        assert odd.stop() == 0
        odd.is_odd = False
        odd.start()
        eventually(lambda: is_whole(first), "it is not whole again")
    assert ids_of(first) == before


def ids_of(machine: Machine) -> tuple[set[str], set[str]]:
    """Return the ids of the members, and of the replicas of the names."""
    return {each["id"] for each in machine.status()["members"]}, {each["id"] for each in names_of(machine)["replicas"]}


def test_nodes_of_etcd_are_restarted_one_after_the_other_as_when_they_are_upgraded(
    etcd: EtcdCluster, machines: list[OddMachine]
) -> None:
    with used(*machines) as clients:
        for node in etcd.nodes:
            node.signal(signal.SIGTERM)
            begun(clients)
            node.kill()
            node.start(etcd.names)
            begun(clients)
        assert max(client.longest_s for client in clients) < 10
