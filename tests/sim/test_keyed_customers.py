"""Customers of keyed blobs beside workloads of names: bugs planted in keyed blobs are noticed by ordinary seeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import pytest

from lakefs.errors import LakeError
from tests.sim.judges.history import SimFailure
from tests.sim.test_keyed_blobs import (
    a_present_key_is_replaced,
    a_put_is_answered_before_it_is_durable,
    gc_forgets_values,
)
from tests.sim.workloads.keyed import KEYED_EVERY
from tests.sim.world.world import World

pytestmark = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "first", "bound"),
    [(gc_forgets_values, 0, 50), (a_present_key_is_replaced, 0, 50), (a_put_is_answered_before_it_is_durable, 70, 300)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_planted_bug_in_keyed_blobs_is_noticed_by_an_ordinary_seed(
    plant: Callable[[], AbstractContextManager[Any]], first: int, bound: int
) -> None:
    for seed in chain((first,), range(0, bound, KEYED_EVERY)):
        try:
            with plant():
                World(seed).run()
        except (SimFailure, LakeError, AssertionError, BaseExceptionGroup):
            return
    pytest.fail(f"not noticed in {bound} seeds")


def test_a_seed_without_its_customer_is_another_run() -> None:
    with_customer, without = World(0, rounds=1), World(0, rounds=1, without=("keyed",))
    assert with_customer.run().met["keyed_put"] > 0
    assert without.run().met["keyed_put"] == 0
    assert "keyed" in with_customer.parts
    other = World(1, rounds=1)
    other.run()
    assert "keyed" not in other.parts
