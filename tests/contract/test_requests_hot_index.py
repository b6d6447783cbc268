"""The hot index, asked for in every way: local clients read places in it by themselves, others are told to ask."""

from __future__ import annotations

from typing import Final

import pytest
import trio

from engine.hot_index_life import run_hot_index
from lakefs.errors import PermissionDenied, UnsupportedVersion
from lakefs.hot_index import HotIndexReader
from lakefs.ids import data_chunk_id
from lakefs.sockets import close_all
from lakefs.wire import messages as m
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask, put

PAYLOADS: Final = (b"small", b"large" * 50_000)


def test_a_local_client_finds_by_itself_what_locate_answers(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            pytest.skip("the engine is out of reach")
        client = engine.client
        if client.carries_descriptors:
            await refused(client, UnsupportedVersion, m.OpenHotIndex())
        async with trio.open_nursery() as nursery:
            await nursery.start(run_hot_index, engine.store, "memory", 500)
            for number, payload in enumerate(PAYLOADS):
                await put(client, str(number), payload)
            chunks = [bytes(data_chunk_id(payload)) for payload in PAYLOADS]
            grants = (await ask(client, m.Locate(chunks), m.Located)).grants
            if not client.carries_descriptors:
                await refused(client, PermissionDenied, m.OpenHotIndex())
            else:
                reply = await client.call(m.OpenHotIndex())
                assert isinstance(reply.message, m.HotIndexOpened)
                assert reply.message.entries >= 500
                reader = HotIndexReader(reply.descriptors[0])
                close_all(reply.descriptors)
                assert reader.find_many(chunks) == [
                    (grant.medium, grant.segment, grant.offset, grant.stored_bytes, grant.crc)
                    for grant in grants
                ]
            nursery.cancel_scope.cancel()

    kind.run(body)
