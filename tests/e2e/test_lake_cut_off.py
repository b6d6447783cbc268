"""A lake whose machines have a network that fails: hosts that are cut off, hear nobody, or have a loose cable.

Three machines and an etcd of three nodes, each at a host of its own (`bench.harness.hosts`).  What is cut off is
silent: no process ends, and no connection is reset.  Clients at the machines never pause, as in `test_names_replicas`;
each machine has at the end of each drill what was acknowledged to any of them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import lakefs
from bench.harness.hosts import Host, hosts, hosts_can_be_made
from tests.e2e.served import LAKE, environment
from tests.e2e.test_lake_on_machines import PORT, Machine, eventually
from tests.e2e.test_names_replicas import begun, is_whole, leader_of, serving_with_etcd, used
from tests.etcd_rig import EtcdCluster, running_etcd

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
ANSWERED_WITHIN_S = 20.0
"""A machine that is cut off refuses within this: it loses its lease, and a head waits for names for 13 s."""


class HostMachine(Machine):
    """A machine at a host of its own."""

    def __init__(self, folder: Path, devices: int, host: Host) -> None:
        super().__init__(folder, devices)
        self.host = host
        self.listen = f"{host.address}:{PORT}"

    def begin_to_serve(self) -> subprocess.Popen[str]:
        """See `Served`."""
        command = [*self.host.command, *LAKE, "--debug", "serve", *self.data_options, "--socket", str(self.socket)]
        self.process = subprocess.Popen(
            [*command, "--admin", "off", "--s3", "off"],
            env=environment("unix:/nowhere/lake.sock"),
            stdout=subprocess.PIPE,
            text=True,
        )
        return self.process


@dataclass(frozen=True)
class Bed:
    """The machines, and the hosts of etcd's nodes, in their order."""

    machines: list[HostMachine]
    etcd: EtcdCluster
    etcd_hosts: list[Host]

    def leader(self) -> tuple[HostMachine, list[HostMachine]]:
        """Return the machine that leads the names, and the others."""
        leads, _ = leader_of(list[Machine](self.machines))
        return next(each for each in self.machines if each is leads), [
            each for each in self.machines if each is not leads
        ]

    def settle(self) -> None:
        """Wait until all is whole."""
        eventually(lambda: is_whole(self.machines[0]), "the lake is not whole again")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if not hosts_can_be_made():
        pytest.skip("no network namespaces: they take root, and iproute2")
    folder = tmp_path_factory.mktemp("bed")
    with hosts("e1", "e2", "e3", "m1", "m2", "m3") as found:
        etcd_hosts = [found[name] for name in ("e1", "e2", "e3")]
        with running_etcd(folder / "etcd", at=etcd_hosts) as etcd:
            counts = {"m1": 2, "m2": 1, "m3": 1}
            machines = [HostMachine(folder / name, count, found[name]) for name, count in counts.items()]
            with serving_with_etcd(machines, etcd):
                yield Bed(machines, etcd, etcd_hosts)


@contextmanager
def cut_off(*found: Host) -> Iterator[None]:
    """Cut hosts off during the block."""
    for host in found:
        host.cut()
    try:
        yield
    finally:
        for host in found:
            host.join()


def is_refused(machine: Machine) -> bool:
    """Return True if a put at a machine is refused; it must be answered in time."""
    began = time.monotonic()
    code = machine("put", "-", "bucket/refused", stdin=b"x").code
    assert time.monotonic() - began < ANSWERED_WITHIN_S
    return code != 0


def test_a_leader_that_is_cut_off_accepts_nothing_and_answers_nothing_old(bed: Bed) -> None:
    leader, others = bed.leader()
    leader.put("side", b"old")
    with used(*others) as clients, lakefs.connect(leader.server, timeout=5) as minority:
        assert bytes(minority.get("bucket/side")) == b"old"
        with cut_off(leader.host):
            eventually(lambda: others[0]("put", "-", "bucket/side", stdin=b"new").code == 0, "no other replica leads")
            _finds_nothing_old(minority)
            assert is_refused(leader)
            begun(clients)
        eventually(lambda: _reads_new(leader), "it does not serve again")
    bed.settle()
    with used(*bed.machines):
        pass


def _finds_nothing_old(minority: lakefs.Lake) -> None:
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            found = bytes(minority.get("bucket/side"))
        except lakefs.LakeError:
            continue
        assert found == b"new"


def _reads_new(machine: Machine) -> bool:
    done = machine("cat", "bucket/side")
    assert done.out in (b"", b"new")
    return done.code == 0


def test_a_leader_that_does_not_reach_etcd_leaves_the_names_to_another(bed: Bed) -> None:
    leader, others = bed.leader()
    with used(*others) as clients:
        leader.host.lose_way_to(*bed.etcd_hosts)
        try:
            eventually(lambda: others[0]("put", "-", "bucket/other", stdin=b"x").code == 0, "no other replica leads")
            begun(clients)
            assert bed_leads(others)
        finally:
            leader.host.find_way_to(*bed.etcd_hosts)
    bed.settle()
    with used(*bed.machines):
        pass


def bed_leads(machines: list[HostMachine]) -> bool:
    """Return True if one of these machines leads the names."""
    return leader_of(list[Machine](machines))[0] in machines


def test_a_head_that_does_not_reach_the_leader_refuses_and_others_go_on(bed: Bed) -> None:
    leader, (deaf, other) = bed.leader()
    with used(leader, other) as clients:
        deaf.host.lose_way_to(leader.host)
        try:
            assert is_refused(deaf)
            begun(clients)
        finally:
            deaf.host.find_way_to(leader.host)
    bed.settle()
    with used(*bed.machines):
        pass


def test_writes_go_on_while_a_machine_is_cut_off_and_it_is_healed(bed: Bed) -> None:
    leader, (lost, other) = bed.leader()
    with used(leader, other) as clients:
        with cut_off(lost.host):
            content = bytes(range(256)) * 4096
            leader.put("meanwhile", content)
            begun(clients)
            assert other.get("meanwhile") == content
            assert is_refused(lost)
        bed.settle()
        assert lost.get("meanwhile") == content


def test_names_go_on_when_the_host_of_etcd_s_leader_is_cut_off(bed: Bed) -> None:
    node = bed.etcd.leader()
    host = bed.etcd_hosts[bed.etcd.nodes.index(node)]
    with used(*bed.machines) as clients, cut_off(host):
        begun(clients)
    bed.settle()


def test_a_loose_cable_loses_nothing(bed: Bed) -> None:
    _, (loose, _) = bed.leader()
    with used(*bed.machines):
        for cut_s in (0.2, 1.0, 2.5, 0.5, 5.0):
            with cut_off(loose.host):
                time.sleep(cut_s)
            time.sleep(0.3)
    bed.settle()


def test_without_a_majority_of_etcd_nothing_is_accepted_and_then_all_goes_on(bed: Bed) -> None:
    with used(*bed.machines) as clients:
        with cut_off(*bed.etcd_hosts[1:]):
            eventually(lambda: all(is_refused(machine) for machine in bed.machines), "something was accepted")
            before = [dict(client.acknowledged) for client in clients]
            time.sleep(3)
            assert [client.acknowledged for client in clients] == before
        begun(clients)
    bed.settle()
