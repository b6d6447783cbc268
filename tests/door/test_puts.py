"""PUTs through the door: answered as Python answers them, stored as Python stores them, each once or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.door.puts import compare_puts
from tests.door.world import World, gathered, world

pytestmark = pytest.mark.slow
EXAMPLES = 400
SHARE_MIN = 0.2
"""Part of the PUTs that the door must have gathered; half of those drawn are plain, a third of these by other keys."""
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        yield made


def test_puts_of_every_form_have_the_same_answer_and_leave_the_same_objects(made: World) -> None:
    before, sent = gathered(made.with_door), made.sent
    compare_puts(made, EXAMPLES)
    share = (gathered(made.with_door) - before) / (made.sent - sent)
    assert share >= SHARE_MIN, f"only {share:.2f} of the PUTs were gathered by the door"


@pytest.mark.parametrize("bug", ["puts-without-type", "puts-by-anybody", "puts-of-another"])
def test_a_gateway_that_stores_puts_otherwise_is_noticed(made: World, bug: str) -> None:
    with made.beside((*PLANTED, bug), "on") as planted, pytest.raises(AssertionError, match="they differ from byte"):
        compare_puts(planted, EXAMPLES, shrink=False)
