"""Puts that resize: a value of another length is replaced, in one step, and one of the same length stays."""

from __future__ import annotations

import pytest
import trio

from lakefs.wire import messages as m
from tests.contract.engines import KEYED, KINDS, Engine, Kind, every
from tests.contract.test_requests_keyed import (
    LARGE,
    MIDDLE,
    SMALL,
    check_keepers,
    collected,
    put_keys,
    space_of,
    stat_of,
    value_of,
)
from tests.store_rig import ask, session_of, store_chunks


@pytest.fixture(params=every(KEYED))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_a_put_that_resizes_replaces_values_of_another_length_alone(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client, ttl_s=1000)
        await put_keys(client, space, {b"same": [b"four"], b"other": [MIDDLE, SMALL], b"long": [LARGE]})
        resized = {b"same": [b"1234"], b"other": [b"now shorter"], b"long": [LARGE], b"new": [b"new"]}
        stored, present = m.KEYED_STORED, m.KEYED_PRESENT
        answers = [present, stored, present, stored]
        assert (await put_keys(client, space, resized, resize=True)).outcomes == answers
        assert (await put_keys(client, space, resized, resize=True)).outcomes == [present] * 4, "as a repeated request"
        assert await value_of(client, space, b"same") == b"four", "other bytes of the same length change nothing"
        assert await value_of(client, space, b"other") == b"now shorter"
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LARGE])
        for resize, outcome in ((False, present), (True, stored), (True, present)):
            commit = m.KeyedCommit(session, space, [b"new"], [1], [chunk], resize=resize)
            assert (await ask(client, commit, m.KeyedOutcomes)).outcomes == [outcome]
        assert await value_of(client, space, b"new") == LARGE
        stat = await stat_of(client)
        assert (stat.entries, stat.value_bytes) == (4, 4 + len(b"now shorter") + 2 * len(LARGE))
        await ask(client, m.SessionEnd(session), m.Done)
        assert await collected(engine) == 3
        await check_keepers(engine)

    kind.run(body)


def test_of_many_that_resize_a_key_at_once_each_length_is_stored_once(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        await put_keys(client, space, {b"key": [b"of another length"]})
        outcomes: list[int] = []

        async def put(number: int) -> None:
            value = b"%d" % number * 4096
            outcomes.extend((await put_keys(client, space, {b"key": [value]}, resize=True)).outcomes)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(put, number)
        assert sorted(outcomes) == [m.KEYED_STORED, *[m.KEYED_PRESENT] * 7]
        found = await value_of(client, space, b"key")
        assert found is not None
        assert found in [b"%d" % number * 4096 for number in range(8)], "one of them, whole"

    kind.run(body)
