"""Rules of a lake that are weakened on purpose: histories notice each within a few seeds.

The first seed is the one that noticed it when it was planted; if a change of the product has shifted
the histories, the others follow.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster.planted import WEAKENED
from tests.sim.cluster.planted_etcd import OVER_ETCD
from tests.sim.cluster.planted_shards import OVER_SHARDS
from tests.sim.cluster.weakening import Weakening, seeds_to_notice

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    "weakened", [*WEAKENED, *OVER_ETCD, *OVER_SHARDS], ids=lambda weakened: weakened.what.replace(" ", "-")
)
def test_a_weakened_rule_is_noticed(weakened: Weakening) -> None:
    assert seeds_to_notice(weakened) is not None, f"{weakened.what}: not noticed in {weakened.seeds} histories"
