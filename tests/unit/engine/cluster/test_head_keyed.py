"""Keys at heads: one request to each home, misses where homes are away, spaces given to homes before they answer."""

from __future__ import annotations

import os

import pytest
import trio

from engine.keyed.spaces import KEYED_PART_CHARGE
from lakefs.cluster.placing import next_table
from lakefs.content.verify import granule_crcs
from lakefs.errors import ERROR_TABLE, ClusterDegraded, EngineBusy, RequestTooLarge, SessionLost, SpaceNotFound
from lakefs.ids import data_chunk_id
from lakefs.limits import HEAD_SPACES_FRESH_S, KEYED_QUOTA_BYTES_MIN, MIB
from lakefs.wire import messages as m
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_keyed import slots_of
from tests.store_rig import ask, read, session_of, store_chunks
from tests.unit.engine.cluster.keyed_rig import HOMES, KeyedLake, in_keyed_lake
from tests.unit.engine.cluster.stripe_rig import Fault

CODES = {row.error: row.wire_code for row in ERROR_TABLE}
KEYS = [b"key %d" % number for number in range(128)]
VALUES = {key: b"value of " + key for key in KEYS}


def test_a_request_about_many_keys_is_one_request_to_each_home() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        assert head.sent() == {"SetSpaces": HOMES}
        assert (await head.put(space, VALUES)).outcomes == [m.KEYED_STORED] * len(KEYS)
        assert head.sent() == {"KeyedPut": HOMES}
        assert {home for key in KEYS for home in [lake.home(space, key)]} == set(lake.rig.members.clients)
        assert await head.match(space, KEYS) == [True] * len(KEYS)
        assert head.sent() == {"KeyedMatch": HOMES}
        matched = await ask(head.client, m.KeyedMatch(space, KEYS), m.KeyedMatched)
        assert matched.chunks == [data_chunk_id(value) for value in VALUES.values()], "in the order of the keys"
        head.sent()
        reply = await head.client.call(m.ReadChunks(matched.chunks, [0] * len(KEYS), [0] * len(KEYS)))
        assert reply.body.joined() == b"".join(VALUES.values())
        reply.body.release()
        assert head.sent() == {"ReadChunks": HOMES}, "no stripe is looked for"
        await head.remove(space, *KEYS)
        assert head.sent() == {"KeyedRemove": HOMES}
        await ask(head.client, m.SpaceList(), m.Spaces)
        await ask(head.client, m.SpaceRemove("space"), m.Done)
        assert head.sent() == {"SetSpaces": 2 * HOMES}

    in_keyed_lake(body)


def test_a_load_is_one_request_to_each_home_until_the_answers_are_full() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        await head.put(space, VALUES)
        large = {b"large %d" % number: bytes([number]) * (3 * MIB) for number in range(12)}
        for first in range(0, 12, 4):
            await head.put(space, dict(list(large.items())[first : first + 4]))
        client = lake.names.client(descriptors=True)
        memory, _, descriptor = await slots_of(client, [b""], 40 * MIB)
        head.sent()
        for values, sent in ((VALUES, {"KeyedRead": HOMES}), (large, {"KeyedRead": HOMES, "ReadChunks": 5})):
            offsets = [number * (40 * MIB // len(values)) for number in range(len(values))]
            loaded = await ask(client, m.KeyedLoad(memory, space, list(values), offsets), m.KeyedLoaded)
            assert loaded.counts == [1] * len(values)
            assert loaded.crcs == [granule_crcs(value) for value in values.values()]
            for offset, value in zip(offsets, values.values(), strict=True):
                assert os.pread(descriptor, len(value), offset) == value
            found = head.sent()
            assert found.keys() == sent.keys()
            assert all(found[kind] <= count for kind, count in sent.items())
        home = lake.home(space, KEYS[0])
        for fault in (Fault.LYING, Fault.AWAY):
            head.lose(home, fault=fault)
            loaded = await ask(client, m.KeyedLoad(memory, space, KEYS, [*range(0, 128 * 32, 32)]), m.KeyedLoaded)
            assert loaded.counts == [int(lake.home(space, key) != home) for key in KEYS]
        await client.aclose()
        os.close(descriptor)

    in_keyed_lake(body)


def test_the_prefix_that_is_present_is_put_together_from_all_homes() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        await head.put(space, {key: VALUES[key] for key in KEYS[:40] + KEYS[41:50]})
        assert await head.match(space, KEYS[:60]) == [True] * 40 + [False] + [True] * 9 + [False] * 10

    in_keyed_lake(body)


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.AWAY])
def test_keys_of_a_home_that_is_away_are_misses_and_fail_by_themselves(fault: Fault) -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        half = dict(list(VALUES.items())[:64])
        await head.put(space, half)
        away = lake.home(space, KEYS[0])
        here = {key: lake.home(space, key) != away for key in KEYS}
        head.lose(away, fault=fault)
        assert await head.match(space, KEYS) == [here[key] and key in half for key in KEYS]
        put = await head.put(space, VALUES)
        outcomes = [m.KEYED_PRESENT if key in half else m.KEYED_STORED for key in KEYS]
        assert put.outcomes == [outcome if here[key] else 0 for key, outcome in zip(KEYS, outcomes, strict=True)]
        removed = await head.remove(space, *KEYS[:2])
        for keys, failures in ((KEYS, put.failures), (KEYS[:2], removed.failures)):
            codes = [failure and failure.wire_code for failure in failures]
            assert codes == [None if here[key] else CODES[ClusterDegraded] for key in keys]
        await head.put(space, half)
        assert (await head.stat()).entries == sum(here.values()), "usage is that of the homes that are up"
        head.members.faults.clear()
        assert await head.match(space, KEYS) == [here[key] or key in half for key in KEYS]
        assert await head.get(space, KEYS[0]) == VALUES[KEYS[0]], "a home that returns has its values"

    in_keyed_lake(body)


def test_a_space_is_used_while_homes_are_away_and_they_learn_of_it_when_they_return() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        away = next(iter(lake.rig.members.clients))
        head.lose(away)
        space = await head.open()
        key = lake.keys_of(space, away, 1)[0]
        assert await head.match(space, [key]) == [False]
        head.members.faults.clear()
        assert await lake.spaces_at(away) == []
        head.sent()
        assert (await head.put(space, {key: b"v"})).outcomes == [m.KEYED_STORED]
        assert head.sent() == {"SetSpaces": 1, "KeyedPut": 1}
        assert await head.get(space, key) == b"v"

    in_keyed_lake(body)


def test_a_removed_space_that_a_cut_off_home_still_has_is_not_found_and_is_removed_when_the_home_returns() -> None:
    async def body(lake: KeyedLake) -> None:
        head, other = lake.heads
        space = await head.open()
        await head.put(space, VALUES)
        assert await other.match(space, KEYS) == [True] * len(KEYS)
        cut = lake.home(space, KEYS[0])
        for one in lake.heads:
            one.lose(cut)
        await ask(head.client, m.SpaceRemove("space"), m.Done)
        for home in lake.rig.members.clients:
            assert len(await lake.spaces_at(home)) == (home == cut)
        for one in lake.heads:
            one.members.faults.clear()
        await refused(head.client, SpaceNotFound, m.KeyedMatch(space, KEYS))
        again = await head.open()
        assert again != space
        assert await head.match(again, KEYS) == [False] * len(KEYS)
        assert [stat.number for stat in await lake.spaces_at(cut)] == [again]
        await refused(other.client, SpaceNotFound, m.KeyedMatch(space, KEYS))

    in_keyed_lake(body)


def test_another_head_does_without_a_removed_space_soon_even_at_a_home_that_still_has_it() -> None:
    async def body(lake: KeyedLake) -> None:
        head, other = lake.heads
        space = await head.open()
        await head.put(space, VALUES)
        cut = lake.home(space, KEYS[0])
        assert await other.match(space, [KEYS[0]]) == [True]
        head.lose(cut)
        await ask(head.client, m.SpaceRemove("space"), m.Done)
        await trio.sleep(HEAD_SPACES_FRESH_S + 1)
        await refused(other.client, SpaceNotFound, m.KeyedMatch(space, [KEYS[0]]))
        await refused(other.client, SpaceNotFound, m.KeyedPut(space, [KEYS[0]], [1], [1]), [b"x"])

    in_keyed_lake(body)


def test_a_home_that_learned_of_a_removal_from_another_head_refuses_at_once() -> None:
    async def body(lake: KeyedLake) -> None:
        head, other = lake.heads
        space = await head.open()
        assert await other.match(space, KEYS) == [False] * len(KEYS)
        await ask(head.client, m.SpaceRemove("space"), m.Done)
        await refused(other.client, SpaceNotFound, m.KeyedMatch(space, KEYS))
        number = await head.open("next")
        assert (await other.put(number, VALUES)).outcomes == [m.KEYED_STORED] * len(KEYS), "a head that reads it anew"

    in_keyed_lake(body)


def test_a_home_that_has_lost_its_spaces_is_given_them_again() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open(ttl_s=60)
        await head.put(space, VALUES)
        home = lake.home(space, KEYS[0])
        await ask(lake.rig.members.clients[home], m.SpaceRemove("space"), m.Done)
        await trio.sleep(20)  # until upkeep has removed the values
        assert await head.match(space, KEYS) == [lake.home(space, key) != home for key in KEYS]
        assert (await head.put(space, VALUES)).outcomes.count(m.KEYED_STORED) > 0
        assert await head.match(space, KEYS) == [True] * len(KEYS)
        (stat,) = await lake.spaces_at(home)
        assert (stat.number, stat.ttl_s) == (space, 60)

    in_keyed_lake(body)


def test_homes_share_a_quota_and_take_no_more_than_it() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open(quota_bytes=KEYED_QUOTA_BYTES_MIN)
        shares = [stat.quota_bytes for home in lake.rig.members.clients for stat in await lake.spaces_at(home)]
        assert KEYED_QUOTA_BYTES_MIN - HOMES <= sum(shares) <= KEYED_QUOTA_BYTES_MIN
        assert min(shares) > KEYED_QUOTA_BYTES_MIN // HOMES * 0.6
        over = m.KeyedPut(space, [b"over"], [4], [4 * MIB] * 4)
        for index in range(100):
            await head.put(space, {b"%d" % index: bytes([index]) * MIB})
        stat = await head.stat()
        taken = stat.value_bytes + stat.entries * KEYED_PART_CHARGE
        assert KEYED_QUOTA_BYTES_MIN * 7 // 10 < taken <= KEYED_QUOTA_BYTES_MIN
        assert sum([await head.get(space, b"%d" % index) is not None for index in range(100)]) == stat.entries
        await head.open(quota_bytes=0)
        assert (await ask(head.client, over, m.KeyedOutcomes, *[bytes(4 * MIB)] * 4)).outcomes == [m.KEYED_STORED]
        await head.open(quota_bytes=2 * KEYED_QUOTA_BYTES_MIN)
        shares = [stat.quota_bytes for home in lake.rig.members.clients for stat in await lake.spaces_at(home)]
        assert sum(shares) >= 2 * KEYED_QUOTA_BYTES_MIN - HOMES

    in_keyed_lake(body)


def test_a_value_larger_than_its_homes_share_is_refused_by_itself() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open(quota_bytes=KEYED_QUOTA_BYTES_MIN)
        session = await session_of(head.client)
        (chunk,) = await store_chunks(head.client, session, [bytes(4 * MIB)])
        commit = m.KeyedCommit(session, space, [b"large", b"small"], [9, 1], [chunk] * 10, end_session=True)
        answer = await ask(head.client, commit, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_FAILED, m.KEYED_STORED]
        assert answer.failures[0] is not None
        assert answer.failures[0].wire_code == CODES[RequestTooLarge]
        await ask(head.client, m.SessionEnd(session), m.Done)

    in_keyed_lake(body)


def test_a_commit_whose_home_is_away_fails_by_itself_and_is_done_later_in_the_same_session() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        session = await session_of(head.client)
        chunks = await store_chunks(head.client, session, [b"one", b"two" * 30_000])
        away = lake.home(space, KEYS[0])
        other = next(key for key in KEYS if lake.home(space, key) != away)
        commit = m.KeyedCommit(session, space, [KEYS[0], other], [2, 1], [*chunks, chunks[0]], end_session=True)
        head.lose(away)
        answer = await ask(head.client, commit, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_FAILED, m.KEYED_STORED]
        assert [failure and failure.wire_code for failure in answer.failures] == [CODES[ClusterDegraded], None]
        head.members.faults.clear()
        answer = await ask(head.client, commit, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_STORED, m.KEYED_PRESENT]
        await refused(head.client, SessionLost, commit)
        matched = await ask(head.client, m.KeyedMatch(space, [KEYS[0], other]), m.KeyedMatched)
        assert [await read(head.client, chunk) for chunk in matched.chunks] == [b"one", b"two" * 30_000, b"one"]

    in_keyed_lake(body)


# --- other tables --------------------------------------------------------------------------------------


def test_keys_that_get_another_home_are_misses_and_no_others() -> None:
    async def body(lake: KeyedLake) -> None:
        head, other = lake.heads
        space = await head.open(quota_bytes=KEYED_QUOTA_BYTES_MIN)
        await head.put(space, VALUES)
        assert await other.match(space, KEYS) == [True] * len(KEYS)
        before = {key: lake.home(space, key) for key in KEYS}
        gone = lake.table.members[0]
        left = [member for member in lake.table.members if member is not gone]
        table = next_table(lake.table, left, accept_loss=True)
        await lake.set_table(table, head)
        assert await head.match(space, KEYS) == [before[key] != gone.id for key in KEYS]
        assert (await head.put(space, VALUES)).outcomes.count(m.KEYED_STORED) == sum(
            home == gone.id for home in before.values()
        )
        assert await head.match(space, KEYS) == [True] * len(KEYS)
        assert await other.match(space, KEYS) == [True] * len(KEYS), (
            "a head with the table before asks the homes before"
        )
        shares = [(await lake.spaces_at(member.id))[0].quota_bytes for member in left]
        assert sum(shares) >= KEYED_QUOTA_BYTES_MIN - HOMES, "the homes that are left have the whole quota"

    in_keyed_lake(body)


def test_a_value_that_was_matched_before_its_home_left_is_read_or_is_a_miss() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        await head.put(space, VALUES)
        matched = await ask(head.client, m.KeyedMatch(space, KEYS), m.KeyedMatched)
        first, home = lake.table.key_ring(), lake.home(space, KEYS[0])
        table = next_table(lake.table, [each for each in lake.table.members if each.id != home], accept_loss=True)
        await lake.set_table(table, head)
        assert await read(head.client, matched.chunks[0]) == VALUES[KEYS[0]], "it is up, and has the chunk"
        for fault in (Fault.LYING, Fault.SHORT, Fault.AWAY):
            head.lose(home, fault=fault)
            reply = await head.client.call(m.ReadChunks(matched.chunks, [0] * len(KEYS), [0] * len(KEYS)))
            assert isinstance(reply.message, m.ReadChunksReply)
            for key, piece in zip(KEYS, reply.message.pieces, strict=True):
                assert (piece.failure is not None) == (first.home(space, key) == home)
            reply.body.release()

    in_keyed_lake(body)


def test_of_two_values_at_two_homes_either_is_found_whole() -> None:
    async def body(lake: KeyedLake) -> None:
        head, other = lake.heads
        space = await head.open()
        first = lake.table
        home = lake.home(space, b"key")
        await head.put(space, {b"key": b"the first value"})
        without = next_table(first, [each for each in first.members if each.id != home], accept_loss=True)
        await lake.set_table(without)
        assert await head.get(space, b"key") is None
        assert (await head.put(space, {b"key": b"another"})).outcomes == [m.KEYED_STORED]
        assert await other.get(space, b"key") == b"another"
        back = next_table(without, list(first.members), accept_loss=True)
        await lake.set_table(back, head)
        assert await head.get(space, b"key") == b"the first value"
        assert await other.get(space, b"key") == b"another"
        await lake.set_table(back, other)
        assert (await other.remove(space, b"key")).outcomes == [m.KEYED_REMOVED]
        assert [await each.get(space, b"key") for each in lake.heads] == [None, None]

    in_keyed_lake(body)


# --- leases --------------------------------------------------------------------------------------------


def leases_at_homes(lake: KeyedLake) -> int:
    return sum(store.references.statistics()["leases"] for store in lake.rig.stores.values())


def test_leases_of_values_end_with_the_client_and_bounds_are_the_heads() -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        await head.put(space, VALUES)
        client = lake.names.client()
        pinned = await ask(client, m.KeyedMatch(space, KEYS, lease=True), m.KeyedMatched)
        assert len(set(pinned.leases)) == len(KEYS) == leases_at_homes(lake)
        await ask(head.client, m.CloseLeases(pinned.leases), m.Done)
        assert leases_at_homes(lake) == len(KEYS), "another client's leases are not its own"
        await ask(client, m.CloseLeases(pinned.leases[:28] * 2), m.Done)
        assert leases_at_homes(lake) == 100
        await client.aclose()
        assert leases_at_homes(lake) == 0

    in_keyed_lake(body)


def test_leases_that_a_client_does_not_receive_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        await head.put(space, VALUES)
        monkeypatch.setattr("engine.sessions.references.LEASES_PER_CONNECTION_MAX", 100)
        await refused(head.client, EngineBusy, m.KeyedMatch(space, KEYS, lease=True))
        assert leases_at_homes(lake) == 0
        head.lose(lake.home(space, KEYS[0]), fault=Fault.ANSWER_LATE)
        with trio.move_on_after(1) as leaving:
            await head.client.call(m.KeyedMatch(space, KEYS[:90], lease=True))
        assert leaving.cancelled_caught
        assert leases_at_homes(lake) == 0

    in_keyed_lake(body)
