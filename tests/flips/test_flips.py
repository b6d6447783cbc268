"""Flipped bits anywhere in a store: nothing wrong is served, and what matters is reported.  More: `make torture`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flips.campaign import Samples, run_campaign, samples_made
from tests.flips.planted import BUGS, Bug, flips_to_notice

pytestmark = pytest.mark.slow
FLIPS = 100
JOBS = 2


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Samples, Path]]:
    with samples_made() as made:
        yield made


def test_no_flipped_bit_makes_a_store_serve_anything_wrong_and_live_ones_are_reported() -> None:
    tally = run_campaign(FLIPS, seed=1, jobs=JOBS)
    assert not tally.failures, "\n".join([*tally.failures, *tally.lines()])
    assert len(tally.flips) > 15


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_check_that_is_left_out_is_noticed(made: tuple[Samples, Path], bug: Bug) -> None:
    number, _ = flips_to_notice(bug, *made)
    assert number, f"{bug.what}: not noticed in {bug.flips} flips"
