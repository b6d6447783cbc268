"""The model checker itself: it counts states once, finds the shortest way, and keeps names apart in traces."""

from __future__ import annotations

from collections.abc import Iterator

from tests.models.explore import explore

State = tuple[int, int]


class Counters:
    """Two counters up to 3; one may also jump."""

    def __init__(self, bad: State | None = None, *, alike: bool = False) -> None:
        self._bad, self._alike = bad, alike

    def initial(self) -> State:
        return 0, 0

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        one, other = state
        if one < 3:
            yield "one", (one + 1, other)
        if other < 3:
            yield "other", (one, other + 1)
        if state == (0, 0):
            yield "jump", (0, 2)

    def form(self, state: State) -> State:
        return (min(state), max(state)) if self._alike else state

    def broken(self, state: State) -> str | None:
        return "it is bad" if self.form(state) == self._bad else None


def test_every_state_is_counted_once() -> None:
    explored = explore(Counters())
    assert (explored.states, explored.violation) == (16, None)
    assert explored.steps == {"one", "other", "jump"}
    assert explore(Counters(alike=True)).states == 10


def test_the_trace_is_the_shortest() -> None:
    violation = explore(Counters((1, 2))).violation
    assert violation is not None
    assert sorted(step for step, _ in violation.steps) == ["begin", "jump", "one"]
    assert str(violation).splitlines()[-1] == "broken: it is bad"


def test_a_trace_through_states_that_stand_for_others_keeps_names_apart() -> None:
    violation = explore(Counters((2, 3), alike=True)).violation
    assert violation is not None
    states = [state for _, state in violation.steps]
    for (_, before), (step, after) in zip(violation.steps, violation.steps[1:], strict=False):
        assert (step, after) in set(Counters().steps(before))
    assert sorted(states[-1]) == [2, 3]
