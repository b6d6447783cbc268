"""Which keys have a value, by an answer with parts or without: engines that do not know `presence` send the parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lakefs.errors import RequestTooLarge
from lakefs.get.keyed import find_present
from lakefs.ids import data_chunk_id
from lakefs.limits import BATCH_MAX
from lakefs.steps.steps import Send, Start, Wait
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

CHUNK = data_chunk_id(b"chunk")
BRIEF = m.KeyedMatched([1, 0, 1], [], [])
WITH_PARTS = m.KeyedMatched([1, 0, 2], [CHUNK] * 3, [5, 7, 9])


@pytest.mark.parametrize(
    ("sizes", "present"),
    [
        ([], [True, False, True]),
        ([0, 0, 0], [True, False, True]),
        ([5, 5, 16], [True, False, True]),
        ([6, 0, 7], [False, False, False]),
    ],
)
def test_sizes_are_compared_here_if_the_answer_has_parts(sizes: list[int], present: list[bool]) -> None:
    assert WITH_PARTS.present(sizes) == present
    assert BRIEF.present(sizes) == [True, False, True], "the engine has compared them"


def answered(keys: Sequence[bytes], answers: Sequence[m.KeyedMatched]) -> tuple[list[bool], list[m.KeyedMatch]]:
    """Drive `find_present` with these answers; return what it finds, and its requests."""
    steps, asked, left = find_present(1, keys), list[m.KeyedMatch](), list(answers)
    step = next(steps)
    while True:
        try:
            if isinstance(step, Start):
                assert isinstance(step.effect, Send)
                assert isinstance(step.effect.request, m.KeyedMatch)
                asked.append(step.effect.request)
                step = steps.send(object())
            else:
                assert isinstance(step, Wait)
                step = steps.send(Reply(left.pop(0)))
        except StopIteration as end:
            assert not left
            return end.value, asked


def test_one_request_has_as_many_keys_as_it_may() -> None:
    keys = [b"%d" % number for number in range(BATCH_MAX + 1)]
    present, asked = answered(keys, [m.KeyedMatched([1] * BATCH_MAX, [], []), m.KeyedMatched([0], [], [])])
    assert present == [True] * BATCH_MAX + [False]
    assert [len(request.keys) for request in asked] == [BATCH_MAX, 1]
    assert all(request.presence for request in asked)


def test_keys_that_had_no_room_in_an_answer_with_parts_are_asked_for_again() -> None:
    full = m.Failure(RequestTooLarge("").wire_code, "the answer is full")
    first = m.KeyedMatched([1, 0, 0], [CHUNK], [5], failures=[None, full, full])
    present, asked = answered([b"a", b"b", b"c"], [first, m.KeyedMatched([0, 1], [CHUNK], [5])])
    assert present == [True, False, True]
    assert [request.keys for request in asked] == [[b"a", b"b", b"c"], [b"b", b"c"]]
