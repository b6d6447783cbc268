"""The names shards in one machine's folders: all of one time, or none is served; rescued and moved at any crash."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import Side, charge_of
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.names_shards import NamesShards, shards_of
from engine.coordinator.records import (
    REPEATED_KEY,
    SHARDS_KEY,
    Charge,
    ChargeRecord,
    CheckpointsRecord,
    LakeRecord,
    NamesCheckpoint,
    RepeatedRecord,
    RepeatedReplica,
    ReplicaRecord,
    ShardsRecord,
    checkpoints_key,
    encode,
)
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.assembly import ReplicaIsBehind
from engine.lake import moving_over, rescue as rescue_module
from engine.lake.all_shards import assigned_buckets, open_other_shards
from engine.lake.etcd_place import EtcdPlace
from engine.lake.from_lake import kept_records
from engine.lake.lake_content import Content
from engine.lake.lake_records import LakeRecords, write_lake_records
from engine.lake.machine import new_machine
from engine.lake.member_processes import MemberPlan
from engine.lake.names_here import open_names, open_table
from engine.lake.names_replica import refuse_other_time
from engine.lake.plan import LakePlan
from engine.lake.rescue import NamesFound, ReplicaHere, looked_at, rescued
from engine.lake.shards_here import NODE_BITS, note, noted_in, refuse_missing, refuse_other_note
from engine.namespace.buckets import ensure_bucket, list_buckets
from engine.process.mirrored_names import LocalNames
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.errors import PreconditionFailed, StoreUnusable
from lakefs.ids import EMPTY_BLOB, NamesShard, ReplicaId, RingEpoch, Sequence
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.names_rig import names_store
from tests.unit.engine.cluster.stripe_rig import table_of
from tests.unit.support.metadata_rig import run

LAKE = bytes(range(16))
SECOND = NamesShard(1)
SHARDS = (FIRST_SHARD, SECOND)
AT_ETCD = ChargeRecord(LAKE, Charge.LEFT, 3, b"the etcd's time.")
THERE = ReplicaId(b"t" * 16)
STEPS = 40
"""More than the transactions of a move."""


def plan_of(folder: Path) -> LakePlan:
    """Return the plan of a machine with one folder."""
    members = [MemberPlan(folder, folder / "socket", ["true"], lambda: True)]
    protection = Protection(1, 0)
    machine = new_machine(LAKE)
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


def test_names_of_another_time_and_shards_that_are_missing_are_refused_by_name(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        refuse_missing(plan, 2)
        with pytest.raises(StoreUnusable, match=r"are in 3 shards, and those of shard 2 are in none .* names\.2"):
            refuse_missing(plan, 3)
        async with open_names(plan, shard=SECOND) as names:
            await refuse_other_note(names.store.metadata, AT_ETCD, SECOND)
            other = replace_time(AT_ETCD)
            with pytest.raises(StoreUnusable, match="the names of shard 1 in these folders are of another time"):
                await refuse_other_note(names.store.metadata, other, SECOND)

    trio.run(main)


def replace_time(charge: ChargeRecord) -> ChargeRecord:
    return ChargeRecord(charge.lake, charge.state, charge.turn, b"another time....")


def test_a_shard_without_a_term_begins_its_numbers_with_the_first_note() -> None:
    async def main() -> None:
        async with names_store() as store:
            assert await noted_in(store.metadata) is None
            for _ in range(2):
                await note(store.metadata, SECOND, AT_ETCD)
            assert await noted_in(store.metadata) == AT_ETCD
            made, _ = await store.metadata.commit(lambda txn: ensure_bucket(txn, "bucket", 1))
            assert made.node >> NODE_BITS == SECOND

    run(main)


# --- rescue ------------------------------------------------------------------------------------------


def test_a_rescue_looks_at_all_shards_and_begins_with_all_or_none(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        found = await looked_at(plan)
        assert [each.shard for each in found.replicas] == [0, 1]
        assert [[each.kept for each in found.known_of(shard)] for shard in SHARDS] == [[70], [7]]
        assert found.missing == []
        (tmp_path / "names.1").rename(tmp_path / "aside")
        with pytest.raises(PreconditionFailed, match=r"no replica of names shard 1.*machine elsewhere.*names\.1.*7"):
            await rescued(plan)
        assert not (await looked_at(plan)).is_in_charge, "nothing was changed"
        (tmp_path / "aside").rename(tmp_path / "names.1")
        await rescued(plan)
        charges = await notes(plan)
        assert charges[FIRST_SHARD] == charges[SECOND]
        assert charges[FIRST_SHARD].state is Charge.SERVES
        assert charges[FIRST_SHARD].incarnation != AT_ETCD.incarnation
        await rescued(plan)
        assert await notes(plan) == charges, "it may be repeated"

    trio.run(main)


async def notes(plan: LakePlan) -> dict[NamesShard, ChargeRecord]:
    found = {}
    for shard in SHARDS:
        async with open_names(plan, shard=shard) as names:
            charge = await noted_in(names.store.metadata)
            assert charge is not None
            found[shard] = charge
    return found


def test_a_rescue_that_was_cut_off_between_shards_is_gone_on_with_and_follows_no_log(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        with (
            mock.patch.object(rescue_module, "note", side_effect=OSError("killed")),
            pytest.raises(OSError, match="killed"),
        ):
            await rescued(plan)
        async with open_names(plan) as names:
            with pytest.raises(ReplicaIsBehind):
                refuse_other_time(names.store.metadata, AT_ETCD.incarnation)
        async with open_names(plan, shard=SECOND) as names:
            refuse_other_time(names.store.metadata, AT_ETCD.incarnation, SECOND)  # nothing was changed there
        await rescued(plan)
        charges = await notes(plan)
        assert charges[FIRST_SHARD] == charges[SECOND]
        async with open_names(plan, shard=SECOND) as names:
            with pytest.raises(ReplicaIsBehind):
                refuse_other_time(names.store.metadata, AT_ETCD.incarnation, SECOND)

    trio.run(main)


def test_a_shard_that_was_added_behind_the_last_repeated_record_is_rescued_with_the_others(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        async with open_names(plan) as names, open_table(names.store) as table:
            await table.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(1)))])
        await rescued(plan)
        async with open_names(plan) as names, open_table(names.store) as table:
            assert (await table.get(SHARDS_KEY)).entry is not None
            assert await shards_of(table) == 2

    trio.run(main)


def test_a_replica_of_another_time_of_the_lake_is_no_replica(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        async with open_names(plan, shard=SECOND) as names:
            await note(names.store.metadata, SECOND, replace_time(AT_ETCD))
        assert (await looked_at(plan)).missing == [SECOND]
        with pytest.raises(PreconditionFailed, match="no replica of names shard 1"):
            await rescued(plan)

    trio.run(main)


def test_names_that_were_to_be_made_here_and_were_not_are_no_replica(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan, 1)
        async with open_names(plan, shard=SECOND):
            pass
        found = await looked_at(plan)
        assert found.missing == [SECOND], "another machine has group 7"
        with pytest.raises(PreconditionFailed, match="no replica of names shard 1"):
            await rescued(plan)

    trio.run(main)


def test_checkpoints_in_the_lake_are_for_the_shards_that_have_no_replica_here(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    made = NamesCheckpoint(EMPTY_BLOB, Sequence(7), 1000, 5)
    first = ReplicaHere(FIRST_SHARD, THERE, Sequence(9))

    def keep(*keys: bytes) -> None:
        records = {key: encode(CheckpointsRecord((made,))) for key in keys}
        records[SHARDS_KEY] = encode(ShardsRecord(2))
        write_lake_records([tmp_path], LakeRecords(LAKE, 1, records))

    keep(checkpoints_key(FIRST_SHARD))
    for replicas in ((), (first,)):
        with pytest.raises(PreconditionFailed, match="no replica of names shard 1, and knows of no checkpoint"):
            kept_records(plan, NamesFound("m1", replicas, 1))
    keep(*map(checkpoints_key, SHARDS))
    assert kept_records(plan, NamesFound("m1", (), 1)).checkpoints == dict.fromkeys(SHARDS, (made,))
    found = kept_records(plan, NamesFound("m1", (first,), 2))
    assert (found.shards, found.checkpoints) == (2, {SECOND: (made,)})
    both = first, ReplicaHere(SECOND, THERE, Sequence(9))
    with pytest.raises(PreconditionFailed, match="has a replica of the names, which is newer"):
        kept_records(plan, NamesFound("m1", both, 2))


# --- moves -------------------------------------------------------------------------------------------


@dataclass
class FakeEtcd:
    """The etcd of a lake (`engine.lake.lake_etcd.LakeEtcd`), in memory."""

    coordinator: MemoryCoordinator
    place: EtcdPlace
    cluster: str = "c1"

    @property
    def side(self) -> Side:
        return Side(self.coordinator, self.place.words)

    async def reach(self) -> None:
        await trio.lowlevel.checkpoint()


class Killed(Exception):
    """The process ends."""


@asynccontextmanager
async def killed_at(etcd: MemoryCoordinator, step: int) -> AsyncIterator[None]:
    """Let the process end with a transaction of the etcd, before it is done; as it would in the block."""
    left, transact = step, etcd.transact

    async def counting(*args: object, **more: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return await transact(*args, **more)  # type: ignore[arg-type]

    with mock.patch.object(etcd, "transact", counting):
        yield


@pytest.mark.parametrize("is_cut_off", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_all_shards_move_to_an_etcd_and_back_wherever_they_are_cut_off(tmp_path: Path, is_cut_off: bool) -> None:
    first = 0 if is_cut_off else STEPS
    plan = plan_of(tmp_path)
    there = EtcdPlace(("http://10.0.0.1:2379",), "lake")
    moves = replace(plan, machine=new_machine(LAKE))

    async def main() -> None:
        await make(plan, charge=ChargeRecord(LAKE, Charge.SERVES, 4, b"the table's time"))
        async with memory_coordinator() as coordinator:
            etcd = FakeEtcd(coordinator, there)
            await until_done(etcd, lambda: moving_over._moved_there(moves, etcd), first)  # type: ignore[arg-type]
            charge = await charge_of(coordinator)
            assert charge is not None
            assert charge.state is Charge.SERVES
            found = await notes(plan)
            assert found[FIRST_SHARD].incarnation == found[SECOND].incarnation == charge.incarnation
            assert {each.state for each in found.values()} == {Charge.LEFT}
            for shard in SHARDS:
                async with open_names(plan, shard=shard) as names:
                    origin = (await coordinator.get(LogKeys(shard).origin)).entry
                    assert origin is not None
                    assert origin.value == names.store.superblock.store_id

            await until_done(etcd, lambda: moving_over._moved_back(moves, etcd), first)  # type: ignore[arg-type]
            found = await notes(plan)
            assert found[FIRST_SHARD] == found[SECOND]
            assert found[FIRST_SHARD].state is Charge.SERVES
            left = await charge_of(coordinator)
            assert left is not None
            assert left.state is Charge.LEFT or left.turn < found[FIRST_SHARD].turn

    trio.run(main)


async def until_done(etcd: FakeEtcd, move: Callable[[], Awaitable[object]], first: int) -> None:
    """Cut a move off at a transaction of the etcd, then at the next one, until it is done."""
    for step in range(first, STEPS + 1):
        async with killed_at(etcd.coordinator, step):
            try:
                await move()
            except Killed:
                continue
            except BaseExceptionGroup as group:
                if group.split(Killed)[0] is None:
                    raise
                continue
            return
    raise AssertionError("it is never done")


def test_a_shard_has_all_groups_of_its_log_when_it_leaves_the_etcd(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan, charge=ChargeRecord(LAKE, Charge.SERVES, 4, b"the table's time"))
        async with memory_coordinator() as coordinator:
            etcd = FakeEtcd(coordinator, EtcdPlace(("http://10.0.0.1:2379",), "lake"))
            await moving_over._moved_there(plan, etcd)  # type: ignore[arg-type]
            shutil.copytree(tmp_path / "names.1", tmp_path / "behind")
            led = partial(moving_over._led, plan, etcd, SECOND)  # type: ignore[arg-type]
            async with open_names(plan, led, shard=SECOND) as names:
                await make_bucket(names, "late")
            shutil.rmtree(tmp_path / "names.1")
            (tmp_path / "behind").rename(tmp_path / "names.1")
            restored = replace(plan, restored=True)
            await moving_over._moved_back(restored, etcd)  # type: ignore[arg-type]
        async with open_names(plan, shard=SECOND) as names:
            assert "late" in buckets_of(names)

    trio.run(main)


def buckets_of(names: LocalNames) -> list[str]:
    with names.store.metadata.view() as view:
        return [bucket.name for bucket in list_buckets(view)]


def test_a_shard_of_another_time_is_not_served_with_the_others(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        async with open_names(plan) as first, open_table(first.store) as table, AsyncExitStack() as stack:
            content = cast(Content, None)  # it is not looked at
            with pytest.raises(StoreUnusable, match="are of another time than those of shard 0"):
                await open_other_shards(stack, plan, first.store, table, content, replace_time(AT_ETCD), 2)

    trio.run(main)


def test_a_lake_does_not_leave_its_etcd_for_a_machine_that_lacks_a_shard(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan, 1)
        async with memory_coordinator() as coordinator:
            records = ReplicaRecord("elsewhere", Sequence(9)), ReplicaRecord(plan.machine.machine, Sequence(99))
            puts = [
                Put(LogKeys(SECOND).replica(ReplicaId(bytes([number]) * 16)), encode(record))
                for number, record in enumerate(records)
            ]
            await coordinator.transact([], [*puts, Put(SHARDS_KEY, encode(ShardsRecord(2)))])
            before = dict(coordinator.entries)
            etcd = FakeEtcd(coordinator, EtcdPlace(("http://10.0.0.1:2379",), "lake"))
            with pytest.raises(PreconditionFailed, match=r"names shard 1.*at machine elsewhere.*names\.1"):
                await moving_over._moved_back(plan, etcd)  # type: ignore[arg-type]
            assert coordinator.entries == before, "nothing was changed"

    trio.run(main)


# --- buckets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", SHARDS)
def test_a_bucket_that_two_shards_have_is_where_it_was_made_last(last: NamesShard) -> None:
    """Replicas lag: that of one shard may lack the removal behind which the bucket was made in the other."""

    async def main() -> None:
        async with names_store() as first, names_store() as second, memory_coordinator() as coordinator:
            stores = {FIRST_SHARD: first, SECOND: second}
            for shard, store in stores.items():
                for bucket, at_ns in (("both", 100 + (shard == last)), (f"own-{shard}", 7)):
                    await store.metadata.commit(
                        lambda txn, bucket=bucket, at_ns=at_ns: ensure_bucket(txn, bucket, at_ns)  # type: ignore[misc]
                    )
            buckets = await assigned_buckets(coordinator, stores)
            shards = NamesShards(coordinator)
            assert await shards.read("both") == last
            assert [await shards.read(f"own-{shard}") for shard in SHARDS] == [0, 1]
            buckets[last].making("both")
            again = await assigned_buckets(coordinator, stores)
            again[last].making("both")
            assert await shards.read("both") == last

    run(main)
