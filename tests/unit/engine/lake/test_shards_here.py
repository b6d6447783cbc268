"""The names shards in one machine's folders: all of one time, or none is served; rescued and moved at any crash."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.names_shards import NamesShards, shards_of
from engine.coordinator.records import (
    SHARDS_KEY,
    Charge,
    CheckpointsRecord,
    NamesCheckpoint,
    ShardsRecord,
    checkpoints_key,
    encode,
)
from engine.format.group_parts import FIRST_SHARD
from engine.group_log.assembly import ReplicaIsBehind
from engine.lake import rescue as rescue_module
from engine.lake.all_shards import assigned_buckets
from engine.lake.from_lake import kept_records
from engine.lake.lake_records import LakeRecords, write_lake_records
from engine.lake.names_here import open_names, open_table
from engine.lake.names_replica import refuse_other_time
from engine.lake.rescue import NamesFound, ReplicaHere, looked_at, rescued
from engine.lake.shards_here import NODE_BITS, note, noted_in, refuse_missing, refuse_other_note
from engine.namespace.buckets import ensure_bucket
from lakefs.errors import PreconditionFailed, StoreUnusable
from lakefs.ids import EMPTY_BLOB, NamesShard, Sequence
from tests.memory_coordinator import memory_coordinator
from tests.names_rig import names_store
from tests.unit.engine.lake.shards_rig import AT_ETCD, LAKE, SECOND, SHARDS, THERE, make, notes, plan_of, replace_time
from tests.unit.support.metadata_rig import run


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
