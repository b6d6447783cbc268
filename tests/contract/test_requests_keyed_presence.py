"""Requests for presence: one count a key, on every kind of client."""

from __future__ import annotations

import pytest

from lakefs.errors import InvalidArgument, RequestTooLarge, SpaceNotFound
from lakefs.wire import messages as m
from tests.contract.engines import KEYED, KINDS, Engine, Kind, every
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_keyed import MIDDLE, SMALL, codes, put_keys, space_of
from tests.store_rig import ask


@pytest.fixture(params=every(KEYED))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_a_request_for_presence_is_answered_with_one_count_a_key(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        await put_keys(client, space, {b"small": [SMALL], b"parts": [MIDDLE, SMALL], b"middle": [MIDDLE]})
        keys = [b"small", b"gone", b"parts", b"middle", b"small"]
        for _ in range(2):  # a key that had to be looked for in the tables is known afterwards
            matched = await ask(client, m.KeyedMatch(space, keys, presence=True), m.KeyedMatched)
            assert matched == m.KeyedMatched([1, 0, 1, 1, 1], [], [])
        long = len(MIDDLE) + len(SMALL)
        for sizes, counts in (
            ([len(SMALL), 5, long, len(MIDDLE), 0], [1, 0, 1, 1, 1]),
            ([len(SMALL) + 1, 0, long - 1, 0, 1 << 40], [0, 0, 0, 1, 0]),
            ([0, 0, len(MIDDLE), len(SMALL), len(SMALL)], [1, 0, 0, 0, 1]),
        ):
            request = m.KeyedMatch(space, keys, presence=True, sizes=sizes)
            assert (await ask(client, request, m.KeyedMatched)).counts == counts
        await ask(client, m.KeyedRemove(space, [b"small"]), m.KeyedOutcomes)
        matched = await ask(client, m.KeyedMatch(space, keys, presence=True), m.KeyedMatched)
        assert matched.counts == [0, 0, 1, 1, 0]
        assert (await ask(client, m.KeyedMatch(space, [], presence=True), m.KeyedMatched)).counts == []

    kind.run(body)


def test_a_request_for_presence_refuses_what_others_refuse(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        await put_keys(client, space, {b"k": [SMALL]})
        keys = [b"", b"k", b"x" * 65, b"gone"]
        for sizes in ([], [0, len(SMALL), 0, 0]):
            matched = await ask(client, m.KeyedMatch(space, keys, presence=True, sizes=sizes), m.KeyedMatched)
            assert (matched.counts, codes(matched.failures)) == ([0, 1, 0, 0], [1, 0, 1, 0])
        await refused(client, InvalidArgument, m.KeyedMatch(space, keys, presence=True, sizes=[1]))
        await refused(client, InvalidArgument, m.KeyedMatch(space, keys, lease=True, presence=True))
        await refused(client, RequestTooLarge, m.KeyedMatch(space, [b"k"] * 4097, presence=True))
        for asked in ([b"k"], []):
            await refused(client, SpaceNotFound, m.KeyedMatch(1 << 30, asked, presence=True))
        await ask(client, m.SpaceRemove("space"), m.Done)
        await refused(client, SpaceNotFound, m.KeyedMatch(space, [b"k"], presence=True))

    kind.run(body)
