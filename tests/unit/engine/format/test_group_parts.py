"""Groups as values of the coordinator: cut into parts, and put together again, whole or not at all."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given, settings, strategies as st

from engine.format.group_parts import GROUP_END, GROUP_PART_HEAD, PARTS_MAX, LogKeys, joined, pack_parts, unpack_part
from engine.group_log.assembly import Assembly, ReplicaIsBehind
from engine.group_log.tail import Tail
from lakefs.errors import StoreDamaged, StoreUnusable
from lakefs.ids import NamesShard, Revision, Sequence
from lakefs.limits import (
    COORDINATOR_KEY_BYTES_MAX,
    COORDINATOR_OPERATIONS_MAX,
    COORDINATOR_VALUE_BYTES_MAX,
    GROUP_BYTES_MAX,
    MIB,
)

KEYS = LogKeys(NamesShard(0))
TERM = Revision(7)


def values_of(sequence: int, body: bytes, term: Revision = TERM) -> dict[bytes, bytes]:
    """Return the keys and values of a group."""
    values = pack_parts(term, Sequence(sequence), 3, body)
    return {KEYS.part(sequence, number): value for number, value in enumerate(values)}


def with_crc(head: bytes) -> bytes:
    """Return a part of no content with this kind and version."""
    return crc32c(head + bytes(8)).to_bytes(4, "little") + head + bytes(8)


@pytest.mark.parametrize("length", [0, 1, MIB - 36, MIB - 35, MIB, 3 * MIB + 1, GROUP_BYTES_MAX])
def test_a_group_of_any_length_is_put_together_again(length: int) -> None:
    body = bytes(length)
    values = values_of(5, body)
    assert all(len(value) <= COORDINATOR_VALUE_BYTES_MAX for value in values.values())
    assert len(values) <= PARTS_MAX < COORDINATOR_OPERATIONS_MAX
    parts = [unpack_part(key, value) for key, value in values.items()]
    assert [part.end is None for part in parts] == [True] * (len(parts) - 1) + [False]
    assert joined(b"key", parts) == body


def test_keys_sort_by_groups_and_parts_and_say_them() -> None:
    places = [(sequence, part) for sequence in (1, 2, 255, 256, 1 << 40) for part in (0, 1, PARTS_MAX)]
    keys = [KEYS.part(*place) for place in places]
    assert keys == sorted(keys)
    assert [KEYS.place(key) for key in keys] == places
    assert all(KEYS.groups[0] <= key < KEYS.groups[1] for key in keys)
    assert all(KEYS.followed[0] <= key < KEYS.followed[1] for key in (*keys, KEYS.leader, KEYS.log))
    for key in (KEYS.replica(b"r" * 16), KEYS.hold(b"r" * 16), KEYS.wanted, KEYS.origin):
        assert not KEYS.followed[0] <= key < KEYS.followed[1], "only what a replica needs is followed"
        assert KEYS.place(key) is None
        assert len(key) < COORDINATOR_KEY_BYTES_MAX
    assert KEYS.place(KEYS.log) is None
    assert KEYS.part(4, PARTS_MAX) < KEYS.group(5) <= KEYS.part(5, 0)


@given(st.integers(0, 3), st.integers(0, 200), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_bit_that_is_off_is_noticed(part: int, at: int, bit: int) -> None:
    body = bytes(range(256)) * (9 * 1024)  # three parts
    values = list(values_of(9, body).items())
    key, value = values[part % len(values)]
    damaged = bytearray(value)
    damaged[at] ^= 1 << bit
    values[part % len(values)] = key, bytes(damaged)
    with pytest.raises(StoreDamaged):
        unpack_part(*values[part % len(values)])


@pytest.mark.parametrize("value", [b"", bytes(13), bytes(40), with_crc(b"\2\1"), with_crc(b"\1\2"), with_crc(b"\1\1")])
def test_what_is_no_part_is_refused(value: bytes) -> None:
    with pytest.raises((StoreDamaged, StoreUnusable)):
        unpack_part(b"names/0000/log/1/0", value)


def test_parts_of_two_leaders_make_no_group() -> None:
    one, other = (list(values_of(1, bytes(2 * MIB), Revision(term)).items()) for term in (1, 2))
    with pytest.raises(StoreDamaged, match="not of one group"):
        joined(b"key", [unpack_part(*one[0]), unpack_part(*one[1]), unpack_part(*other[2])])


def test_groups_leave_in_order_once_and_only_whole() -> None:
    assembly = Assembly(KEYS, Sequence(4))
    assert list(assembly.put(KEYS.log, b"a record")) == []
    for key, value in values_of(3, b"old").items():
        assert list(assembly.put(key, value)) == [], "this replica has it"
    values = list(values_of(4, bytes(2 * MIB)).items())
    for key, value in values[:-1]:
        assert list(assembly.put(key, value)) == []
    assert assembly.left_over == [key for key, _ in values[:-1]]
    with pytest.raises(ReplicaIsBehind):
        list(assembly.put(*next(iter(values_of(5, b"next").items()))))
    [group] = assembly.put(*values[-1])
    assert (group.sequence, group.body, group.record_count, group.part_count) == (4, bytes(2 * MIB), 3, 3)
    assert assembly.next_sequence == 5
    assert list(assembly.put(*values[-1])) == []
    assert not assembly.left_over


def test_a_part_that_was_removed_is_another_leader_s_to_put_anew() -> None:
    assembly = Assembly(KEYS, Sequence(1))
    old, new = values_of(1, bytes(2 * MIB), Revision(1)), values_of(1, b"other", Revision(2))
    first, second, _ = old.items()
    assert [*assembly.put(*first), *assembly.put(*second)] == []
    for key in (first[0], second[0]):
        assembly.remove(key)
    assert not assembly.left_over
    [group] = assembly.put(*next(iter(new.items())))
    assert group.body == b"other"


def test_a_tail_counts_groups_once_however_often_their_parts_are_seen() -> None:
    tail = Tail()
    for _ in range(2):
        for sequence, part in ((1, 0), (2, 0), (2, 1), (3, 0)):
            tail.add_part(Sequence(sequence), 10, part)
    assert [(group.sequence, group.body_bytes, group.part_count) for group in tail] == [
        (1, 10, 1),
        (2, 20, 2),
        (3, 10, 1),
    ]
    tail.add(Sequence(4), 5, 1)
    assert (len(tail), tail.nbytes) == (4, 45)
    tail.trim(Sequence(2))
    assert (len(tail), tail.nbytes) == (2, 15)
    assert GROUP_PART_HEAD.size + GROUP_END.size == 36
