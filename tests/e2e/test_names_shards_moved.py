"""A lake whose names are in two shards, as it leaves its etcd, goes back to it, and outlives its loss."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.lake.lake_records import lake_records_in
from engine.lake.machine import read_machine
from lakefs.ids import NamesShard
from tests.e2e.served import lake
from tests.e2e.test_lake_on_devices import content
from tests.e2e.test_lake_on_machines import Machine, eventually
from tests.e2e.test_lake_rescued import looked_at, rescue
from tests.e2e.test_names_replicas import serving_with_etcd, stop_all
from tests.etcd_rig import EtcdCluster, running_etcd

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
LONG = content(3, 2_000_001)
BUCKETS = ("bucket", "made-0", "made-1", "made-2", "made-3")
"""The first is in the first shard; of those that are made behind it each shard has some."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path / "etcd") as cluster:
        yield cluster


def add_shard(machine: Machine) -> None:
    """Add a names shard, and put an object into a bucket of each shard."""
    machine.put("object", LONG)
    machine.good("cluster", "names", "add")
    for bucket in BUCKETS[1:]:
        put(machine, f"{bucket}/object")


def put(machine: Machine, *names: str) -> None:
    for name in names:
        machine.good("put", "-", name, stdin=LONG + name.encode())


def has_all(machine: Machine, key: str = "object") -> None:
    """Fail unless a machine lists all buckets, and reads an object of each that was made behind the shard."""
    eventually(lambda: machine("ls").code == 0, "the buckets are not listed")
    listed = machine.good("ls").text
    assert all(bucket in listed for bucket in BUCKETS), listed
    for name in (f"{bucket}/{key}" for bucket in BUCKETS[1:]):
        eventually(lambda name=name: machine("stat", name).code == 0, f"{name} has no name")  # type: ignore[misc]
        wanted = LONG + name.encode()  # other members may not have been found again yet
        eventually(lambda name=name, wanted=wanted: machine("cat", name).out == wanted, f"{name} is not read")  # type: ignore[misc]
        assert key in machine.good("ls", f"{name.partition('/')[0]}/").text


def is_in_two_shards(machine: Machine) -> bool:
    """Return True if new buckets of a lake are made in both shards: a move between some is refused."""
    put(machine, "new-0/object", "new-1/object")
    return machine("mv", "new-0/object", "new-1/moved").code != 0


def test_a_lake_of_two_shards_leaves_its_etcd_and_goes_back(etcd: EtcdCluster, tmp_path: Path) -> None:
    machine, other = Machine(tmp_path / "machine", 2), Machine(tmp_path / "other", 1)
    machine.init("prod", "--protect", "1+1", "--accept-loss", "--etcd", etcd.urls[0])
    machine.start()
    try:
        add_shard(machine)
        assert machine.stop() == 0

        machine.init("prod", "--no-etcd")
        machine.start()
        assert "etcd" not in machine.status()
        has_all(machine)
        assert machine.get("object") == LONG
        assert is_in_two_shards(machine), "there is one shard"
        put(machine, *(f"{bucket}/without" for bucket in BUCKETS[1:]))
        for _ in range(4):
            machine.good("gc")
        has_all(machine)
        has_all(machine, "without")
        assert machine("cluster", "names", "add").code != 0
        other.join(machine)
        other.start()
        has_all(other, "without")
        put(other, *(f"{bucket}/elsewhere" for bucket in BUCKETS[1:]))
        machine.lose_power()
        machine._options = ("--heads", "2")
        machine.start()
        has_all(machine, "elsewhere")
        machine._options = ()
        assert other.stop() == 0
        assert machine.stop() == 0

        second = [device / "names.1" for device in machine.devices if (device / "names.1").exists()]
        for folder in second:
            folder.rename(folder.with_name("taken"))
        refused = lake("serve", *machine.data_options, "--socket", machine.socket, "--admin", "off", "--s3", "off")
        assert "the names of this lake are in 2 shards, and those of shard 1 are in none" in refused.err, refused
        for folder in second:
            folder.with_name("taken").rename(folder)

        machine.init("prod", "--etcd", etcd.urls[0])
        machine.start()
        assert "etcd" in machine.status()
        for key in ("object", "without", "elsewhere"):
            has_all(machine, key)
        other.start()
        has_all(other)
        put(machine, *(f"{bucket}/with" for bucket in BUCKETS[1:]))
        has_all(other, "with")
    finally:
        stop_all([machine, other])


def test_a_lake_of_two_shards_outlives_the_loss_of_its_etcd(etcd: EtcdCluster, tmp_path: Path) -> None:
    machines = [Machine(tmp_path / f"machine{number}", count) for number, count in enumerate([2, 1, 1], 1)]
    with serving_with_etcd(machines, etcd):
        add_shard(machines[0])
        eventually(lambda: all(map(has_second, machines)), "the second shard has no three replicas")
        for number, machine in enumerate(machines):
            put(machine, *(f"{bucket}/by-{number}" for bucket in BUCKETS[1:]))
        time.sleep(2)  # so much of the last second may be lost
        stop_all(machines)
        etcd.nodes[0].kill()
        first, second, third = machines

        aside = [device / "names.1" for device in first.devices if (device / "names.1").exists()]
        for folder in aside:
            folder.rename(folder.with_name("aside"))
        shown = rescue(first)
        assert "names 1                                 no replica on this machine" in shown.text, shown
        assert shown.text.count("names 1 ") == 3, "the replicas of other machines are not shown"
        assert "this machine has no replica of names shard 1" in shown.err
        refused = rescue(first, "--from-here")
        assert refused.code != 0, refused
        assert "stop lake serve at 127." in refused.err, refused
        assert "copy names.1 from each data folder there that has it into one here, and try again" in refused.err
        assert "lake cluster rescue --from-here --restored" in refused.err
        assert not looked_at(first)["is_in_charge"], "nothing was changed"
        [copied] = [device / "names.1" for device in second.devices if (device / "names.1").exists()]
        shutil.copytree(copied, first.devices[0] / "names.1")

        assert "is a copy of that folder, not the folder itself" in rescue(first, "--from-here").err
        [shown_second] = looked_at(first, "--restored")["shards"]
        group = shown_second["group"]
        done = rescue(first, "--from-here", "--restored")
        assert done.code == 0, done
        assert f"group {group} of names shard 1" in done.err, done
        assert rescue(first, "--from-here").code == 0, "it may be repeated"
        first.start()
        for machine in (second, third):
            machine.join(first)
            machine.start()
        for machine in machines:
            for key in ("object", "by-0", "by-1", "by-2"):
                has_all(machine, key)
        assert is_in_two_shards(third), "there is one shard"
        for _ in range(4):
            first.good("gc")
        has_all(second, "by-0")
        eventually(lambda: bool(first.status()["walker"]["healed"]), "it is not healed")
        stop_all(machines)

        with running_etcd(tmp_path / "another") as another:
            moves_to_an_etcd_and_back(another, machines)


def moves_to_an_etcd_and_back(etcd: EtcdCluster, machines: list[Machine]) -> None:
    """Let a rescued lake move to an etcd, outlive the loss of a machine there, and move back; all are stopped then."""
    first, second, third = machines
    first.init("prod", "--etcd", etcd.urls[0])
    for machine in machines:
        machine.start()
    has_all(second, "by-2")
    eventually(lambda: has_second(third), "the shard gets no replicas")
    put(second, *(f"{bucket}/at-another" for bucket in BUCKETS[1:]))
    first.lose_power()
    has_all(second, "at-another")
    first.start()
    has_all(first, "at-another")
    stop_all(machines)
    first.init("prod", "--no-etcd")
    first.start()
    second.start()
    for machine in (first, second):
        has_all(machine, "at-another")
    put(second, "made-0/without", "made-1/without")
    stop_all(machines)


def has_second(machine: Machine) -> bool:
    return any((device / "names.1").exists() for device in machine.devices)


def test_a_shard_that_is_only_read_and_one_that_is_made_from_a_checkpoint(etcd: EtcdCluster, tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "first", 2), Machine(tmp_path / "second", 1)
    for machine in (first, second):
        machine._options = ("--names-checkpoint-interval", "2s")
    first.init("prod", "--protect", "1+1", "--accept-loss", "--etcd", etcd.urls[0])
    first.start()
    try:
        second.join(first)
        second.start()
        add_shard(first)
        made_ns = time.time_ns()
        for shard in (0, 1):
            eventually(lambda shard=shard: newest_of(second, shard) > made_ns, f"no checkpoint of {shard} is known")  # type: ignore[misc]
        stop_all([first, second])
        etcd.nodes[0].kill()

        assert rescue(first, "--read-only").code == 0
        first.start()
        has_all(first)
        for bucket in BUCKETS:
            assert first("rm", f"{bucket}/object").code == 74, "it is only read"
        assert first.stop() == 0

        for machine in (first, second):
            for folder in ("names", "names.1"):
                for device in machine.devices:
                    shutil.rmtree(device / folder, ignore_errors=True)
        first.begin_to_serve()  # it waits for the etcd, and serves its members
        eventually(lambda: len(first.members(1, 2)) == 2, "its members do not serve")
        shown = rescue(second)
        assert "checkpoint in the lake" in shown.text
        assert "checkpoint of names 1 in the lake" in shown.text
        done = rescue(second, "--from-lake")
        assert done.code == 0, done
        assert "of names shard 1" in done.err
        assert "has a replica of the names" in rescue(second, "--from-lake").err
        second.start()
        stop_all([first])
        first.join(second)
        first.start()
        for machine in (first, second):
            has_all(machine)
        put(first, *(f"{bucket}/behind" for bucket in BUCKETS[1:]))
        has_all(second, "behind")
    finally:
        stop_all([first, second])


def newest_of(machine: Machine, shard: int) -> int:
    """Return the time of the newest checkpoint of a shard that a machine knows; 0: it knows of none."""
    record = read_machine(machine.devices[0])
    assert record is not None
    records = lake_records_in(machine.devices, bytes.fromhex(record.lake))
    known = () if records is None else records.checkpoints(NamesShard(shard))
    return known[0].said_ns if known else 0
