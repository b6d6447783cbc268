"""Puts and removals of keys at a head whose table is older than their homes': they are made at the new homes."""

from __future__ import annotations

import os

import pytest

from lakefs.cluster.placing import next_table
from lakefs.errors import EngineBusy
from lakefs.wire import messages as m
from tests.contract.test_requests_keyed import slots_of
from tests.store_rig import ask, session_of, store_chunks
from tests.unit.engine.cluster.keyed_rig import KeyedLake, in_keyed_lake
from tests.unit.engine.cluster.test_head_keyed import CODES, KEYS, VALUES


@pytest.mark.parametrize("way", ["body", "slots", "commit"])
def test_a_put_that_meets_a_newer_table_goes_to_the_new_home_unseen_by_the_client(way: str) -> None:
    async def body(lake: KeyedLake) -> None:
        stale, head = lake.heads
        space = await head.open()
        assert await stale.match(space, KEYS) == [False] * len(KEYS)
        session = await session_of(stale.client)
        chunks = await store_chunks(stale.client, session, list(VALUES.values()))
        gone = lake.home(space, KEYS[0])
        moved = next_table(lake.table, [each for each in lake.table.members if each.id != gone], accept_loss=True)
        await lake.set_table(moved, head)
        stale.sent()
        if way == "body":
            answer = await stale.put(space, VALUES)
        elif way == "slots":
            client = lake.names.client(descriptors=True)
            memory, offsets, descriptor = await slots_of(client, list(VALUES.values()))
            os.close(descriptor)
            sizes = [len(value) for value in VALUES.values()]
            request = m.KeyedPut(space, KEYS, [1] * len(KEYS), sizes, memory=memory, offsets=offsets)
            answer = await ask(client, request, m.KeyedOutcomes)
            await client.aclose()
        else:
            commit = m.KeyedCommit(session, space, KEYS, [1] * len(KEYS), chunks)
            answer = await ask(stale.client, commit, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_STORED] * len(KEYS)
        await ask(stale.client, m.SessionEnd(session), m.Done)
        assert answer.failures == []
        assert stale.members.tables[0] == moved
        assert await head.match(space, KEYS) == [True] * len(KEYS), "all lie where the newer table says"
        assert [await head.get(space, key) for key in KEYS[:3]] == [VALUES[key] for key in KEYS[:3]]

    in_keyed_lake(body)


def test_a_removal_that_meets_a_newer_table_is_made_at_the_new_home() -> None:
    async def body(lake: KeyedLake) -> None:
        head, stale = lake.heads
        space = await head.open()
        await stale.put(space, VALUES)
        await stale.remove(space, *KEYS)
        gone = lake.home(space, KEYS[0])
        moved = next_table(lake.table, [each for each in lake.table.members if each.id != gone], accept_loss=True)
        await lake.set_table(moved, head)
        await head.put(space, VALUES)
        assert (await stale.remove(space, *KEYS)).outcomes == [m.KEYED_REMOVED] * len(KEYS)
        assert await head.match(space, KEYS) == [False] * len(KEYS)

    in_keyed_lake(body)


def test_keys_whose_homes_change_on_and_on_fail_by_themselves() -> None:
    async def body(lake: KeyedLake) -> None:
        head, stale = lake.heads
        space = await head.open()
        assert await stale.match(space, KEYS) == [False] * len(KEYS)
        moved = next_table(lake.table, list(lake.table.members), accept_loss=True)
        await lake.set_table(moved, head)
        stale.members.newer = stale.members.tables  # it learns no newer one
        answers = [await stale.put(space, {b"key": b"value"}), await stale.remove(space, b"key")]
        for answer in answers:
            assert answer.outcomes == [m.KEYED_FAILED]
            assert [failure and failure.wire_code for failure in answer.failures] == [CODES[EngineBusy]]
        assert await head.match(space, [b"key"]) == [False]

    in_keyed_lake(body)
