"""The shared index on every kind of client: local ones read places in it by themselves, others have to ask."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
import trio

from engine.process.shared_index_life import run_shared_index
from engine.tiers.shared_index import SharedIndex
from lakefs.errors import InvalidArgument, PermissionDenied, UnsupportedVersion
from lakefs.host.descriptors import close_all
from lakefs.ids import data_chunk_id
from lakefs.shared_index.table import SharedIndexReader
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
            await refused(client, UnsupportedVersion, m.OpenSharedIndex())
        async with trio.open_nursery() as nursery:
            await nursery.start(run_shared_index, engine.store, "memory", 500)
            for number, payload in enumerate(PAYLOADS):
                await put(client, str(number), payload)
            chunks = [bytes(data_chunk_id(payload)) for payload in PAYLOADS]
            grants = (await ask(client, m.Locate(chunks), m.Located)).grants
            if not client.carries_descriptors:
                await refused(client, PermissionDenied, m.OpenSharedIndex())
            else:
                reply = await client.call(m.OpenSharedIndex())
                assert isinstance(reply.message, m.SharedIndexOpened)
                assert reply.message.entries >= 500
                reader = SharedIndexReader(reply.descriptors[0])
                close_all(reply.descriptors)
                assert reader.find_many(chunks) == [
                    (grant.medium, grant.segment, grant.offset, grant.stored_bytes, grant.crc) for grant in grants
                ]
            nursery.cancel_scope.cancel()

    kind.run(body)


def test_what_is_located_is_the_same_whether_it_was_packed_or_looked_up(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = [b"%d" % number * 30_000 for number in range(3)]

    async def body(engine: Engine) -> None:
        if engine.store is None:
            pytest.skip("the engine is out of reach")
        client = engine.client
        for number, payload in enumerate((*payloads, b"short")):
            await put(client, str(number), payload)
        chunks = [bytes(data_chunk_id(payload)) for payload in payloads]
        unknown, short = bytes(data_chunk_id(b"unknown")), bytes(data_chunk_id(b"short"))
        asked: tuple[list[bytes], ...] = ([], chunks, [*chunks, short], [*chunks, unknown], chunks * 30)
        looked_up = [(await ask(client, m.Locate(list(ids)), m.Located)).grants for ids in asked]
        async with trio.open_nursery() as nursery:
            await nursery.start(run_shared_index, engine.store, "memory", 500)
            index = engine.store.shared_index
            assert index is not None
            while index.state == "filling":  # noqa: ASYNC110 (a handful of records)
                await trio.sleep(0.01)
            packed: list[object] = []
            original = SharedIndex.packed_grants

            def seen(*arguments: Any, **named: Any) -> bytes | None:
                found = original(*arguments, **named)
                packed.append(found)
                return found

            monkeypatch.setattr(SharedIndex, "packed_grants", seen)
            for ids, grants in zip(asked, looked_up, strict=True):
                found = (await ask(client, m.Locate(list(ids)), m.Located)).grants
                assert [_place(grant) for grant in found] == [_place(grant) for grant in grants]
            assert [item is None for item in packed] == [False, False, True, True, False]
            await refused(client, InvalidArgument, m.Locate([*chunks, b"no id"]))
            nursery.cancel_scope.cancel()

    kind.run(body)


def _place(grant: m.Grant) -> m.Grant:
    """Return the grant without its epoch, which is only a hint."""
    return msgspec.structs.replace(grant, epoch=0)
