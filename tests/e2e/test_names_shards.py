"""A lake on three machines whose names are in two shards: each has a leader, and is served again when that is lost.

One lake for all drills; each leaves it whole.  Clients never pause, and know what was acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import trio

from engine.coordinator.records import BUCKETS, BucketShardRecord, LeaderRecord, bucket_of_key, decode
from engine.etcd.etcd_coordinator import open_etcd_coordinator
from engine.etcd.etcd_link import EtcdAccess
from engine.format.group_parts import FIRST_SHARD, LogKeys
from lakefs.errors import AcrossShards
from lakefs.ids import NamesShard
from tests.e2e.test_lake_on_machines import Machine, eventually, host_of
from tests.e2e.test_lake_rescued import rescue
from tests.e2e.test_names_replicas import begun, is_whole, machine_id, serving_with_etcd, stop_all, used
from tests.etcd_rig import EtcdCluster, running_etcd

pytestmark = [pytest.mark.slow]
SECOND = NamesShard(1)
SERVED_AGAIN_S = 10.0


class Shards:
    """The lake, and what its etcd has of its names shards."""

    def __init__(self, etcd: EtcdCluster, machines: list[Machine]) -> None:
        self.etcd = etcd
        self.machines = machines
        self.lake = machines[0].status()["id"]
        self._machines = {machine_id(machine): machine for machine in machines}

    def buckets(self) -> dict[str, int]:
        """Return the shard of each bucket."""

        async def read() -> dict[str, int]:
            async with open_etcd_coordinator(EtcdAccess(self.etcd.urls), self.lake) as coordinator:
                page = await coordinator.range(*BUCKETS, limit=100)
            found = ((bucket_of_key(entry.key), decode(BucketShardRecord, entry.value)) for entry in page.entries)
            return {bucket: record.shard for bucket, record in found}

        return trio.run(read)

    def leader(self, shard: NamesShard) -> Machine | None:
        """Return the machine that leads a shard."""

        async def read() -> str:
            async with open_etcd_coordinator(EtcdAccess(self.etcd.urls), self.lake) as coordinator:
                entry = (await coordinator.get(LogKeys(shard).leader)).entry
            return "" if entry is None else decode(LeaderRecord, entry.value).machine

        return self._machines.get(trio.run(read))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    folder = tmp_path_factory.mktemp("shards")
    machines = [Machine(folder / f"machine{number}", count) for number, count in enumerate([2, 1, 1], 1)]
    with running_etcd(folder / "etcd", 3) as etcd, serving_with_etcd(machines, etcd):
        yield Shards(etcd, machines)


def test_a_shard_is_added_while_clients_work_and_new_buckets_go_there(lake: Shards) -> None:
    first, second, third = lake.machines
    with used(*lake.machines) as clients:
        said = second.good("cluster", "names", "add").err
        begun(clients)
    leader = lake.leader(SECOND)
    assert leader is not None
    assert f"names shard 1 is served by machine {machine_id(leader)}" in said
    assert leader is not lake.leader(FIRST_SHARD), "leads are spread over machines"
    for number, machine in enumerate(lake.machines):
        machine.good("put", "-", f"made-{number}/key", stdin=b"%d" % number)
    shards = lake.buckets()
    assert shards["bucket"] == 0
    assert sorted(shards.values()) == [0, 0, 1, 1]
    for machine in lake.machines:
        listed = machine.good("ls").text
        assert all(bucket in listed for bucket in shards)
        for number in range(3):
            assert machine.good("cat", f"made-{number}/key").out == b"%d" % number
            assert "key" in machine.good("ls", f"made-{number}/").text
    there = next(bucket for bucket, shard in shards.items() if shard == SECOND)
    third.good("cp", f"{there}/key", "bucket/copied")
    assert first.good("cat", "bucket/copied").out == second.good("cat", f"{there}/key").out
    third.good("mv", f"{there}/key", f"{there}/moved")
    refused = third("mv", f"{there}/moved", "bucket/moved")
    assert refused.code == AcrossShards.exit_code, refused
    assert first.good("cat", f"{there}/moved").out
    shown = first.good("cluster", "names").text
    assert "names 0 log" in shown
    assert "names 1 log" in shown
    assert shown.count(", at ") == 6, "three replicas of each"


def test_a_shard_is_served_again_when_its_machine_is_lost_and_the_other_goes_on(lake: Shards) -> None:
    there = next(bucket for bucket, shard in lake.buckets().items() if shard == SECOND)
    lost = lake.leader(SECOND)
    assert lost is not None
    others = [machine for machine in lake.machines if machine is not lost]
    with used(*others, buckets=("bucket", there)) as clients:
        lost.lose_power()
        begun(clients)
        leader = lake.leader(SECOND)
        assert leader in others
    away = {bucket: max(each.longest_s for each in clients if each.bucket == bucket) for bucket in ("bucket", there)}
    assert away[there] < SERVED_AGAIN_S, away
    assert away["bucket"] < SERVED_AGAIN_S, away
    lost.start()
    eventually(lambda: is_whole(others[0]), "it does not follow again")


def test_a_shard_whose_leader_is_killed_is_served_again_when_that_starts(lake: Shards) -> None:
    there = next(bucket for bucket, shard in lake.buckets().items() if shard == SECOND)
    killed = lake.leader(SECOND)
    assert killed is not None
    others = [machine for machine in lake.machines if machine is not killed]
    with used(*others, buckets=(there,)) as clients:
        killed.kill()
        killed.start()
        begun(clients)
    assert max(each.longest_s for each in clients) < SERVED_AGAIN_S
    eventually(lambda: is_whole(others[0]), "it is not whole again")


def test_both_shards_are_there_when_all_machines_were_stopped_and_each_head_reaches_them(lake: Shards) -> None:
    there = next(bucket for bucket, shard in lake.buckets().items() if shard == SECOND)
    stop_all(lake.machines)
    with_heads = lake.machines[2]
    with_heads._options = ("--heads", "2")
    for machine in lake.machines:
        machine.start()
    with used(*lake.machines, buckets=("bucket", there)):
        for _ in range(4):  # whichever head takes the client
            assert with_heads.good("cat", f"{there}/moved").out == with_heads.good("cat", "bucket/copied").out != b""
    with_heads.good("put", "-", "under-heads-0/key", stdin=b"there")
    with_heads.good("put", "-", "under-heads-1/key", stdin=b"there")
    shards = lake.buckets()
    assert {shards["under-heads-0"], shards["under-heads-1"]} == {0, 1}
    eventually(lambda: is_whole(lake.machines[0]), "the lake is not whole")
    assert lake.leader(SECOND) is not None


def test_gc_and_fsck_are_of_both_shards(lake: Shards) -> None:
    there = next(bucket for bucket, shard in lake.buckets().items() if shard == SECOND)
    asked = lake.machines[1]
    for bucket in ("bucket", there):
        for what in ("kept", "gone"):
            asked.good("put", "-", f"{bucket}/{what}", stdin=f"{what} in {bucket} ".encode() * 10_000)
        asked.good("rm", f"{bucket}/gone")
    freed = [json.loads(asked.good("gc", "--json").out) for _ in range(3)]
    assert sum(report["freed_shards"] for report in freed) >= 6, freed
    report = json.loads(asked.good("fsck", "--json").out)
    assert (report["damage"], report["unchecked"]) == (0, []), report
    assert not [found for found in report["findings"] if found["code"] == "garbage"], report
    for bucket in ("bucket", there):
        assert asked.good("cat", f"{bucket}/kept").out == f"kept in {bucket} ".encode() * 10_000
    shown = json.loads(asked.good("status", "--json").out)["lake"]["names"]
    assert [shard["shard"] for shard in shown["shards"]] == [1]
    assert len(shown["shards"][0]["replicas"]) == 3


def test_names_of_all_shards_begin_again_on_one_machine_when_their_etcd_is_lost(lake: Shards) -> None:
    """The last drill: the lake has no etcd any more behind it."""
    first, *others = lake.machines
    there = next(bucket for bucket, shard in lake.buckets().items() if shard == SECOND)
    stop_all(lake.machines)
    for node in lake.etcd.nodes:
        node.kill()
    read_without_etcd(first, there)
    for _ in range(2):
        done = rescue(first, "--from-here")
        assert done.code == 0, done
    first.start()
    for machine in others:
        machine.join(first)
        machine.start()
    for machine in lake.machines:
        check_both(machine, there)
        machine.good("put", "-", f"{there}/by-{host_of(machine)}", stdin=b"behind")
        machine.good("put", "-", f"new-{host_of(machine)[4:]}/key", stdin=b"behind")
    assert first("mv", f"{there}/kept", "bucket/moved").code == AcrossShards.exit_code
    assert "without etcd have no replicas" in first("cluster", "names", "add").err
    others[0].good("gc")
    eventually(lambda: others[0]("fsck").code == 0, "fsck finds something, or not all members")


def read_without_etcd(machine: Machine, there: str) -> None:
    """Read both shards from a machine's replicas, for one start."""
    assert "names 1 " in rescue(machine).text
    assert rescue(machine, "--read-only").code == 0
    machine.start()
    has_both(machine, there)
    assert "only read" in machine("put", "-", f"{there}/another", stdin=b"x").err
    assert machine.stop() == 0


def check_both(machine: Machine, there: str) -> None:
    """Fail unless a machine has the names of both shards, and what they are bound to."""
    for bucket in ("bucket", there):

        def is_read(bucket: str = bucket) -> bool:
            return bool(machine("cat", f"{bucket}/kept").out == f"kept in {bucket} ".encode() * 10_000)

        eventually(is_read, f"{bucket}/kept is not read")
    has_both(machine, there)


def has_both(machine: Machine, there: str) -> None:
    """Fail unless a machine has the names of both shards; what they are bound to may be on machines that are away."""
    for bucket in ("bucket", there):
        eventually(lambda bucket=bucket: machine("stat", f"{bucket}/kept").code == 0, f"{bucket} is not served")  # type: ignore[misc]
    listed = machine.good("ls").text
    assert "bucket" in listed
    assert there in listed
