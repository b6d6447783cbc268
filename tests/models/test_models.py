"""Every state of the models of the cluster's rules: they hold, and each weakened rule is noticed."""

from __future__ import annotations

import pytest

from tests.lengths import repeated
from tests.models.catalogue import LARGE, LARGEST, RULES, SMALL, SPARE, WEAKENED, Case
from tests.models.explore import explore

LONG = repeated(LARGE, LARGE | LARGEST)


def _holds(case: Case) -> None:
    explored = explore(case.make())
    assert explored.violation is None, f"\n{explored.violation}"
    assert explored.states == case.states
    for happening in case.happens:
        assert any(happening in step for step in explored.steps), f"never: {happening}"


@pytest.mark.parametrize("name", SMALL)
def test_the_rules_hold_in_every_state(name: str) -> None:
    _holds(SMALL[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", LONG)
def test_the_rules_hold_in_every_state_of_larger_models(name: str) -> None:
    _holds(LONG[name])


@pytest.mark.parametrize(("model", "rule"), WEAKENED)
def test_a_weakened_rule_is_noticed(model: str, rule: str) -> None:
    violation = explore(WEAKENED[model, rule]()).violation
    assert violation is not None
    print(violation)  # noqa: T201  pytest -rP shows it


@pytest.mark.parametrize(("model", "rule"), SPARE)
def test_a_rule_that_only_spares_work_is_not_missed(model: str, rule: str) -> None:
    assert explore(SPARE[model, rule]()).violation is None


def test_every_rule_is_weakened() -> None:
    weakened = {(model, rule) for model, rule in (*WEAKENED, *SPARE)}
    rules = {(model, rule) for model, kind in RULES.items() for rule in kind._fields}
    assert rules - weakened == set()
