"""Answers with stamps on every kind of client: those of this machine see when an answer stands no more."""

from __future__ import annotations

import pytest

from lakefs.errors import PermissionDenied, UnsupportedVersion
from lakefs.host.descriptors import close_all
from lakefs.stamps.stamps import STAMP, StampReader
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import Engine, Kind, features_of
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask, put

NAMES = [("bkt", "a"), ("bkt", "no such"), ("bkt", "d/b")]


async def need_stamps(client: EngineClient) -> None:
    """Skip the test where the engine does not say that it has stamps."""
    if not await features_of(client) & m.FEATURE_STAMPS:
        pytest.skip("the engine says that it has no stamps")


async def _opened(client: EngineClient, *, stamps: bool = True) -> list[bytes]:
    request = m.OpenObjects(NAMES, lease=False, stamps=stamps)
    return [result.stamps for result in (await ask(client, request, m.OpenResults)).results]


async def _looked_up(client: EngineClient, *, stamps: bool = True) -> list[bytes]:
    request = m.StatNames(NAMES, stamps=stamps)
    return [result.stamps for result in (await ask(client, request, m.NameResults)).results]


async def _reader(client: EngineClient) -> StampReader:
    reply = await client.call(m.OpenStamps())
    assert reply.message == m.StampsOpened()
    [descriptor] = reply.descriptors
    reader = StampReader(descriptor)
    close_all([descriptor])
    return reader


def test_puts_have_the_stamps_that_opening_the_names_has_if_the_request_asks_for_them(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await need_stamps(client)
        if not kind.puts_have_stamps:
            pytest.skip("answers to puts have no stamps here")
        changes = [m.NameChange(*name, b"", m.ObjectAttributes(), create_bucket=True) for name in NAMES]
        changes[1] = m.NameChange("bkt", "no such", b"", m.ObjectAttributes(), m.Condition(etags=["*"]))
        for asked in (True, False):
            request = m.PutObjects([1] * len(changes), changes, stamps=asked)
            results = (await ask(client, request, m.NameResults, *[b"1"] * len(changes))).results
            assert [result.stat is not None for result in results] == [True, False, True]
            opened = await _opened(client, stamps=asked)
            assert [result.stamps for result in results] == [opened[0], b"", opened[2]]
            assert bool(opened[0]) == asked

    kind.run(body)


def test_each_result_has_a_set_of_stamps_if_the_request_asks_for_them(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await need_stamps(client)
        await put(client, "a", b"1")
        await put(client, "d/b", b"2")
        for sets in (await _opened(client), await _looked_up(client)):
            assert len(sets) == len(NAMES)
            for found in sets:
                slots = [slot for slot, _ in STAMP.iter_unpack(found)]
                assert len(slots) == len(set(slots)) > 2
        assert await _opened(client) == await _looked_up(client)
        assert await _opened(client, stamps=False) == await _looked_up(client, stamps=False) == [b""] * len(NAMES)

    kind.run(body)


def test_a_change_of_a_name_turns_its_stamps_and_only_local_clients_see_that(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await need_stamps(client)
        await put(client, "a", b"1")
        await put(client, "d/b", b"2")
        if not client.carries_descriptors:
            await refused(client, PermissionDenied, m.OpenStamps())
            return
        reader = await _reader(client)
        for looked in (_opened, _looked_up):
            for key, stale in (("a", [True, False, False]), ("no such", [False, True, False])):
                sets = await looked(client)
                assert all(map(reader.stand, sets))
                await put(client, key, b"new")
                assert [not reader.stand(found) for found in sets] == stale
            await ask(client, m.DeleteNames([("bkt", "no such")]), m.NameResults)
        assert (await ask(client, m.BucketSet("bkt", anonymous_read=True), m.Buckets)).buckets[0].anonymous_read
        assert not any(map(reader.stand, sets))

    kind.run(body)


def test_a_visible_change_has_turned_its_stamps_when_it_is_answered(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"1")
        if not client.carries_descriptors:
            return
        reader = await _reader(client)
        [found, *_] = await _opened(client)
        await ask(client, m.SetAttributes("bkt", "a", mode=0o600, durable=False), m.NameResults)
        assert not reader.stand(found)

    kind.run(body)


def test_an_engine_with_stamps_says_so_when_it_is_greeted(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        assert bool(await features_of(engine.client) & m.FEATURE_STAMPS) == kind.has_stamps

    kind.run(body)


def test_an_engine_without_stamps_says_so_and_answers_without_them(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.metadata.stamps.shared_stamps.IS_BUILT", False)

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"1")
        assert await _opened(client) == await _looked_up(client) == [b""] * len(NAMES)
        if client.carries_descriptors:
            await refused(client, UnsupportedVersion, m.OpenStamps())
        assert not await features_of(client) & m.FEATURE_STAMPS

    kind.run(body)
