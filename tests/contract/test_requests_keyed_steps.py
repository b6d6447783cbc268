"""Requests about keys whose values have very many parts: the loop reads and changes them in short steps."""

from __future__ import annotations

import os

import pytest

from engine.format.keyed import KeyedValue, SpaceRecord, unpack_value
from engine.keyed import values as values_module
from engine.keyed.spaces import find_space
from engine.requests import keyed as keyed_module, keyed_batch as keyed_batch_module, keyed_load as keyed_load_module
from engine.tables.views import View
from lakefs.errors import RequestTooLarge
from lakefs.limits import MIB
from lakefs.wire import messages as m
from tests.contract.engines import KEYED, KINDS, Engine, Kind, every
from tests.contract.test_requests_keyed import CODES, SMALL, codes, slots_of, space_of, stat_of
from tests.store_rig import ask, session_of, store_chunks


@pytest.fixture(params=every(KEYED))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_values_of_many_parts_are_handled_in_steps(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: Engine) -> None:
        client, store = engine.client, engine.store
        if store is None:
            return
        space, session = await space_of(client), await session_of(client)
        (chunk,) = await store_chunks(client, session, [SMALL])
        keys = [b"%d" % index for index in range(140)]
        for first in range(0, len(keys), 16):
            some = keys[first : first + 16]
            commit = m.KeyedCommit(session, space, some, [256] * len(some), [chunk] * 256 * len(some))
            assert (await ask(client, commit, m.KeyedOutcomes)).outcomes == [m.KEYED_STORED] * len(some)
        steps: list[int] = []

        def unpack_counted(record: bytes) -> KeyedValue:
            steps[-1] += 1
            return unpack_value(record)

        def find_counted(view: View, number: int) -> SpaceRecord:
            steps.append(0)
            return find_space(view, number)

        monkeypatch.setattr(values_module, "unpack_value", unpack_counted)
        for module in (keyed_module, keyed_batch_module, keyed_load_module):
            monkeypatch.setattr(module, "find_space", find_counted)
        matched = await ask(client, m.KeyedMatch(space, keys + keys[:1]), m.KeyedMatched)
        assert matched.counts == [256] * 128 + [0] * 13
        assert codes(matched.failures) == [0] * 128 + [CODES[RequestTooLarge]] * 13
        assert steps == [129]
        steps.clear()
        if client.carries_descriptors:
            memory, _, descriptor = await slots_of(client, [b""], MIB)
            load = m.KeyedLoad(memory, space, keys, [index * 4096 for index in range(len(keys))])
            loaded = await ask(client, load, m.KeyedLoaded)
            assert loaded.counts == [256] * 16 + [0] * 124
            assert codes(loaded.failures) == [0] * 16 + [CODES[RequestTooLarge]] * 124
            assert steps == [17]
            os.close(descriptor)
            steps.clear()
        put = m.KeyedPut(space, [*keys, b"new"], [1] * 141, [1] * 141)
        answer = await ask(client, put, m.KeyedOutcomes, b"x" * 141)
        assert answer.outcomes == [m.KEYED_PRESENT] * 140 + [m.KEYED_STORED]
        assert steps[:5] == [32] * 4 + [12]
        steps.clear()
        removed = await ask(client, m.KeyedRemove(space, [*keys, b"", keys[0]]), m.KeyedOutcomes)
        assert removed.outcomes == [m.KEYED_REMOVED] * 140 + [m.KEYED_FAILED, m.KEYED_ABSENT]
        assert codes(removed.failures) == [0] * 140 + [1, 0]
        assert steps == [32] * 4 + [12]
        assert (await stat_of(client)).entries == 1

    kind.run(body)
