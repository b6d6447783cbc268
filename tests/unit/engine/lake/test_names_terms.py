"""The first term of a names shard that was added: its numbers, and of which time of the lake it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from unittest import mock

import pytest

from engine.coordinator.coordinator_table import entry_of
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.records import CHARGE_KEY, Charge, ChargeRecord, decode
from engine.format.group_parts import FIRST_SHARD
from engine.group_log.assembly import ReplicaIsBehind
from engine.lake.names_replica import refuse_other_time
from engine.lake.names_terms import NODE_BITS, begin_shard
from engine.namespace.buckets import ensure_bucket
from engine.store.keyed_store import KeyedStore
from lakefs.errors import StoreFull
from lakefs.ids import NamesShard
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import NAMES_OF, run

SHARD = NamesShard(3)
TIME = b"this incarnation"


async def begun(store: KeyedStore) -> None:
    """Begin a term."""
    await begin_shard(SHARD, store, ChargeRecord(NAMES_OF, Charge.LEFT, 0, TIME))


async def node_of(store: KeyedStore, bucket: str) -> int:
    """Make a bucket; returns its node."""
    made, sequence = await store.metadata.commit(lambda txn: ensure_bucket(txn, bucket, 1))
    await store.metadata.wait_durable(sequence)
    return made.node


def with_store(main: Callable[[KeyedStore], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with names_store() as store:
            await main(store)

    run(scenario)


def test_nodes_of_a_shard_begin_at_its_number_and_go_on_from_there() -> None:
    async def scenario() -> None:
        disk, nodes = SimDisk(1), []
        for turn in range(3):
            async with names_store(disk) as store:
                await begun(store)
                nodes.append(await node_of(store, f"bucket-{turn}"))
        assert [node >> NODE_BITS for node in nodes] == [SHARD] * 3
        assert nodes == sorted(set(nodes))
        assert nodes[-1] - (SHARD << NODE_BITS) < 1 << 20, "a later term skips nothing"

    run(scenario)


def test_a_first_term_that_was_cut_off_is_gone_on_with() -> None:
    async def main(store: KeyedStore) -> None:
        with (
            mock.patch.object(NamesCoordinator, "transact", side_effect=StoreFull("cut off")),
            pytest.raises(StoreFull),
        ):
            await begun(store)
        with store.metadata.view() as view:
            assert entry_of(view, CHARGE_KEY) is None
        await begun(store)
        with store.metadata.view() as view:
            assert entry_of(view, CHARGE_KEY) is not None
        assert await node_of(store, "bucket") >> NODE_BITS == SHARD

    with_store(main)


def test_names_say_of_which_time_of_the_lake_they_are() -> None:
    async def main(store: KeyedStore) -> None:
        refuse_other_time(store.metadata, TIME, SHARD)  # it was never led
        with pytest.raises(ReplicaIsBehind):
            refuse_other_time(store.metadata, TIME, FIRST_SHARD)
        await begun(store)
        with store.metadata.view() as view:
            entry = entry_of(view, CHARGE_KEY)
        assert entry is not None
        assert decode(ChargeRecord, entry.value).state is Charge.LEFT
        refuse_other_time(store.metadata, TIME, SHARD)
        with pytest.raises(ReplicaIsBehind):
            refuse_other_time(store.metadata, b"another time....", SHARD)

    with_store(main)
