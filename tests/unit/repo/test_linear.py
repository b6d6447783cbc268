"""The checker of histories accepts what some order explains, and refuses what none does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from tests.linear import NOTHING, PRESENT, UNKNOWN, Found, Not, Nothing, Operation, Value, contradiction


def read(called: float, ended: float, found: Value) -> Operation:
    return Operation(called, ended, found=found)


def write(called: float, ended: float, value: Value) -> Operation:
    return Operation(called, ended, writes=value)


def refused(called: float, ended: float, unlike: Value) -> Operation:
    """A conditional write that required this value, and found another."""
    return Operation(called, ended, found=Not(unlike))


def swap(called: float, ended: float, found: Found, value: Value) -> Operation:
    return Operation(called, ended, found, value)


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
    "a creation that was refused while something was there": [write(0, 1, 1), refused(2, 3, None), read(4, 5, 1)],
    "a creation that was refused because of a lost write": [write(0, UNKNOWN, 1), refused(2, 3, None)],
    "a creation that was refused because of a lost write, which was removed": [
        write(0, UNKNOWN, 1),
        refused(2, 3, None),
        write(4, 5, None),
        read(6, 7, None),
    ],
    "a lost creation that was not done": [write(0, 1, 1), swap(2, UNKNOWN, None, 2), read(3, 4, 1)],
    "a lost creation that was done late": [
        write(0, 1, 1),
        swap(2, UNKNOWN, None, 2),
        read(3, 4, 1),
        write(5, 6, None),
        read(7, 8, 2),
    ],
    "a lost swap of what a lost write wrote": [
        write(0, 1, 1),
        write(2, UNKNOWN, 2),
        swap(3, UNKNOWN, 2, 3),
        read(4, 5, 1),
        read(6, 7, 3),
    ],
    "a lost removal of what a lost write wrote": [
        write(0, 1, 1),
        write(2, UNKNOWN, 2),
        swap(3, UNKNOWN, 2, None),
        read(4, 5, 1),
        read(6, 7, None),
    ],
    "a swap that was refused because a lost one was done, which nobody saw": [
        write(0, 1, 1),
        swap(2, UNKNOWN, 1, 2),
        refused(3, 4, 1),
    ],
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
    "a creation that was refused though nothing was there": [write(0, 1, 1), write(2, 3, None), refused(4, 5, None)],
    "two creations": [swap(0, 9, None, 1), swap(0, 9, None, 2)],
    "a swap that was refused though the value was there": [write(0, 1, 1), refused(2, 3, 1)],
    "a swap that was refused though only its own value can have been there": [
        write(0, UNKNOWN, 1),
        refused(1, 2, None),
        refused(3, 4, 1),
    ],
    "a lost creation beside what was there throughout": [write(0, 1, 1), swap(2, UNKNOWN, None, 2), read(3, 4, 2)],
    "a lost removal of another value": [write(0, 1, 1), swap(2, UNKNOWN, 2, None), read(3, 4, None)],
    "a lost swap done twice": [write(0, 1, 1), swap(2, UNKNOWN, 1, 2), read(3, 4, 2), write(5, 6, 3), read(7, 8, 2)],
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
        found = operation.found
        if isinstance(found, Not):
            if found.value == value:
                return False
        elif not isinstance(found, Nothing) and found != value:
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
        kind = draw(
            st.sampled_from(("read", "read", "write", "remove", "swap", "take", "create", "refused", "replace"))
        )
        is_lost = draw(st.integers(0, 2)) == 0
        looked = draw(st.sampled_from((None, *range(number + 1))))
        until = UNKNOWN if is_lost else ended
        match kind:
            case "read":
                found.append(Operation(called, ended, found=looked))
            case "refused":
                found.append(Operation(called, ended, found=Not(looked)))
            case "swap":
                found.append(Operation(called, until, found=looked, writes=number))
            case "take":
                found.append(Operation(called, until, found=looked, writes=None))
            case "create":
                found.append(Operation(called, until, found=None, writes=number))
            case "replace":
                found.append(Operation(called, until, found=PRESENT, writes=number))
            case _:
                found.append(Operation(called, until, writes=number if kind == "write" else None))
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


CLIENTS = 8


def hard_history(chance: random.Random, *, lost: float) -> list[Operation]:
    """Return 200 operations of a true register: half of them write, many on conditions, and so many have no end."""
    history: list[Operation] = []
    value: Value = None
    free_at = [0.0] * CLIENTS
    number = 0
    while len(history) < 200:
        number += 1
        client = chance.randrange(CLIENTS)
        if free_at[client] >= number:
            continue
        called = max(free_at[client], number - chance.random() * CLIENTS)
        ended = free_at[client] = number + chance.random() * CLIENTS
        if chance.random() < 0.5:
            history.append(read(called, ended, value))
            continue
        is_lost = chance.random() < lost
        kind = chance.choice(("put", "put", "remove", "create", "swap", "take"))
        writes = None if kind in ("remove", "take") else number
        found: Found = {"put": NOTHING, "remove": NOTHING, "create": None}.get(kind, value)
        if kind in ("swap", "take") and chance.random() < 0.3:
            found = number - 1
        if isinstance(found, Nothing) or found == value or is_lost:
            history.append(Operation(called, UNKNOWN if is_lost else ended, found, writes))
            if isinstance(found, Nothing) or found == value:
                value = value if is_lost and chance.random() < 0.5 else writes
        else:
            history.append(refused(called, ended, found if not isinstance(found, Not) else None))
    return history


@pytest.mark.parametrize("lost", [0.05, 0.3])
def test_histories_with_many_conditions_and_lost_answers_are_judged_soon(lost: float) -> None:
    refused_ones = 0
    for seed in range(20):
        chance = random.Random(seed)
        history = hard_history(chance, lost=lost)
        assert contradiction(history) is None
        reads = [at for at, one in enumerate(history) if one.writes is NOTHING and one.called > 60]
        at = chance.choice(reads)
        old = next(one.writes for one in history if not isinstance(one.writes, Nothing) and one.writes is not None)
        history[at] = read(history[at].called, history[at].ended, old)
        refused_ones += contradiction(history) is not None
    assert refused_ones > 15, "nearly always it was replaced long ago"
