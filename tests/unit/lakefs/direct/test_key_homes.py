"""Keys looked up at several homes at once: each where the ring says, and nothing is known of others."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest

from engine.memory.sealed_memory import SealedMemory
from lakefs.cluster.key_ring import HASH_KEY, KeyRing
from lakefs.cluster.ring import vnode_room
from lakefs.direct.key_homes import KeyHomesReader
from lakefs.direct.keyed_reads import KeyedReads
from lakefs.errors import LakeError, StoreDamaged
from lakefs.ids import MemberId
from lakefs.limits import KEYED_KEY_BYTES_MAX
from lakefs.shared_index.homes_format import NOWHERE, SEGMENT_BITS, homes_bytes, pack_homes
from lakefs.shared_index.key_format import DOUBTFUL, PLACED, SOME_EXPIRE, SPACE_PARTIAL, SPACE_WHOLE, id_of_space
from lakefs.shared_index.keyed_index import HomesFinder, KeyFinder
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import table_bytes, unpacked
from tests.unit.lakefs.cluster.fleets import fleet
from tests.unit.lakefs.shared_index.homes_rig import CAPACITY, SPACE, Home

NUMBERS = (0, 3, 65_534)
HOMES = len(NUMBERS)
FLEET = fleet(HOMES + 1)
"""Members; of the last one no index is here."""
RING = KeyRing(FLEET, vnode_room(FLEET))
KEYS = [random.Random(number).randbytes(1 + number % KEYED_KEY_BYTES_MAX) for number in range(300)]


def homes_of(ring: KeyRing, members: Sequence[MemberId]) -> list[int]:
    places = {member: place for place, member in enumerate(members)}
    return [places.get(member, NOWHERE) for _, member in ring.vnodes]


def packed_ring(ring: KeyRing, members: Sequence[MemberId]) -> bytes:
    return pack_homes(5, HASH_KEY, [position for position, _ in ring.vnodes], homes_of(ring, members))


@contextmanager
def homes_here() -> Iterator[tuple[list[Home], KeyHomesReader, SealedMemory]]:
    """Homes with every second key, the reader of them all, and its memory."""
    homes, memory = [Home() for _ in NUMBERS], SealedMemory("homes", homes_bytes(len(RING.vnodes)), huge=False)
    here = [member.id for member in FLEET[:HOMES]]
    memory.view[:] = packed_ring(RING, here)
    try:
        for number, key in enumerate(KEYS):
            member = RING.home(SPACE, key)
            if not number % 2 and member in here:
                homes[here.index(member)].put(key, (PLACED, 9, number, 100 + number, 1))
        descriptors = [memory.descriptor, *(each for home in homes for each in home.descriptors)]
        yield homes, KeyHomesReader(descriptors, NUMBERS), memory
    finally:
        for home in homes:
            home.close()
        memory.close()


def at(key: bytes) -> int:
    """Return the place of a key's home, HOMES for the one that is not here."""
    return [member.id for member in FLEET].index(RING.home(SPACE, key))


def flags_are_right(reader: KeyHomesReader) -> None:
    present = [None if at(key) == HOMES else not number % 2 for number, key in enumerate(KEYS)]
    assert reader.finder.match(SPACE, KEYS) == present
    assert {True, False, None} == set(present)


def test_the_native_ring_is_the_ring_for_keys_of_each_length() -> None:
    members = [member.id for member in FLEET]
    finder = HomesFinder(memoryview(packed_ring(RING, members))[32:], len(RING.vnodes), [table()] * 4, [0] * 4)
    for space in (0, 1, SPACE, (1 << 32) - 1):
        keys = [random.Random(space + length).randbytes(length) for length in range(1, KEYED_KEY_BYTES_MAX + 1)]
        assert finder.homes(space, keys) == [members.index(RING.home(space, key)) for key in keys]
    assert finder.homes(SPACE, KEYS) == [members.index(RING.home(SPACE, key)) for key in KEYS]


def table() -> KeyFinder:
    return KeyFinder(SharedTable(bytearray(table_bytes(CAPACITY)), CAPACITY))


def test_the_first_vnode_and_the_last_have_the_keys_between_them() -> None:
    positions = [1 << 62, 1 << 63]
    memory = memoryview(pack_homes(1, HASH_KEY, positions, [0, 1]))[32:]
    found = HomesFinder(memory, 2, [table(), table()], [0, 1]).homes(SPACE, KEYS)
    assert set(found) == {0, 1}
    assert HomesFinder(memory, 0, [table(), table()], [0, 1]).homes(SPACE, KEYS) == [None] * len(KEYS)


def test_keys_are_matched_at_their_homes_and_others_have_to_be_asked_for() -> None:
    with homes_here() as (_, reader, _):
        flags_are_right(reader)
        sizes = [100 + number + (number % 4 == 2) for number in range(len(KEYS))]
        flags = reader.finder.match(SPACE, KEYS, sizes)
        assert [flag for flag, key in zip(flags, KEYS, strict=True) if at(key) < HOMES] == [
            not number % 4 for number, key in enumerate(KEYS) if at(key) < HOMES
        ]


def test_places_name_the_index_beside_the_segment() -> None:
    with homes_here() as (_, reader, _):
        lengths, indexes, packed = reader.finder.plan(SPACE, KEYS, [1000] * len(KEYS))
        assert indexes == [number for number, key in enumerate(KEYS) if not number % 2 and at(key) < HOMES]
        for index, place in zip(indexes, unpacked(packed), strict=True):
            assert place == (PLACED, NUMBERS[at(KEYS[index])] << SEGMENT_BITS | 9, index, 100 + index, 1)
        assert lengths == [-1 if at(key) == HOMES or not number % 2 else 0 for number, key in enumerate(KEYS)]


def test_a_segment_that_would_name_another_home_is_not_read() -> None:
    with homes_here() as (homes, reader, _):
        key = next(key for key in KEYS if at(key) == 0)
        homes[0].put(key, (PLACED, 1 << SEGMENT_BITS | 9, 0, 10, 1))
        assert reader.finder.plan(SPACE, [key], [1000]) == ([-1], [], bytearray())
        assert reader.finder.match(SPACE, [key]) == [None]


@pytest.mark.parametrize("state", [None, DOUBTFUL, SPACE_PARTIAL])
def test_each_home_is_believed_as_far_as_it_knows_the_space(state: int | None) -> None:
    with homes_here() as (homes, reader, _):
        homes[1].table.remove(id_of_space(SPACE))
        if state is not None:
            homes[1].say(state)
        flags = dict(zip(KEYS, reader.finder.match(SPACE, KEYS), strict=True))
        for number, key in enumerate(KEYS):
            is_present = not number % 2
            if at(key) == 1:
                assert flags[key] is (True if state == SPACE_PARTIAL and is_present else None)
            elif at(key) < HOMES:
                assert flags[key] is is_present


def test_they_are_current_while_each_member_lives_and_no_table_was_replaced() -> None:
    for change in range(3):
        with homes_here() as (homes, reader, memory):
            reads = KeyedReads(reader, mock.Mock(), mock.Mock(), lambda: True)
            assert None not in reads.match(SPACE, [key for key in KEYS if at(key) < HOMES])
            if change == 0:
                homes[1].end()
            elif change == 1:
                homes[2].replace()
            else:
                memory.view[:8] = bytes(8)
            assert not reader.is_current
            assert reads.match(SPACE, KEYS) == [None] * len(KEYS), "what was found is not used"


def test_a_space_may_expire_if_it_does_at_one_home() -> None:
    with homes_here() as (homes, reader, _):
        assert not reader.may_expire(SPACE)
        homes[2].say(SPACE_WHOLE, SOME_EXPIRE)
        assert reader.may_expire(SPACE)
        homes[2].table.remove(id_of_space(SPACE))
        assert reader.may_expire(SPACE), "it is asked"


def test_memory_that_is_no_key_homes_is_refused() -> None:
    whole = packed_ring(RING, [])
    for content in (whole[:-1], bytes(8) + whole[8:], whole[:8] + b"\2" + whole[9:], whole[:12] + b"\xff" + whole[13:]):
        memory = SealedMemory("homes", len(content), huge=False)
        memory.view[:] = content
        with pytest.raises(StoreDamaged):
            KeyHomesReader([memory.descriptor], [])
        memory.close()
    with pytest.raises(ValueError, match="shorter"):
        HomesFinder(memoryview(whole)[32:-1], len(RING.vnodes), [], [])
    descriptor = os.memfd_create("cuttable")
    os.write(descriptor, whole)
    with pytest.raises(LakeError):
        KeyHomesReader([descriptor], [])
    os.close(descriptor)


def test_that_the_home_is_another_member_would_be_noticed() -> None:
    def turned(ring: KeyRing, members: Sequence[MemberId]) -> list[int]:
        homes = homes_right(ring, members)
        return [*homes[1:], homes[0]]

    homes_right = homes_of
    with mock.patch(f"{__name__}.homes_of", turned), homes_here() as (_, reader, _), pytest.raises(AssertionError):
        flags_are_right(reader)
