"""The walk through the index after start-up: nothing that frees room begins before it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from engine.format.layouts import Table
from engine.metadata.index_building import build_index
from engine.metadata.metadata_store import Metadata
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from engine.tables.index_check import LOGGED_EVERY_RECORDS, IndexProgress
from engine.tables.lmdb_index import Index
from engine.tables.merged_tables import TableView
from engine.upkeep.index_upkeep import index_state
from lakefs.errors import IndexDamaged, JournalDamaged
from lakefs.ids import Sequence
from lakefs.wire import messages as m
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, delete, gc, put, records, run, simulated_store


def test_nothing_is_freed_before_the_walk_through_the_index_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        walked = trio.Event()

        async def walk(self: Metadata) -> int:
            await walked.wait()
            return 0

        monkeypatch.setattr(Metadata, "verify_index", walk)
        async with simulated_store(verify_index=True) as store:
            client = client_of(store)
            await put(client, "k", b"content")
            await delete(client, "k")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gc, client)
                await trio.sleep(100)
                assert len(records(store)) == 1
                walked.set()
            assert not records(store)

    run(main)


def test_nothing_is_freed_while_a_damaged_index_cannot_be_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def walk(self: Metadata) -> int:
            raise IndexDamaged("planted")

        async def rebuild(self: Metadata) -> None:
            raise JournalDamaged("planted, too")

        monkeypatch.setattr(Metadata, "verify_index", walk)
        monkeypatch.setattr(Metadata, "rebuild_online", rebuild)
        async with simulated_store(verify_index=True) as store:
            client = client_of(store)
            await put(client, "k", b"content")
            await delete(client, "k")
            with pytest.raises(IndexDamaged, match="nothing is freed"):
                await gc(client)
            assert len(records(store)) == 1

    run(main)


def test_a_read_that_meets_damage_says_what_the_engine_does_and_has_it_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with simulated_store(verify_index=True) as store:
            client = client_of(store)
            await put(client, "k", b"content")
            await walked(store)
            assert (await status(client))["index"] == {"state": "verified"}
            get = TableView.get
            is_damaged = True
            progress = []

            def spoilt(self: TableView, table: Table, key: bytes) -> bytes | None:
                if table is Table.NODES and is_damaged:
                    raise IndexDamaged("planted")
                return get(self, table, key)

            async def walk(self: Metadata) -> int:
                raise IndexDamaged("planted, too")

            def build(*arguments: Any) -> Index:
                nonlocal is_damaged
                is_damaged = False
                progress.append(index_state(store))
                return build_index(*arguments)

            monkeypatch.setattr(TableView, "get", spoilt)
            monkeypatch.setattr(Metadata, "verify_index", walk)
            monkeypatch.setattr("engine.metadata.index_building.build_index", build)
            with structlog.testing.capture_logs() as logged:
                opened = await ask(client, m.OpenObjects([("bkt", "k")]), m.OpenResults)
                failure = opened.results[0].failure
                assert failure is not None
                assert "the engine checks its index now, and rebuilds it" in failure.message
                assert "--rebuild" not in failure.message
                with pytest.raises(IndexDamaged, match="checks its index now"):
                    await ask(client, m.StatNames([("bkt", "k")]), m.NameResults)
                await walked(store)
            assert [line["event"].partition(":")[0] for line in logged] == [
                "the index is damaged",
                "the index has been rebuilt",
            ]
            assert "the engine rebuilds it now" in logged[0]["event"]
            assert progress == [{"state": "being rebuilt", "progress": "begun"}]
            assert (await status(client))["index"] == {"state": "verified"}
            opened = await ask(client, m.OpenObjects([("bkt", "k")]), m.OpenResults)
            assert opened.results[0].failure is None

    run(main)


async def walked(store: Store) -> None:
    """Wait until the walk has ended and the upkeep has noticed."""
    await trio.sleep(1)
    await store.index_looked_at.wait()


async def status(client: EmbeddedEngine) -> dict[str, Any]:
    found = json.loads((await ask(client, m.Status(), m.StatusReply)).status_json)
    assert isinstance(found, dict)
    return found


def test_a_rebuild_says_how_far_it_is() -> None:
    progress = IndexProgress()
    with structlog.testing.capture_logs() as logged:
        for records in range(0, 3 * LOGGED_EVERY_RECORDS, LOGGED_EVERY_RECORDS // 2):
            progress.loaded(records, 5 * LOGGED_EVERY_RECORDS)
        progress.replayed(LOGGED_EVERY_RECORDS, Sequence(7), Sequence(9))
    assert [line["progress"] for line in logged] == [
        "1000000 of 5000000 records of the checkpoint restored",
        "2000000 of 5000000 records of the checkpoint restored",
        "the checkpoint and the journal up to group 7 of 9 restored",
    ]


def test_an_opening_that_rebuilds_the_index_says_so_before_and_after() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            await put(client_of(store), "k", b"content")
        (Path(disk.local_path("index")) / "data.mdb").write_bytes(b"not an LMDB file" * 512)
        with structlog.testing.capture_logs() as logged:
            async with simulated_store(disk):
                pass
        now, done = (line["event"] for line in logged)
        assert "the index is rebuilt now" in now
        assert "the index was rebuilt" in done
        assert "next start" not in str(logged)
        assert "fsck" not in str(logged)

    run(main)
