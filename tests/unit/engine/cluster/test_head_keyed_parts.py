"""Spaces as homes of keys are given them; answers that a head puts together; pieces of values, checked."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.head.head_keyed import Found, Value, matched
from engine.head.keyed_chunks import KeyedPlaces, Place, checked
from engine.members.ports import Got, Wanted
from lakefs.content.verify import granule_crcs, granules_around
from lakefs.errors import ERROR_TABLE, InvalidArgument, PermissionDenied, RequestTooLarge, SpaceNotFound, StaleEpoch
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.wire import messages as m
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask, client_of, simulated_store
from tests.unit.engine.cluster.keyed_rig import KeyedLake, in_keyed_lake
from tests.unit.engine.cluster.stripe_rig import id_of

CODES = {row.error: row.wire_code for row in ERROR_TABLE}


# --- what members are given -----------------------------------------------------------------------------


def space_stat(number: int, name: str, quota_bytes: int = 0) -> m.SpaceStat:
    return m.SpaceStat(name, number, 1, quota_bytes, 0, 0, 0)


def test_a_member_follows_the_latest_list_of_spaces() -> None:
    async def body(lake: KeyedLake) -> None:
        home, client = next(iter(lake.rig.members.clients.items()))
        one, two = space_stat(1, "one"), space_stat(2, "two", 5)

        async def give(version: int, *spaces: m.SpaceStat) -> list[tuple[int, str]]:
            answer = await ask(client, m.SetSpaces(1, version, list(spaces)), m.Spaces)
            assert answer.version >= version
            return [(stat.number, stat.name) for stat in answer.spaces]

        assert await give(10, one, two) == [(1, "one"), (2, "two")]
        await ask(client, m.KeyedPut(1, [b"k"], [1], [1]), m.KeyedOutcomes, b"v")
        assert await give(9) == [(1, "one"), (2, "two")], "an earlier list changes nothing"
        renamed = space_stat(3, "one")
        assert await give(11, two, renamed) == [(3, "one"), (2, "two")], "another space of the same name"
        await refused(client, SpaceNotFound, m.KeyedMatch(1, [b"k"]))
        assert (await ask(client, m.KeyedMatch(3, [b"k"]), m.KeyedMatched)).counts == [0]
        assert await give(12, renamed) == [(3, "one")]
        assert await give(12, renamed) == await give(11, one) == [(3, "one")]
        assert [(stat.number, stat.quota_bytes) for stat in await lake.spaces_at(home)] == [(3, 0)]

    in_keyed_lake(body)


def test_lists_of_spaces_that_no_lake_has_are_refused() -> None:
    async def body(lake: KeyedLake) -> None:
        client = next(iter(lake.rig.members.clients.values()))
        good = space_stat(1, "one")
        for bad in (
            [good, good],
            [good, space_stat(2, "one")],
            [space_stat(0, "zero")],
            [space_stat(1 << 32, "large")],
            [space_stat(1, "quota", -1)],
            [m.SpaceStat("ttl", 1, 1, 0, -1, 0, 0)],
        ):
            await refused(client, InvalidArgument, m.SetSpaces(1, 1, bad))
        await refused(client, InvalidArgument, m.SetSpaces(1, 0, [good]))
        await refused(client, StaleEpoch, m.SetSpaces(0, 1, [good]))
        async with simulated_store() as store:
            alone = client_of(store)
            await refused(alone, PermissionDenied, m.SetSpaces(1, 1, [good]))
            await alone.aclose()

    in_keyed_lake(body)


def test_a_member_hands_out_no_number_of_the_lakes() -> None:
    async def body(lake: KeyedLake) -> None:
        client = next(iter(lake.rig.members.clients.values()))
        await ask(client, m.SetSpaces(1, 1, [space_stat(41, "one")]), m.Spaces)
        assert (await ask(client, m.SpaceOpen("its own"), m.SpaceStat)).number == 42
        await ask(client, m.SetSpaces(1, 2, []), m.Spaces)
        assert (await ask(client, m.SpaceOpen("its own"), m.SpaceStat)).number == 43

    in_keyed_lake(body)


# --- answers put together -------------------------------------------------------------------------------


def test_from_the_first_value_on_that_has_no_room_no_key_has_one() -> None:
    found = Found(failures={1: m.Failure(1, "a bad key")})
    for index, parts in ((0, 2), (2, 3), (3, 1), (5, 1)):
        found.values[index] = Value(id_of(0), [b"%d" % part for part in range(parts)], [1] * parts)
    answer, used = matched([b"a", b"", b"c", b"d", b"e", b"f"], found, parts_max=4)
    too_large = CODES[RequestTooLarge]
    assert (answer.counts, used) == ([2, 0, 0, 0, 0, 0], [0])
    assert [failure and failure.wire_code for failure in answer.failures] == [None, 1, *[too_large] * 4]
    answer, used = matched([b"a", b"", b"c", b"d", b"e", b"f"], found, parts_max=5)
    assert (answer.counts, used) == ([2, 0, 3, 0, 0, 0], [0, 2])
    assert [failure and failure.wire_code for failure in answer.failures] == [None, 1, None, *[too_large] * 3]
    found.failures[2] = m.Failure(too_large, "its home's own answer was full")
    del found.values[2]
    assert matched([b"a", b"", b"c", b"d", b"e", b"f"], found)[1] == [0], "a home that is full ends the whole answer"


def test_places_are_kept_for_the_chunks_that_were_found_last() -> None:
    places = KeyedPlaces(2)
    places.note(id_of(0), [b"a", b"b"], [1, 2])
    assert places.of(ChunkId(b"a")) == Place(id_of(0), 1)
    places.note(id_of(1), [b"c"], [3])
    assert [places.of(ChunkId(chunk)) for chunk in (b"a", b"b", b"c")] == [Place(id_of(0), 1), None, Place(id_of(1), 3)]


@pytest.mark.parametrize("wrong", ["bytes", "checksums", "length", "offset", "pieces", "failure"])
def test_a_piece_that_is_not_what_was_asked_for_is_not_used(wrong: str) -> None:
    payload = bytes(range(256)) * 800
    chunk = data_chunk_id(payload)
    for wanted in (Wanted(chunk, len(payload)), Wanted(chunk, len(payload), 70_000, 1000)):
        begin, stop = granules_around(wanted.offset, wanted.length or len(payload), len(payload))
        part = payload[begin:stop]
        piece = m.ReadPiece(begin, len(part), granule_crcs(part))
        [got] = checked([wanted], [piece], memoryview(part))
        assert got == Got(begin, memoryview(part), granule_crcs(part), len(payload))
        pieces, body = [piece], part
        if wrong == "bytes":
            body = part[:-1] + b"?"
        elif wrong == "checksums":
            pieces = [replace(piece, crcs=bytes(len(piece.crcs)))]
        elif wrong == "length":
            body = part[:100]
            pieces = [replace(piece, length=100, crcs=granule_crcs(body))]
        elif wrong == "offset":
            pieces = [replace(piece, offset=begin + 65_536)]
        elif wrong == "pieces":
            pieces = [piece, piece]
        else:
            pieces = [replace(piece, failure=m.Failure(1, "it failed"))]
        assert checked([wanted], pieces, memoryview(body)) == [None]
