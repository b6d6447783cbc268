"""A lake of two names shards that lie in one machine's folder."""

from __future__ import annotations

from pathlib import Path

from engine.coordinator.coordinator import Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.records import (
    REPEATED_KEY,
    SHARDS_KEY,
    Charge,
    ChargeRecord,
    LakeRecord,
    RepeatedRecord,
    RepeatedReplica,
    ShardsRecord,
    encode,
)
from engine.format.group_parts import FIRST_SHARD
from engine.lake.etcd_place import EtcdPlace
from engine.lake.machine import new_machine, with_etcd
from engine.lake.member_processes import MemberPlan
from engine.lake.names_here import open_names, open_table
from engine.lake.plan import LakePlan
from engine.lake.shards_here import note, noted_in
from engine.namespace.buckets import ensure_bucket
from engine.process.mirrored_names import LocalNames
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.ids import NamesShard, ReplicaId, RingEpoch, Sequence
from tests.unit.engine.cluster.stripe_rig import table_of

LAKE = bytes(range(16))
SECOND = NamesShard(1)
SHARDS = (FIRST_SHARD, SECOND)
AT_ETCD = ChargeRecord(LAKE, Charge.LEFT, 3, b"the etcd's time.")
THERE = ReplicaId(b"t" * 16)


def plan_of(folder: Path) -> LakePlan:
    """Return the plan of a machine with one folder."""
    members = [MemberPlan(folder, folder / "socket", ["true"], lambda: True)]
    protection = Protection(1, 0)
    place = EtcdPlace(("http://10.0.0.1:2379",), "lake", incarnation=AT_ETCD.incarnation.hex())
    machine = with_etcd(new_machine(LAKE), place)
    return LakePlan(
        machine, "", is_new=True, members=members, protection=protection, is_chosen=False, accept_loss=True,
        new_devices=False,
    )  # fmt: skip


async def make(plan: LakePlan, shards: int = 2, *, charge: ChargeRecord = AT_ETCD) -> None:
    """Make the names of a lake that is at an etcd, with a bucket in each shard of so many that are here."""
    for shard in map(NamesShard, range(shards)):
        async with open_names(plan, shard=shard) as names:
            await note(names.store.metadata, shard, charge)
            await make_bucket(names, f"bucket-{shard}")
            if shard == FIRST_SHARD:
                async with open_table(names.store) as table:
                    await fill(table)


async def fill(table: NamesCoordinator) -> None:
    """Let a table have what the leader has repeated."""
    state = LakeState(table)
    await state.make_lake(LakeRecord(LAKE, 1, 0, "prod"))
    await state.next_epoch(RingEpoch(0), pack(table_of("1+0", 1)))
    replicas = tuple(
        RepeatedReplica(THERE, "elsewhere", Sequence(number), 5, shard)
        for number, shard in ((70, FIRST_SHARD), (7, SECOND))
    )
    puts = [Put(SHARDS_KEY, encode(ShardsRecord(2))), Put(REPEATED_KEY, encode(RepeatedRecord(9, replicas)))]
    await table.transact([], puts)


async def make_bucket(names: LocalNames, bucket: str, at_ns: int = 1) -> int:
    made, sequence = await names.store.metadata.commit(lambda txn: ensure_bucket(txn, bucket, at_ns))
    await names.store.metadata.wait_durable(sequence)
    return made.node


async def notes(plan: LakePlan) -> dict[NamesShard, ChargeRecord]:
    found = {}
    for shard in SHARDS:
        async with open_names(plan, shard=shard) as names:
            charge = await noted_in(names.store.metadata)
            assert charge is not None
            found[shard] = charge
    return found


def replace_time(charge: ChargeRecord) -> ChargeRecord:
    return ChargeRecord(charge.lake, charge.state, charge.turn, b"another time....")
