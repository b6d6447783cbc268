"""The simulator bites: bugs put into the engine on purpose are noticed within a few seeds."""

from __future__ import annotations

import pytest

from tests.sim.planted import BUGS, Bug, seeds_to_notice


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    assert seeds_to_notice(bug) is not None, f"{bug.what}: not noticed in {bug.seeds} seeds"
