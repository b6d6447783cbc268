"""Notes of reads: a sample of bounded size, in which every read has the same chance, in any order."""

from __future__ import annotations

import random
from collections import Counter

from lakefs.direct.read_notes import TELL_FULL_S, TELL_S, ReadNotes
from lakefs.limits import READ_NOTES_EVERY, READ_NOTES_MAX

CHUNKS = [bytes([number]) * 33 for number in range(16)]


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _notes(time: Time) -> ReadNotes:
    return ReadNotes(time, random.Random(1))


def test_about_one_read_in_so_many_is_noted_and_each_of_a_loop_has_its_share() -> None:
    for at_once in (1, 3, 16):
        time, seen = Time(), Counter[bytes]()
        notes = _notes(time)
        reads = 0
        for turn in range(6_000):
            chunks = [CHUNKS[(turn * at_once + number) % 16] for number in range(at_once)]
            reads += at_once
            due = notes.note(chunks[0]) if at_once == 1 else notes.note_many(chunks)
            assert not due
            if turn % 100 == 99:
                seen.update(notes.take())
        assert reads / READ_NOTES_EVERY / 1.3 < seen.total() < reads / READ_NOTES_EVERY * 1.3
        assert len(seen) == 16
        assert min(seen.values()) * 3 > max(seen.values())


def test_what_is_kept_is_bounded_and_of_all_that_was_read() -> None:
    notes = _notes(Time())
    for turn in range(200_000):
        notes.note(turn.to_bytes(33, "big"))
    kept = [int.from_bytes(chunk, "big") for chunk in notes.take()]
    assert len(kept) == READ_NOTES_MAX
    assert max(kept) > 150_000
    assert notes.take() == []


def test_it_is_time_to_tell_when_much_was_noted_and_some_time_went_by() -> None:
    time = Time()
    notes = _notes(time)
    many = CHUNKS * 1_000
    assert not notes.note_many(many)
    time.now += TELL_FULL_S + 0.01
    assert notes.note_many(many)
    assert len(notes.take()) == READ_NOTES_MAX
    assert not notes.note_many(CHUNKS)
    time.now += TELL_FULL_S + 0.01
    assert not notes.note_many(CHUNKS * 2)
    time.now += TELL_S + 0.01
    assert notes.note_many(CHUNKS * 2)
    assert 0 < len(notes.take()) < READ_NOTES_MAX


def test_nothing_read_is_nothing_to_tell() -> None:
    time = Time()
    notes = _notes(time)
    time.now += 10
    assert not notes.note_many([]) or not notes.take()
