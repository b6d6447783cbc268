"""Names on three machines and an etcd of three nodes, while operators and faults take parts of them away.

One lake for all drills, with clients that never pause.  Each puts objects of its own through its machine, and knows
which were acknowledged; what a failed put has done is unknown.  At the end of each drill every machine has all that was
acknowledged.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import lakefs
from engine.coordinator.coordinator import Put
from engine.etcd.etcd_coordinator import open_etcd_coordinator
from engine.etcd.etcd_link import EtcdAccess
from lakefs.errors import StoreFull
from lakefs.limits import MIB
from tests.e2e.test_lake_on_machines import Machine, eventually, host_of
from tests.etcd_rig import EtcdCluster, EtcdNode, etcdctl, running_etcd

pytestmark = [pytest.mark.slow]
KEYS = 8
"""Names that each client changes, in turn."""


class Client:
    """One thread's puts at a machine: each value is a number, higher than all before it."""

    def __init__(self, machine: Machine, bucket: str = "bucket") -> None:
        self.machine = machine
        self.bucket = bucket
        self.longest_s = 0.0
        """The longest time between two acknowledged puts."""
        self._last = time.monotonic()
        self.acknowledged: dict[str, int] = {}
        self.tried = 0
        self.failures = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._use, daemon=True)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _use(self) -> None:
        while not self._ended.wait(0.05):
            try:
                with lakefs.connect(self.machine.server) as lake:
                    while not self._ended.wait(0.05):
                        self._put(lake)
            except lakefs.LakeError:
                self.failures += 1

    def _put(self, lake: lakefs.Lake) -> None:
        self.tried += 1
        key, number = f"{self.bucket}/{host_of(self.machine)}/{self.tried % KEYS}", self.tried
        lake.put(key, b"%d" % number)
        self.acknowledged[key] = number
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now

    def check(self, reader: Machine) -> None:
        """Fail unless a machine has each acknowledged value, or one that was put later."""
        with lakefs.connect(reader.server) as lake:
            for key, number in dict(self.acknowledged).items():
                assert number <= int(bytes(lake.get(key))) <= self.tried, f"{key} was lost at {host_of(reader)}"


@contextmanager
def used(*machines: Machine, buckets: Sequence[str] = ("bucket",)) -> Iterator[list[Client]]:
    """Use machines during the block, a client for each bucket; behind it all must have what was acknowledged."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(machine, bucket)) for machine in machines for bucket in buckets]
        begun(clients)
        yield clients
        begun(clients)
    for client in clients:
        for machine in machines:
            client.check(machine)


def begun(clients: list[Client]) -> None:
    """Wait until each client was acknowledged once more."""
    for client in clients:
        before = dict(client.acknowledged)
        eventually(lambda client=client, before=before: client.acknowledged != before, "nothing is acknowledged")  # type: ignore[misc]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path_factory.mktemp("etcd") / "etcd", 3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def machines(etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Three machines, each with a replica of the names; each drill leaves them whole."""
    folder = tmp_path_factory.mktemp("machines")
    machines = [Machine(folder / f"machine{number}", count) for number, count in enumerate([2, 1, 1], 1)]
    with serving_with_etcd(machines, etcd):
        yield machines


@contextmanager
def serving_with_etcd(machines: Sequence[Machine], etcd: EtcdCluster) -> Iterator[None]:
    """Serve a lake over an etcd on three machines, each with a replica of the names; those that serve are stopped."""
    first, *others = machines
    try:
        first.init("prod", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(etcd.urls))
        first.start()
        for machine in others:
            machine.join(first)
            machine.start()
        first.put("first", b"it makes the bucket")
        eventually(lambda: is_whole(first), "the machines have no replicas of the names")
        yield
    finally:
        stop_all(machines)


def stop_all(machines: Sequence[Machine]) -> None:
    """Stop the machines that serve."""
    for machine in machines[::-1]:
        if machine.process is not None and machine.process.poll() is None:
            assert machine.stop() == 0


def names_of(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = machine.status().get("names", {})
    return found


def states(machine: Machine) -> list[str]:
    """Return the states of the replicas, as a machine shows them."""
    return sorted(each["state"] for each in names_of(machine).get("replicas", []))


def is_whole(machine: Machine) -> bool:
    """Return True if all four members are up, nothing is to be healed, and three replicas have all groups."""
    found = machine.status()
    names = found.get("names", {})
    replicas = [each for each in names.get("replicas", []) if each["state"] in ("leads", "follows")]
    if len(replicas) != 3 or any(each["groups_behind"] > 10 for each in replicas):
        return False
    up = [each for each in found["members"] if each["up"] and each["places"]]
    return len(up) == 4 and found["outlives"]["machines"] > 0 and not found["walker"]["dirty_partitions"]


def leader_of(machines: Sequence[Machine]) -> tuple[Machine, list[Machine]]:
    """Return the machine whose replica leads, and the others."""
    for _ in range(100):
        for asked in machines:
            leads = [each["machine"] for each in names_of(asked).get("replicas", []) if each["state"] == "leads"]
            found = [each for each in machines if leads and machine_id(each) == leads[0]]
            if found:
                return found[0], [each for each in machines if each is not found[0]]
        time.sleep(0.2)
    raise AssertionError("no replica leads")


def machine_id(machine: Machine) -> str:
    [found] = {each["machine"] for each in machine.status()["members"] if f"{host_of(machine)}:" in str(each)}
    return str(found)


def test_the_status_shows_the_replicas_of_the_names(machines: list[Machine]) -> None:
    first, second, _ = machines
    assert states(second) == ["follows", "follows", "leads"]
    said = first.good("cluster", "status").text
    assert "; names: 1 of 3 machines" in said
    assert "not the one with the names" not in said
    listed = second.good("cluster", "names").text
    assert all(f" at {host_of(machine)}" in listed for machine in machines)
    assert "names log" in listed
    leader = next(each["id"] for each in names_of(first)["replicas"] if each["state"] == "leads")
    refused = second("cluster", "names", "remove", leader[:12])
    assert "this replica leads the names" in refused.err
    assert "names no replica" in first("cluster", "names", "remove", "zz").err


def test_names_go_on_when_the_machine_that_leads_is_lost(machines: list[Machine]) -> None:
    leader, others = leader_of(machines)
    with used(*others) as clients:
        leader.lose_power()
        begun(clients)
        leader_of(others)
    leader.start()
    eventually(lambda: is_whole(others[0]), "it does not follow again")
    with used(*machines):
        pass


@pytest.mark.thorough
def test_a_leader_that_was_killed_leads_again_when_it_starts(machines: list[Machine]) -> None:
    leader, others = leader_of(machines)
    with used(*others) as clients:
        leader.kill()
        leader.start()
        begun(clients)
    eventually(lambda: is_whole(leader), "it is not whole again")


@pytest.mark.thorough
def test_a_leader_that_was_stopped_past_its_lease_answers_nothing_old(machines: list[Machine]) -> None:
    leader, others = leader_of(machines)
    assert leader.process is not None
    with used(*others) as clients, lakefs.connect(leader.server) as stopped:
        stopped.put("bucket/stopped", b"old")
        os.kill(leader.process.pid, signal.SIGSTOP)
        try:
            eventually(lambda: _is_put(others[0], "stopped", b"new"), "no other replica leads")
            begun(clients)
        finally:
            os.kill(leader.process.pid, signal.SIGCONT)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            try:
                assert bytes(stopped.get("bucket/stopped")) == b"new"
            except lakefs.LakeError:
                continue
    eventually(lambda: is_whole(leader), "it does not follow again")
    assert leader_of(machines)[0] is not leader


def _is_put(machine: Machine, key: str, content: bytes) -> bool:
    return machine("put", "-", f"bucket/{key}", stdin=content).code == 0


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_names_go_on_when_etcd_loses_its_leader(
    etcd: EtcdCluster, machines: list[Machine], number: signal.Signals
) -> None:
    with used(*machines) as clients:
        node = etcd.leader()
        node.signal(number)
        try:
            begun(clients)
        finally:
            _again(etcd, node, number)
    eventually(lambda: is_whole(machines[0]), "it is not whole again")


def _again(etcd: EtcdCluster, node: EtcdNode, number: signal.Signals) -> None:
    if number is signal.SIGSTOP:
        node.signal(signal.SIGCONT)
    else:
        node.kill()
        node.start(etcd.names)


@pytest.mark.thorough
def test_all_of_etcd_goes_comes_back_empty_and_comes_back(etcd: EtcdCluster, machines: list[Machine]) -> None:
    first, *_ = machines
    with used(*machines) as clients:
        for node in etcd.nodes:
            node.kill()
        eventually(lambda: first("stat", "bucket/stopped").code == 69, "names are served without a lease")
        for node in etcd.nodes:
            node.folder.rename(node.folder.with_suffix(".kept"))
            node.start(etcd.names)
        eventually(
            lambda: "bring the right one back" in first("put", "-", "bucket/x", stdin=b"x").err, "it is not refused"
        )
        for node in etcd.nodes:
            node.kill()
            shutil.rmtree(node.folder)
            node.folder.with_suffix(".kept").rename(node.folder)
            node.start(etcd.names)
        begun(clients)
    eventually(lambda: is_whole(first), "it is not whole again")


@pytest.mark.thorough
def test_a_replica_is_lost_and_made_anew_and_a_removed_one_stays_away(machines: list[Machine]) -> None:
    leader, (lost, other) = leader_of(machines)
    before = replica_at(leader, lost)
    with used(*machines):
        assert lost.stop() == 0
        lose_names(lost)
        lost.start()
        eventually(lambda: replica_at(leader, lost) not in ("", before), "it is not made anew")
        eventually(lambda: is_whole(leader), "it does not follow")
    made = replica_at(leader, lost)
    assert lost.stop() == 0
    for _ in range(2):
        other.good("cluster", "names", "remove", made[:12])
    assert states(leader) == ["follows", "leads", "removed"]
    lost.start()
    assert lost("stat", "bucket/stopped").code == leader("stat", "bucket/stopped").code
    assert states(lost) == ["follows", "leads", "removed"]
    assert lost.stop() == 0
    lose_names(lost)
    lost.start()
    eventually(lambda: is_whole(leader), "it has no replica again")
    assert states(lost) == ["follows", "follows", "leads", "removed"]


def lose_names(machine: Machine) -> None:
    """Remove the names in all of a machine's folders."""
    copies = [device / "names" for device in machine.devices if (device / "names").exists()]
    assert copies
    for copy in copies:
        shutil.rmtree(copy)


def replica_at(asked: Machine, machine: Machine) -> str:
    """Return the id of a machine's replica."""
    host = host_of(machine)
    lines = [line for line in asked.good("cluster", "names").lines if f"at {host}" in line and "removed" not in line]
    return lines[0].split()[1] if lines else ""


@pytest.mark.thorough
def test_another_lake_on_the_same_etcd_has_names_of_its_own(
    etcd: EtcdCluster, machines: list[Machine], tmp_path: Path
) -> None:
    other = Machine(tmp_path / "other", 2)
    other.init("other", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(etcd.urls))
    other.start()
    try:
        other.put("mine", b"other")
        machines[0].put("mine", b"prod")
        other.lose_power()
        machines[1].put("mine", b"prod again")
        other.start()
        assert other.get("mine") == b"other"
        assert machines[2].get("mine") == b"prod again"
        assert states(other) == ["leads"]
    finally:
        assert other.stop() == 0


@pytest.mark.thorough
def test_an_etcd_at_its_quota_is_given_room_by_the_leader(tmp_path: Path) -> None:
    options = ("--quota-backend-bytes", str(16 * MIB))
    with running_etcd(tmp_path / "etcd", 3, options=options) as cluster:
        machine = Machine(tmp_path / "small", 2)
        machine.init("small", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(cluster.urls))
        machine.start()
        try:
            machine.put("before", b"kept")
            for turn in range(2):
                trio.run(fill, cluster)
                assert "NOSPACE" in etcdctl(cluster.urls, "alarm", "list")
                assert machine.get("before") == b"kept", "reads go on"
                eventually(lambda turn=turn: _is_put(machine, f"behind {turn}", b"x"), "there is no room again")  # type: ignore[misc]
                assert "NOSPACE" not in etcdctl(cluster.urls, "alarm", "list")
        finally:
            assert machine.stop() == 0


async def fill(cluster: EtcdCluster) -> None:
    """Put one key of another user of an etcd until that has no room for its history."""
    async with open_etcd_coordinator(EtcdAccess(cluster.urls), "other") as other:
        with pytest.raises(StoreFull):
            for _ in range(100):
                await other.transact([], [Put(b"a", bytes(MIB))])
