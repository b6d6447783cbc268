"""Bugs put into the engine on purpose: the simulator notices each within a few seeds.

The first seed is the one that noticed the bug when the document's table was written; if a change of the engine has
shifted the seeds, the others follow.
"""

from __future__ import annotations

import pytest

from tests.sim.planted import BUGS, Bug, rows, seeds_to_notice

pytestmark = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    first = {what: seeds - 1 for what, seeds, _ in rows()}.get(bug.what, 0)
    assert seeds_to_notice(bug, first=first) is not None, f"{bug.what}: not noticed in {bug.seeds} seeds"


def test_the_document_has_a_row_for_every_planted_bug_and_none_went_unnoticed() -> None:
    assert [(what, bound) for what, _, bound in rows()] == [(bug.what, bug.seeds) for bug in BUGS]
    assert [what for what, seeds, bound in rows() if not 0 < seeds <= bound] == []
