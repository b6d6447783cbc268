"""A lake whose coordinator is an etcd, as an operator moves it there, breaks it, and takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_lake_on_devices import content
from tests.e2e.test_lake_on_machines import Machine, eventually
from tests.etcd_rig import EtcdCluster, running_etcd

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

    machine.lose_power()
    machine.start()
    assert machine.get("there") == LONG
    etcd.leader().kill()
    machine.put("without its leader", LONG)
    assert machine.get("without its leader") == LONG
    machine.good("gc")

    for node in etcd.nodes:
        node.kill()
    machine.put("without etcd", LONG)
    assert machine.get("without etcd") == LONG
    machine.good("mv", "bucket/without etcd", "bucket/moved")
    assert "the coordinator cannot be asked: etcd at" in machine.good("cluster", "status").text
    assert not etcd_of(machine)["reachable"]
    for node in etcd.nodes:
        node.start(etcd.names)
    eventually(lambda: etcd_of(machine)["reachable"], "etcd is not found again")
    machine.good("gc")
    assert machine.stop() == 0

    machine.init("prod", "--no-etcd")
    machine.start()
    assert "etcd" not in machine.status()
    for key in ("before", "there", "without its leader", "moved"):
        assert machine.get(key) == LONG
    machine.put("back", LONG)
    for node in etcd.nodes:
        node.kill()
    machine.lose_power()
    machine.start()
    assert machine.get("back") == LONG
