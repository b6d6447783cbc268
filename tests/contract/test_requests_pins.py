"""Requests that pin chunks, on every kind of client: which clients may, and what they get."""

from __future__ import annotations

from lakefs.errors import PermissionDenied
from lakefs.ids import data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_NONE, MEDIUM_SEGMENT
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import LARGE, refused
from tests.store_rig import ask, put


def test_chunks_are_pinned_by_neighbours_only(kind: Kind) -> None:
    is_remote = "tcp" in kind.name or "network" in kind.name

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", LARGE)
        chunks: list[bytes] = [data_chunk_id(LARGE), data_chunk_id(b"not there")]
        if is_remote:
            await refused(client, PermissionDenied, m.PinChunks(chunks))
            return
        grants = (await ask(client, m.PinChunks(chunks), m.Pinned)).grants
        assert grants == (await ask(client, m.Locate(chunks), m.Located)).grants
        assert [grant.medium for grant in grants] == [MEDIUM_SEGMENT, MEDIUM_NONE]
        if engine.store is not None:
            pins = (await engine.store.status())["pins"]
            assert (pins["chunks"], pins["segments"]) == (1, 1)
            assert pins["bytes"] >= len(LARGE)
            async with engine.connect() as other:
                await ask(other, m.UnpinChunks(chunks), m.Done)
                assert engine.store.segments.pins.statistics() == pins
                await ask(other, m.PinChunks(chunks), m.Pinned)
            await ask(client, m.UnpinChunks(chunks), m.Done)
            while engine.store.segments.pins.statistics()["chunks"]:
                await ask(client, m.Ping(), m.Done)  # wait until the engine has noticed the other connection's end

    kind.run(body)
