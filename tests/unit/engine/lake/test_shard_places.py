"""Names of several shards on one machine: their folders and addresses, and that none is taken for another's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.moving import charge_of, take_charge
from engine.coordinator.records import SHARDS_KEY, ShardsRecord, encode
from engine.format.group_parts import FIRST_SHARD
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.lake.folders import holds_any_names, holds_names, look_at_folders, names_folder, shards_in
from engine.lake.lake_process import port_of
from engine.lake.machine import new_machine
from engine.lake.member_processes import MemberPlan
from engine.lake.names_here import open_names, open_table
from engine.lake.plan import MEMBERS_MAX, LakePlan, shard_address
from engine.lake.rescue import rescued
from engine.superblock.store_role import refuse_other_role
from engine.superblock.superblock import open_store, read_superblock
from lakefs.cluster.protection import Protection
from lakefs.errors import ConfigError, PreconditionFailed, StoreUnusable
from lakefs.ids import NamesShard

LAKE = bytes(range(16))
SECOND = NamesShard(1)


def make(folder: Path, shard: NamesShard) -> None:
    """Make a store of the names of a shard."""
    disk = LocalDisk(names_folder(folder, shard))
    open_store(disk, SystemClock(), create=True, cluster_id=LAKE, has_names=True, names_shard=shard).lock.close()


def test_each_shard_has_a_folder_and_what_was_set_aside_is_no_shards(tmp_path: Path) -> None:
    for name in ("names.1", "names.12", "names.stale", "names.1.stale", "names.01", "names.x", "superblock"):
        (tmp_path / name).mkdir()
    assert shards_in(tmp_path) == [0, 1, 12]
    assert shards_in(tmp_path / "away") == [0]
    assert [names_folder(tmp_path, NamesShard(shard)).name for shard in (0, 1, 12)] == ["names", "names.1", "names.12"]
    assert not holds_any_names(tmp_path)
    make(tmp_path, SECOND)
    assert holds_any_names(tmp_path)
    assert [holds_names(tmp_path, NamesShard(shard)) for shard in (0, 1, 12)] == [False, True, False]


def test_names_of_another_shard_are_refused_by_name(tmp_path: Path) -> None:
    for shard in (FIRST_SHARD, SECOND):
        make(tmp_path, shard)
        found = read_superblock(LocalDisk(names_folder(tmp_path, shard)))
        assert found.names_shard == shard
        refuse_other_role(found, LAKE, has_names=True, names_shard=shard)
        with pytest.raises(StoreUnusable, match=f"of shard {shard} of the lake {LAKE.hex()}, not of shard 7"):
            refuse_other_role(found, LAKE, has_names=True, names_shard=NamesShard(7))


def test_folders_that_were_swapped_are_not_served(tmp_path: Path) -> None:
    make(tmp_path, FIRST_SHARD)
    make(tmp_path, SECOND)
    assert look_at_folders([tmp_path]).lake_id == LAKE
    (tmp_path / "names").rename(tmp_path / "aside")
    (tmp_path / "names.1").rename(tmp_path / "names")
    with pytest.raises(StoreUnusable, match="holds the names of shard 1"):
        look_at_folders([tmp_path])


def test_names_of_one_shard_alone_make_the_folders_a_lakes(tmp_path: Path) -> None:
    make(tmp_path, SECOND)
    found = look_at_folders([tmp_path])
    assert (found.lake_id, found.is_new) == (LAKE, False)


def test_shards_listen_behind_the_ports_of_members() -> None:
    assert shard_address("tcp://10.0.0.4:9100", FIRST_SHARD) == "tcp://10.0.0.4:9100"
    assert shard_address("tcp://10.0.0.4:9100", SECOND) == "tcp://10.0.0.4:9357"
    assert shard_address("unix:/run/lake/lake.sock.names", SECOND) == "unix:/run/lake/lake.sock.names.1"
    machine = msgspec.structs.replace(new_machine(LAKE), listen="10.0.0.4:9100")
    last = port_of(machine, MEMBERS_MAX)
    assert last is not None
    assert last.port < 9357


def test_a_port_that_there_is_not_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs port 65536, which there is not: give it a lower port"):
        shard_address("tcp://10.0.0.4:65279", SECOND)
    assert shard_address("tcp://10.0.0.4:65278", SECOND).endswith(":65535")


def test_a_lake_of_several_shards_is_not_rescued_from_the_names_of_one(tmp_path: Path) -> None:
    machine = new_machine(LAKE)
    members = [MemberPlan(tmp_path, tmp_path / "socket", ["true"], lambda: True)]
    plan = LakePlan(
        machine,
        "",
        is_new=True,
        members=members,
        protection=Protection(1, 0),
        is_chosen=False,
        accept_loss=True,
        new_devices=False,
    )

    async def main() -> None:
        async with open_names(plan) as names, open_table(names.store) as table:
            await table.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(2)))])
            await take_charge(table, LAKE)
            charge = await charge_of(table)
        with pytest.raises(PreconditionFailed, match="this machine has no replica of names shard 1"):
            await rescued(plan)
        async with open_names(plan) as names, open_table(names.store) as table:
            assert await charge_of(table) == charge, "nothing was changed"

    trio.run(main)
