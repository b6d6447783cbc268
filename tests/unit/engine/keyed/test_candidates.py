"""Candidates for eviction: in order, each once, bounded, halved with the counts of uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists, tuples

from engine.format.keyed import value_key
from engine.keyed import candidates as module
from engine.keyed.candidates import CANDIDATES_MAX, Candidate, Candidates
from engine.keyed.keyed_blobs import SKETCH_STEP, USES_MIN, USES_PER_ENTRY, KeyedBlobs
from tests.store_rig import run, simulated_store

seen = lists(tuples(booleans(), integers(0, 15), integers(0, 9), integers(0, 40)), max_size=60)


def _of(alive: bool, uses: int, depth: int, number: int) -> Candidate:
    return Candidate(alive, uses, -depth, number.to_bytes(4, "big"))


@given(seen, integers(0, 5))
def test_candidates_come_out_in_order_and_each_once(found: list[tuple[bool, int, int, int]], halvings: int) -> None:
    candidates, expected = Candidates(), dict[bytes, Candidate]()
    for item in found:
        candidate = _of(*item)
        candidates.add(candidate)
        expected.setdefault(candidate.place, candidate)
    candidates.age(halvings)
    candidates.age(halvings)
    assert len(candidates) == len(expected)
    left = sorted(candidate._replace(uses=candidate.uses >> halvings) for candidate in expected.values())
    taken = [candidates.pop() for _ in left]
    assert taken == left
    assert candidates.pop() is None


def test_one_that_was_taken_may_come_back() -> None:
    candidates = Candidates()
    candidates.add(_of(True, 3, 0, 1))
    assert candidates.pop() == _of(True, 3, 0, 1)
    candidates.add(_of(True, 5, 0, 1))
    assert candidates.pop() == _of(True, 5, 0, 1)


def test_expired_ones_go_first_then_the_least_used_then_the_deepest() -> None:
    candidates = Candidates()
    for candidate in (_of(True, 1, 7, 1), _of(True, 0, 2, 2), _of(True, 0, 9, 3), _of(False, 15, 0, 4)):
        candidates.add(candidate)
    order = [found.place[-1] for found in iter(candidates.pop, None)]
    assert order == [4, 3, 2, 1]


def test_only_the_best_stay_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANDIDATES_MAX", 10)
    assert CANDIDATES_MAX == 1024
    candidates = Candidates()
    for number in range(20):
        candidates.add(_of(True, 15 - number % 16, 0, number))
        candidates.trim()
    assert len(candidates) == 20
    candidates.add(_of(True, 9, 0, 99))
    candidates.trim()
    assert len(candidates) == 10
    best = [found.uses for found in iter(candidates.pop, None)]
    assert best == sorted(best)
    assert best[0] == 0
    candidates.add(_of(True, 1, 0, 0))  # it was dropped, so it is none
    assert len(candidates) == 1


def test_uses_are_forgotten_the_faster_the_fewer_values_there_are() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            keyed = store.keyed
            assert (keyed.halvings, keyed.uses(_place(b"a"))) == (0, 0)
            keyed.note_entries(1000)
            keyed.note_used(1, [b"a"])
            assert keyed.uses(_place(b"a")) == SKETCH_STEP
            _note(keyed, 1000 * USES_PER_ENTRY - 1)
            assert (keyed.halvings, keyed.uses(_place(b"a"))) == (1, SKETCH_STEP // 2)
            keyed.note_entries(0)
            before = keyed.halvings
            _note(keyed, 2 * USES_MIN)
            assert keyed.halvings >= before + 2
            assert keyed.uses(_place(b"a")) == 0

    run(main)


def _place(key: bytes) -> bytes:
    return value_key(1, key)


def _note(keyed: KeyedBlobs, count: int) -> None:
    keyed.note_used(1, (b"other %d" % number for number in range(count)))
