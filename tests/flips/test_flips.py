"""Flipped bits anywhere in a store: nothing wrong is served, and what matters is reported.  More: `make torture`."""

from __future__ import annotations

from tests.flips.campaign import run_campaign

JOBS = 2


def test_no_flipped_bit_makes_a_store_serve_anything_wrong_and_live_ones_are_reported() -> None:
    tally = run_campaign(100, seed=1, jobs=JOBS)
    assert not tally.failures, "\n".join([*tally.failures, *tally.lines()])
    assert len(tally.flips) > 15
