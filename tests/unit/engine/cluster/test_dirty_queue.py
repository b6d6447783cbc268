"""The order of dirty partitions, how many are walked at once, and when those that were left are due again.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.coordinator.lake_state import Dirty
from engine.walker.dirty_queue import GAP_CHUNKS, DirtyQueue, Width
from lakefs.ids import MemberId, Partition, Revision, RingEpoch

RETRY_S = 60.0
A, B = MemberId(b"a" * 16), MemberId(b"b" * 16)
EPOCH = RingEpoch(3)


def note(partition: int, *, is_moving: bool = False) -> Dirty:
    return Dirty(Partition(partition), EPOCH, Revision(1), is_moving)


def wide(span: int, chunks_each: float = 0.0) -> Width:
    """Return a width of so many partitions."""
    width = Width()
    width.walked(span, span, int(chunks_each * span), 0.5)
    assert width.partitions == span
    return width


def read(queue: DirtyQueue, notes: Iterable[Dirty], now: float = 0.0, up: Iterable[MemberId] = (A, B)) -> None:
    queue.read(list(notes), EPOCH, now, {*up}.__contains__)


def taken(queue: DirtyQueue, width: Width) -> list[list[int]]:
    """Take all that are due."""
    found: list[list[int]] = []
    while queue:
        found.append([int(one.partition) for one in queue.take(width)])
    return found


def test_short_partitions_are_before_moving_ones_and_not_walked_with_them() -> None:
    queue = DirtyQueue(RETRY_S)
    read(queue, [note(n, is_moving=n % 2 == 0) for n in range(6)])
    assert taken(queue, wide(100)) == [[1, 3, 5], [0, 2, 4]]


def test_as_many_are_walked_at_once_as_the_width_spans() -> None:
    queue = DirtyQueue(RETRY_S)
    read(queue, map(note, range(10)))
    assert taken(queue, wide(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    read(queue, map(note, [0, 2, 4, 9]))
    assert taken(queue, wide(4)) == [[0, 2], [4], [9]]


def test_on_a_dense_lake_clean_partitions_are_not_listed_between_dirty_ones() -> None:
    queue = DirtyQueue(RETRY_S)
    notes = list(map(note, [0, 1, 3, 4, 7]))
    for chunks_each, expected in (
        (GAP_CHUNKS + 1, [[0, 1], [3, 4], [7]]),
        (GAP_CHUNKS, [[0, 1, 3, 4], [7]]),
        (GAP_CHUNKS / 2, [[0, 1, 3, 4, 7]]),
    ):
        read(queue, notes)
        assert taken(queue, wide(100, chunks_each)) == expected


def test_the_width_follows_the_time_that_a_walk_takes() -> None:
    width = Width()
    widths = [width.partitions]
    for took_s in (0.0, 0.001, 0.25, 0.5, 5.0, 100.0):
        span = width.partitions
        width.walked(span, span, 0, took_s)
        widths.append(width.partitions)
    assert widths == [1, 4, 16, 32, 32, 3, 1]


def left(queue: DirtyQueue, *missing: MemberId, now: float = 0.0, up: Iterable[MemberId] = ()) -> None:
    """Let partition 1 be walked, and left because these members did not answer."""
    read(queue, [note(1)], now, up)
    assert taken(queue, Width()) == [[1]]
    queue.leave(Partition(1), EPOCH, missing, now, {*up}.__contains__)
    assert not queue.is_any_due(now, {*up}.__contains__)


def is_due(queue: DirtyQueue, now: float, up: Iterable[MemberId] = ()) -> bool:
    due = queue.is_any_due(now, {*up}.__contains__)
    read(queue, [note(1)], now, up)
    assert bool(queue) == due, "one is the short way to ask for the other"
    return due


def test_a_partition_that_was_left_for_other_reasons_than_members_waits() -> None:
    queue = DirtyQueue(RETRY_S)
    left(queue, up=[A])
    assert not is_due(queue, RETRY_S - 1, [A, B])
    assert is_due(queue, RETRY_S, [A, B])


def test_a_partition_that_waits_for_members_is_due_when_one_of_them_is_up() -> None:
    queue = DirtyQueue(RETRY_S)
    left(queue, A, B)
    assert not is_due(queue, 1.0)
    assert not is_due(queue, 0.9, [A])
    assert is_due(queue, 1.0, [A])
    left(queue, A, B, now=2.0, up=[A])
    assert not is_due(queue, 30.0, [A]), "B is the one that it waits for now"
    assert is_due(queue, 30.0, [A, B])


def test_a_member_that_fails_whenever_it_is_asked_is_asked_more_and_more_seldom() -> None:
    queue = DirtyQueue(RETRY_S)
    now = 0.0
    pauses = []
    for _ in range(20):
        left(queue, A, now=now, up=[A])
        pause = next(step for step in range(1, 100) if is_due(queue, now + step, [A]))
        pauses.append(pause)
        now += pause
    assert pauses == [1, 4, 16, *[60] * 17]


def test_a_member_that_was_away_for_long_is_not_waited_for_longer() -> None:
    queue = DirtyQueue(RETRY_S)
    for minute in range(10):
        left(queue, A, now=minute * 60.0)
    assert not is_due(queue, 540.9, [A])
    assert is_due(queue, 541.0, [A])


def test_a_newer_table_makes_what_was_left_due() -> None:
    queue = DirtyQueue(RETRY_S)
    left(queue, A)
    queue.read([note(1)], RingEpoch(EPOCH + 1), 0.0, lambda _: False)
    assert queue
    assert queue.count == 1


@pytest.mark.parametrize("is_noted_anew", [True, False])
def test_a_partition_that_was_cleared_is_forgotten(is_noted_anew: bool) -> None:
    queue = DirtyQueue(RETRY_S)
    left(queue, A)
    read(queue, [])
    assert queue.count == 0
    assert not queue.is_any_due(1000.0, lambda _: True)
    read(queue, [note(1)] if is_noted_anew else [])
    assert bool(queue) == is_noted_anew
