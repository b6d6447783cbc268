"""Upkeep rests after its steps while clients write, and only then."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from engine.metadata.pacing import QUIET_S, REST_AFTER_LOOKING, REST_S_MAX, Pacing
from tests.store_rig import client_of, put, run, simulated_store


def rested_s(worked_s: float, since_change_s: float) -> float:
    """Return the rest after a step of that length, when names were changed so long before its end."""

    async def main() -> float:
        async with simulated_store() as store:
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, MockClock)
            pacing = Pacing(store.metadata)
            if worked_s > since_change_s:
                clock.jump(worked_s - since_change_s)
            await put(client_of(store), "k", b"content")
            clock.jump(min(worked_s, since_change_s))
            began = trio.current_time()
            await pacing.rest()
            return trio.current_time() - began

    return run(main)


def test_it_rests_three_times_as_long_as_it_worked_while_somebody_writes() -> None:
    assert rested_s(0.01, 0.001) == pytest.approx(0.01 * REST_AFTER_LOOKING)
    assert rested_s(100.0, 0.001) == REST_S_MAX


def test_it_does_not_rest_when_nobody_has_written_for_a_while() -> None:
    assert rested_s(QUIET_S * 2, QUIET_S * 1.5) == 0.0
