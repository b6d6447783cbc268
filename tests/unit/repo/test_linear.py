"""The checker of histories accepts what some order explains, and refuses what none does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from tests.door.linear import NOTHING, UNKNOWN, Operation, Value, contradiction


def read(called: float, ended: float, found: Value) -> Operation:
    return Operation(called, ended, found=found)


def write(called: float, ended: float, value: Value) -> Operation:
    return Operation(called, ended, writes=value)


ACCEPTED = {
    "nothing": [],
    "a read of a missing object": [read(0, 1, None)],
    "a write and a read": [write(0, 1, 7), read(2, 3, 7)],
    "a read during a write finds the old value": [write(0, 9, 7), read(1, 2, None), read(3, 4, 7)],
    "two writes at once, in either order": [write(0, 9, 1), write(0, 9, 2), read(10, 11, 1)],
    "two writes at once, in the other order": [write(0, 9, 1), write(0, 9, 2), read(10, 11, 2)],
    "a removal": [write(0, 1, 1), write(2, 3, None), read(4, 5, None)],
    "a lost write that happened late": [write(0, 1, 1), write(2, UNKNOWN, 2), read(3, 4, 1), read(5, 6, 2)],
    "a lost write that never happened": [write(0, 1, 1), write(2, UNKNOWN, 2), read(3, 4, 1), read(5, 6, 1)],
    "a lost removal that happened": [write(0, 1, 1), write(2, UNKNOWN, None), read(3, 4, 1), read(5, 6, None)],
    "two lost removals, one before a write and one after": [
        write(0, 1, 1),
        write(2, UNKNOWN, None),
        write(2, UNKNOWN, None),
        read(3, 4, None),
        write(5, 6, 2),
        read(7, 8, None),
    ],
    "a swap that found what was there": [write(0, 1, 1), Operation(2, 3, found=1, writes=2), read(4, 5, 2)],
    "a lost read": [Operation(0, UNKNOWN), read(1, 2, None)],
    "times that touch": [write(0, 1, 1), read(1, 2, None)],
    "many removals that nobody knows of": [write(0, 1, 1)]
    + [write(2, UNKNOWN, None) for _ in range(200)]
    + [read(3 + at, 3.5 + at, 1) for at in range(200)]
    + [read(300, 301, None)],
}
REFUSED = {
    "a value that nobody wrote": [read(0, 1, 7)],
    "a stale read": [write(0, 1, 1), write(2, 3, 2), read(4, 5, 1)],
    "a stale read of a missing object": [write(0, 1, 1), read(2, 3, None)],
    "a removed value": [write(0, 1, 1), write(2, 3, None), read(4, 5, 1)],
    "a read that ended before the write was called": [read(0, 1, 1), write(2, 3, 1)],
    "two reads that go back": [write(0, 1, 1), write(2, 20, 2), read(3, 4, 2), read(5, 6, 1)],
    "two readers that saw two writes in two orders": [write(0, 9, 1), write(0, 9, 2), read(10, 11, 1), read(12, 13, 2)],
    "a lost write that was seen, and then not": [write(0, 1, 1), write(2, UNKNOWN, 2), read(3, 4, 2), read(5, 6, 1)],
    "one lost removal for two": [
        write(0, 1, 1),
        write(2, UNKNOWN, None),
        read(3, 4, None),
        write(5, 6, 2),
        read(7, 8, None),
    ],
    "a swap that found another value": [write(0, 1, 1), write(2, 3, 2), Operation(4, 5, found=1, writes=3)],
    "a lost removal before its call": [write(0, 1, 1), read(2, 3, None), write(4, UNKNOWN, None)],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_history_that_an_order_explains_is_accepted(name: str) -> None:
    assert contradiction(ACCEPTED[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_history_that_no_order_explains_is_refused(name: str) -> None:
    assert contradiction(REFUSED[name]) is not None


def test_the_operation_that_is_named_is_the_one_that_was_wrong() -> None:
    stale = read(40, 41, 1)
    history = [write(0, 1, 1), *(read(at, at + 0.5, 1) for at in range(2, 20)), write(30, 31, 2), stale]
    assert contradiction(history) == stale


def explained(history: Sequence[Operation]) -> bool:
    """Try every order, and every choice of what happened of that which has no end."""
    lost = [operation for operation in history if operation.ended == UNKNOWN]
    certain = [operation for operation in history if operation.ended != UNKNOWN]
    for count in range(len(lost) + 1):
        for happened in itertools.combinations(lost, count):
            if any(map(is_order, itertools.permutations([*certain, *happened]))):
                return True
    return False


def is_order(order: Sequence[Operation]) -> bool:
    value: Value = None
    for at, operation in enumerate(order):
        if any(later.ended < operation.called for later in order[at + 1 :]):
            return False
        if operation.found is not NOTHING and operation.found != value:
            return False
        if operation.writes is not NOTHING:
            value = operation.writes  # type: ignore[assignment]
    return True


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        called = draw(st.integers(0, 12))
        ended = called + draw(st.integers(1, 6))
        kind = draw(st.sampled_from(("read", "read", "write", "remove", "swap")))
        is_lost = draw(st.integers(0, 4)) == 0
        looked = draw(st.sampled_from((None, *range(number + 1))))
        if kind == "read":
            found.append(Operation(called, ended, found=looked))
        elif kind == "swap":
            found.append(Operation(called, ended, found=looked, writes=number))
        else:
            value = number if kind == "write" else None
            found.append(Operation(called, UNKNOWN if is_lost else ended, writes=value))
    return found


@given(histories())
def test_it_agrees_with_a_search_through_all_orders(history: list[Operation]) -> None:
    assert (contradiction(history) is None) == explained(history)


@pytest.mark.parametrize("seed", range(20))
def test_long_histories_of_a_true_register_are_accepted_and_spoilt_ones_refused(seed: int) -> None:
    """Eight clients, each operation at one instant within its time; then one read finds what was overwritten long
    before."""
    chance = random.Random(seed)
    history: list[Operation] = []
    value: Value = None
    free_at = [0.0] * 8
    values: list[Value] = [None]
    for number in range(600):
        instant = float(number)
        client = chance.randrange(8)
        if free_at[client] >= instant:
            continue
        called, ended = max(free_at[client], instant - chance.random() * 8), instant + chance.random() * 8
        free_at[client] = ended
        if chance.random() < 0.3:
            value = None if chance.random() < 0.2 else number
            values.append(value)
            lost = chance.random() < 0.1
            history.append(Operation(called, UNKNOWN if lost else ended, writes=value))
        else:
            history.append(Operation(called, ended, found=value))
    assert contradiction(history) is None
    reads = [at for at, one in enumerate(history) if one.found is not NOTHING and one.called > 300]
    at = chance.choice(reads)
    old = next(one.writes for one in history if one.writes is not NOTHING and one.writes is not None)
    history[at] = Operation(history[at].called, history[at].ended, found=old)
    assert contradiction(history) is not None
