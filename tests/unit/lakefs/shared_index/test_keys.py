"""Look-ups of keys in a table: against a dictionary, beside a space that is whole, partial, or not there."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from engine.format.keyed import space_key, value_key
from lakefs.direct.keyed_reads import KeyedReads
from lakefs.limits import GRANULE_BYTES, KEYED_KEY_BYTES_MAX
from lakefs.shared_index._keys import key_id
from lakefs.shared_index.key_format import (
    ABSENT,
    DOUBTFUL,
    PLACED,
    SOME_EXPIRE,
    SPACE_PARTIAL,
    SPACE_WHOLE,
    UNPLACED,
    id_of_record,
    id_of_space,
)
from lakefs.shared_index.keyed_index import KeyedIndexReader, KeyFinder
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import PLACE, Found, table_bytes, unpacked
from lakefs.wire.media import MEDIUM_SEGMENT

CAPACITY = 1024
NOTHING: Found = (0, 0, 0, 0, 0)


def table_of(entries: dict[bytes, Found]) -> SharedTable:
    table = SharedTable(bytearray(table_bytes(CAPACITY)), CAPACITY)
    for identifier, place in entries.items():
        assert table.put(identifier, *place)
    return table


def told(tier: int, place: Found = NOTHING) -> Found:
    return (tier, *place[1:])


def test_ids_are_those_of_the_records() -> None:
    assert PLACED == MEDIUM_SEGMENT
    assert len({ABSENT, PLACED, UNPLACED, DOUBTFUL, SPACE_WHOLE, SPACE_PARTIAL}) == 6
    for number in (0, 1, 255, 256, (1 << 32) - 1):
        assert id_of_space(number) == id_of_record(space_key(number))
        for length in range(1, KEYED_KEY_BYTES_MAX + 1):
            key = random.Random(length).randbytes(length)
            assert key_id(number, key) == id_of_record(value_key(number, key))


@settings(max_examples=60, deadline=None)
@given(
    space=st.integers(0, 3),
    state=st.sampled_from([None, SPACE_WHOLE, SPACE_PARTIAL, DOUBTFUL]),
    entries=st.dictionaries(
        st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=64)),
        st.sampled_from([PLACED, UNPLACED, DOUBTFUL]),
        max_size=200,
    ),
    others=st.lists(st.binary(min_size=1, max_size=64), max_size=80),
)
def test_keys_are_told_as_a_dictionary_tells_them(
    space: int, state: int | None, entries: dict[tuple[int, bytes], int], others: list[bytes]
) -> None:
    places = {
        (number, key): told(tier, (tier, 7 + at, 8 * at, 100 + at, 9 * at)) if tier == PLACED else told(tier)
        for at, ((number, key), tier) in enumerate(entries.items())
    }
    table = table_of({id_of_record(value_key(*where)): place for where, place in places.items()})
    if state is not None:
        table.put(id_of_space(space), *told(state))
    keys = list(dict.fromkeys([key for _, key in entries] + others))
    finder = KeyFinder(table)

    def flag(key: bytes) -> bool | None:
        tier = entries.get((space, key), ABSENT)
        if state not in (SPACE_WHOLE, SPACE_PARTIAL) or tier == DOUBTFUL:
            return None
        return True if tier != ABSENT else (False if state == SPACE_WHOLE else None)

    assert finder.match(space, keys) == [flag(key) for key in keys]
    sizes = [places.get((space, key), NOTHING)[3] + at % 2 for at, key in enumerate(keys)]

    def flag_of_size(key: bytes, size: int) -> bool | None:
        length = places.get((space, key), NOTHING)[3]
        return flag(key) and (True if size == 0 else None if length == 0 else length == size)

    assert finder.match(space, keys, sizes) == [flag_of_size(*each) for each in zip(keys, sizes, strict=True)]
    rooms = [100 + at for at in range(len(keys))]
    lengths, indexes, packed = finder.plan(space, keys, rooms)
    found = unpacked(packed)
    for at, key in enumerate(keys):
        place = places.get((space, key), NOTHING)
        if flag(key) and place[0] == PLACED and place[3] <= rooms[at]:
            assert (lengths[at], found[indexes.index(at)]) == (-1, place)
        else:
            is_miss = flag(key) is False or bool(flag(key) and place[0] == PLACED)
            assert lengths[at] == (0 if is_miss else -1)
            assert at not in indexes
    assert len(packed) == len(indexes) * PLACE.size


@pytest.mark.parametrize("key", [b"", b"x" * 65, "k", bytearray(b"k"), None])
def test_a_key_of_no_keyed_blob_is_refused(key: object) -> None:
    finder = KeyFinder(table_of({}))
    for keys in ([key], [b"good", key]):
        with pytest.raises(ValueError, match="1 to 64"):
            finder.match(1, keys)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="1 to 64"):
            finder.plan(1, keys, [1, 1])  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        finder.match(1 << 32, [b"k"])
    for rooms in ([], [1, 1]):
        with pytest.raises(ValueError, match="a room"):
            finder.plan(1, [b"k"], rooms)
        with pytest.raises(ValueError, match="a size"):
            finder.match(1, [b"k"], rooms)


def reads_of(table: SharedTable, *, is_current: bool = True, is_connected: bool = True) -> KeyedReads:
    index = mock.Mock(finder=KeyFinder(table), table=table, is_current=is_current)
    index.may_expire = lambda space: KeyedIndexReader.may_expire(index, space)
    return KeyedReads(index, mock.Mock(), mock.Mock(), lambda: is_connected)


def test_many_keys_are_looked_up_in_pieces() -> None:
    keys = [b"%d" % number for number in range(700)]
    entries = {id_of_record(value_key(5, key)): (PLACED, 1, at * 8, 10, at) for at, key in enumerate(keys)}
    reads = reads_of(table_of({**entries, id_of_space(5): told(SPACE_WHOLE)}))
    asked = [b"absent %d" % number for number in range(1000)] + keys
    assert reads.match(5, asked) == [False] * 1000 + [True] * 700
    assert reads.match(5, asked, [10] * 1500 + [11] * 200) == [False] * 1000 + [True] * 500 + [False] * 200
    plan = reads.plan(5, asked, [GRANULE_BYTES] * 1700)
    assert plan.lengths == [0] * 1000 + [-1] * 700
    assert plan.indexes == list(range(1000, 1700))
    assert plan.places == [(PLACED, 1, at * 8, 10, at) for at in range(700)]
    assert len(plan.packed) == 700 * PLACE.size


@pytest.mark.parametrize("state", [{"is_current": False}, {"is_connected": False}])
def test_nothing_is_told_by_a_table_that_nobody_maintains(state: dict[str, bool]) -> None:
    table = table_of({id_of_space(5): told(SPACE_WHOLE), key_id(5, b"k"): (PLACED, 1, 1, 1, 1)})
    assert reads_of(table).match(5, [b"k", b"none"]) == [True, False]
    reads = reads_of(table, **state)
    assert reads.match(5, [b"k", b"none"]) == [None, None]
    assert not reads.confirm()
    assert reads.lasting(5, [b"k", b"none"]) == [False, False]


def test_values_of_a_space_in_which_some_expire_are_not_told_to_last() -> None:
    places = {key_id(space, key): (PLACED, 1, 1, 1, 1) for space in (5, 6, 7) for key in (b"k", b"l")}
    expiring = (SPACE_WHOLE, 0, 0, SOME_EXPIRE, 0)
    reads = reads_of(table_of({**places, id_of_space(5): told(SPACE_WHOLE), id_of_space(6): expiring}))
    assert reads.lasting(5, [b"k", b"none", b"l"]) == [True, False, True]
    assert reads.match(6, [b"k", b"none", b"l"]) == [True, False, True]
    assert reads.lasting(6, [b"k", b"none", b"l"]) == [False] * 3
    assert reads.lasting(7, [b"k", b"l"]) == [False] * 2, "the table does not know the space"
    assert reads.lasting(5, []) == []


def test_keys_of_a_type_of_their_own_are_asked_for() -> None:
    class Key(bytes):
        """Bytes of another type."""

    table = table_of({id_of_space(5): told(SPACE_WHOLE), key_id(5, b"k"): (PLACED, 1, 1, 1, 1)})
    reads = reads_of(table)
    assert reads.match(5, [b"k", Key(b"k")]) == [None, None]
    assert reads.plan(5, [Key(b"k")], [9]).lengths == [-1]
