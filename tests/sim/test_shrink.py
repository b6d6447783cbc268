"""A failing seed is cut down to a few operations that fail in the same way, and printed as one command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from tests.sim.__main__ import try_seed
from tests.sim.planted import BUGS
from tests.sim.shrink import Shrunk, kind_of, shrink
from tests.sim.world.world import World, causes_of

pytestmark = pytest.mark.thorough

ROUNDS = 3
SECONDS = 600.0  # far more than it takes: on a busy machine the search must not end early
[BUG] = [bug for bug in BUGS if bug.what == "an upload stays when it has ended"]


def failing() -> Iterator[int]:
    """Yield seeds that notice the bug; in a life over a wire the failure takes some operations more."""
    return (seed for seed in range(BUG.seeds) if isinstance(try_seed((seed, ROUNDS)), str))


def run_again(command: str) -> str:
    """Run the printed line; return its failure."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "tests.sim"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    world = World(
        int(words[3]), int(options["--rounds"]), options["--only"].split(","), options.get("--without", "").split(",")
    )
    with pytest.raises(Exception) as raised:
        world.run()
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes_of(raised.value))


@pytest.mark.slow
def test_a_planted_bug_is_cut_down_to_few_operations_that_fail_alike_when_run_again() -> None:
    with BUG.plant():
        said: list[str] = []
        cut_down = (shrink(seed, ROUNDS, said.append, seconds=SECONDS) for seed in failing())
        found = next(found for found in cut_down if found is not None and len(found.operations) <= 6)
        assert found.of > 6
        assert found.without, "no round and no fault was left out"
        assert said, "nobody was told of what was left out"
        assert kind_of(run_again(found.command())) == kind_of(found.failure)


def test_the_line_names_all_that_is_needed_to_run_it_again() -> None:
    found = Shrunk(7, 4, ["1.0.2", "3.1.0"], ["0", "2.trouble"], 50, "SimFailure: x")
    assert found.command() == "python -m tests.sim 7 --rounds 4 --without 0,2.trouble --only 1.0.2,3.1.0"
    assert Shrunk(7, 4, [], [], 50, "").command() == "python -m tests.sim 7 --rounds 4 --only -"


def test_a_kind_of_failure_is_without_numbers_and_names() -> None:
    first = "SimFailure: after the restart the names are those of no group from 12 on: left/a: became nothing"
    again = "SimFailure: after the restart the names are those of no group from 9 on: right/b is missing"
    assert kind_of(first) == kind_of(again)
    assert kind_of(first) != kind_of("SimFailure: fsck found damage: [{'severity': 'damage'}]")
    assert kind_of("SimFailure: get: ChunkDamaged('x 1')") == kind_of("SimFailure: check: ChunkDamaged('y')")
    assert kind_of("SimFailure: get: ChunkDamaged('x')") != kind_of("SimFailure: get: ChunkNotFound('x')")


def test_a_seed_that_keeps_the_promises_has_nothing_to_shrink() -> None:
    assert shrink(0, 1, print, seconds=1.0) is None
