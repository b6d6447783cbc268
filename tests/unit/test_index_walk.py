"""What waits for the walk through the index behind start-up: whatever frees what the index does not show."""

from __future__ import annotations

import pytest
import trio

from engine.metadata import Metadata
from lakefs.errors import IndexDamaged, JournalDamaged
from tests.store_rig import client_of, delete, gc, put, records, run, simulated_store


def test_nothing_is_freed_before_the_walk_through_the_index_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
