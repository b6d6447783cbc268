"""A lake whose etcd is lost for ever, as an operator rescues it from a replica of its names."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.format.group_parts import FIRST_SHARD
from engine.lake.lake_records import lake_records_in
from engine.lake.machine import read_machine
from tests.e2e.served import lake
from tests.e2e.test_lake_on_devices import content
from tests.e2e.test_lake_on_machines import Machine, eventually
from tests.e2e.test_names_replicas import is_whole, leader_of, serving_with_etcd, stop_all
from tests.etcd_rig import EtcdCluster, running_etcd

pytestmark = [pytest.mark.slow]
LONG = content(3, 5_000_001)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture
def machines(etcd: EtcdCluster, tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines, each with a replica of the names."""
    machines = [Machine(tmp_path / f"machine{number}", count) for number, count in enumerate([2, 1, 1], 1)]
    with serving_with_etcd(machines, etcd):
        yield machines


def rescue(machine: Machine, *options: str) -> Any:
    return lake("cluster", "rescue", *machine.data_options, *options)


def looked_at(machine: Machine, *options: str) -> dict[str, Any]:
    done = rescue(machine, "--json", *options)
    assert done.code == 0, done
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.thorough
def test_a_lake_outlives_the_loss_of_its_etcd_for_ever(
    etcd: EtcdCluster, machines: list[Machine], tmp_path: Path
) -> None:
    first, second, third = machines
    for number, machine in enumerate(machines):
        machine.put(f"object {number}", LONG)
    refused = rescue(second)
    assert "nothing is lost, and nothing is to be rescued" in refused.err, refused
    [node] = etcd.nodes
    stop_all(machines)
    node.kill()

    seen = {id(machine): looked_at(machine) for machine in machines}
    assert all(each["had_all_of_ns"] for each in seen.values())
    assert all(len(each["others"]) == 2 for each in seen.values())
    best = max((second, third), key=lambda machine: seen[id(machine)]["group"])
    others = [machine for machine in machines if machine is not best]
    shown = rescue(best)
    assert "nothing was changed" in shown.err
    assert f"group {seen[id(best)]['group']}, on this machine; it had all of 20" in shown.text

    done = rescue(best, "--from-here")
    assert done.code == 0, done
    assert "about the last second" in done.err
    assert rescue(best, "--from-here").code == 0, "it may be repeated"
    best.start()
    for machine in others:
        machine.join(best)
        machine.start()
    for number in range(3):
        for machine in machines:
            has(machine, f"object {number}", LONG)
    first.put("behind", LONG[::-1])
    for machine in (second, third):
        has(machine, "behind", LONG[::-1])
    assert "etcd" not in best.status()
    eventually(lambda: bool(best.status()["walker"]["healed"]), "it is not healed")

    node.start(etcd.names)  # the etcd was not lost at all
    eventually(lambda: record_of(best).left is None, "the etcd is not known to be back")
    first.put("when it is back", LONG)
    assert second.get("when it is back") == LONG

    stop_all(machines)
    with running_etcd(tmp_path / "another") as another:
        best.init("prod", "--etcd", another.urls[0])
        for machine in (best, *others):
            machine.start()
        first.put("at another etcd", LONG)
        eventually(lambda: is_whole(best), "there are no replicas")
        leader, followers = leader_of(machines)
        leader.lose_power()
        eventually(lambda: followers[0]("stat", "bucket/at another etcd").code == 0, "no replica leads")
        for key in ("object 1", "behind", "when it is back", "at another etcd"):
            has(followers[1], key, LONG if key != "behind" else LONG[::-1])
        leader.start()
        stop_all(machines)


def has(machine: Machine, key: str, payload: bytes) -> None:
    """Wait until a machine reads an object: it may not have found the other members again yet."""
    eventually(lambda: machine("stat", f"bucket/{key}").code == 0, f"{key} has no name")
    eventually(lambda: machine("cat", f"bucket/{key}").out == payload, f"{key} is not read")


def record_of(machine: Machine) -> Any:
    return read_machine(machine.devices[0])


def test_a_replica_is_read_without_its_etcd_for_one_start(etcd: EtcdCluster, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", 2)
    machine.init("prod", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(etcd.urls))
    machine.start()
    try:
        machine.put("object", LONG)
        running = rescue(machine, "--read-only")
        assert "nothing is lost, and nothing is to be rescued" in running.err
        etcd.nodes[0].kill()
        served = rescue(machine)
        assert served.code == 75, "a lake that is served is not looked at"
        machine.lose_power()
        before = looked_at(machine)["group"]

        done = rescue(machine, "--read-only")
        assert done.code == 0, done
        machine.start()
        assert "only read" in machine.printed[0]
        has(machine, "object", LONG)
        assert "object" in machine.good("ls", "bucket/").text
        for changing in (("put", "-", "bucket/another"), ("rm", "bucket/object"), ("mv", "bucket/object", "bucket/b")):
            refused = machine(*changing, stdin=LONG)
            assert refused.code == 74, refused
            assert "the names of this machine are only read" in refused.err
        assert machine("gc").code != 0
        assert len(machine.status()["members"]) == 2
        assert machine.stop() == 0
        assert looked_at(machine)["group"] == before, "nothing was decided"

        etcd.nodes[0].start(etcd.names)
        machine.start()
        machine.put("when it is back", LONG)
        assert machine.get("object") == machine.get("when it is back") == LONG
        assert machine.stop() == 0

        etcd.nodes[0].kill()
        assert rescue(machine, "--from-here").code == 0
        machine.start()
        assert machine.get("when it is back") == LONG
        machine.put("behind", LONG)
    finally:
        stop_all([machine])


@pytest.mark.thorough
def test_a_lake_without_any_replica_begins_from_a_checkpoint_in_itself(etcd: EtcdCluster, tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "first", 2), Machine(tmp_path / "second", 1)
    for machine in (first, second):
        machine._options = ("--names-checkpoint-interval", "2s")
    first.init("prod", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(etcd.urls))
    first.start()
    try:
        second.join(first)
        second.start()
        for number in range(5):
            first.put(f"object {number}", content(number, 200_000))
        first.put("long", LONG)
        made_ns = time.time_ns()
        eventually(lambda: newest_of(second) > made_ns, "the second machine knows of no checkpoint of all names")
        for _ in range(4):
            first.good("gc")
        made_ns = time.time_ns()
        eventually(lambda: newest_of(second) > made_ns, "no checkpoint is made behind gc")
        stop_all([first, second])
        etcd.nodes[0].kill()
        for machine in (first, second):
            for device in machine.devices:
                shutil.rmtree(device / "names", ignore_errors=True)

        first.begin_to_serve()  # it waits for the etcd, and serves its members
        eventually(lambda: len(first.members(1, 2)) == 2, "its members do not serve")
        shown = rescue(second)
        assert "nothing was changed" in shown.err
        assert shown.text.count("checkpoint in the lake") == 2
        done = rescue(second, "--from-lake")
        assert done.code == 0, done
        assert "begins again from its names of 20" in done.err
        assert "has a replica of the names" in rescue(second, "--from-lake").err
        second.start()
        stop_all([first])
        first.join(second)
        first.start()
        for machine in (first, second):
            for number in range(5):
                has(machine, f"object {number}", content(number, 200_000))
            has(machine, "long", LONG)
        first.put("behind", LONG)
        has(second, "behind", LONG)
    finally:
        stop_all([first, second])


def newest_of(machine: Machine) -> int:
    """Return the time of the newest checkpoint in the lake that a machine knows of."""
    record = record_of(machine)
    records = lake_records_in(machine.devices, bytes.fromhex(record.lake))
    if records is None or not records.checkpoints(FIRST_SHARD):
        return 0
    return records.checkpoints(FIRST_SHARD)[0].said_ns
