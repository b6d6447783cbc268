"""Names that are only read: what was there is answered, nothing is decided, and the store is as it was."""

from __future__ import annotations

import pytest

from engine.coordinator.lake_state import LakeState
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.records import LakeRecord
from engine.lake.names_here import open_table
from engine.lake.reads_only import READS_ONLY, reading, recorded_protection
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import NamesService
from engine.store.names_opening import open_names_store
from lakefs.cluster.protection import Protection
from lakefs.errors import EngineUnreachable, StoreReadOnly, StoreUnusable
from lakefs.host.offload import InlineOffload
from lakefs.ids import GcGeneration, RingEpoch
from lakefs.wire import messages as m
from tests.names_rig import names_store
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import run
from tests.unit.support.metadata_rig import NAMES_OF


def test_names_that_are_only_read_answer_and_decide_nothing() -> None:
    async def scenario() -> None:
        disk = SimDisk()
        async with names_store(disk) as store, open_table(store) as table:
            await EmbeddedEngine(NamesService(store)).call(m.BucketCreate("bucket"))
            with pytest.raises(StoreUnusable, match="no copy of the lake's records"):
                await recorded_protection(table)
            await LakeState(table).make_lake(LakeRecord(NAMES_OF, 2, 1))
            await LakeState(table).next_epoch(RingEpoch(0), b"a table")
            before = store.metadata.durable_sequence
        opening = open_names_store(
            disk, SimClock(), InlineOffload(), cluster_id=NAMES_OF, create=False, leading=reading, verify_index=False
        )
        async with opening as store:
            client = EmbeddedEngine(NamesService(store))
            listed = (await client.call(m.BucketList())).message
            assert isinstance(listed, m.Buckets)
            assert [bucket.name for bucket in listed.buckets] == ["bucket"]
            with pytest.raises(StoreReadOnly, match=READS_ONLY):
                await client.call(m.BucketCreate("another"))
            table = NamesCoordinator(store.metadata, store.clock)
            assert await recorded_protection(table) == Protection(2, 1)
            with pytest.raises(EngineUnreachable, match=READS_ONLY):
                await LakeState(table).advance_generation(GcGeneration(0))
            table.close()
            assert store.metadata.durable_sequence == before
        async with names_store(disk) as store:
            assert store.metadata.durable_sequence == before
            await EmbeddedEngine(NamesService(store)).call(m.BucketCreate("another"))

    run(scenario)
