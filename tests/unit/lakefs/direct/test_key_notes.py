"""Notes of used keys: all of them while they are few, and a part from a random place when they are many."""

from __future__ import annotations

import random

from lakefs.direct.read_notes import TELL_FULL_S, TELL_S, KeyNotes
from lakefs.limits import KEY_NOTES_MAX


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_few_keys_are_all_told_once_a_second() -> None:
    clock = Clock()
    notes = KeyNotes(clock, random.Random(1))
    assert not notes.note([b"a", b"b"])
    clock.now += TELL_S
    assert notes.note([b"c"])
    assert notes.take() == [b"a", b"b", b"c"]
    assert not notes.note([b"d"])
    assert notes.take() == [b"d"]


def test_many_keys_are_told_in_part_and_each_may_be_among_them() -> None:
    clock = Clock()
    notes = KeyNotes(clock, random.Random(1))
    keys = [b"%d" % number for number in range(10 * KEY_NOTES_MAX)]
    seen: set[bytes] = set()
    for _ in range(300):
        for begin in range(0, len(keys), 64):
            notes.note(keys[begin : begin + 64])
        clock.now += TELL_FULL_S
        if not notes.note([]):  # they began so late that there is room for more
            continue
        taken = notes.take()
        assert len(taken) <= KEY_NOTES_MAX
        seen.update(taken)
    assert len(seen) > 0.95 * len(keys)
