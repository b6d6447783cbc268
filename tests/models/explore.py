"""A small explicit-state model checker: every state that a model can reach, and the shortest way to a bad one.

A model is a protocol in small: frozen states, the steps that lead from each to others, and what must be true in all of
them.  Whatever can happen, in whatever order, is a step: so nothing here is random, and a state count is a fact of the
model that tests compare.

Bounds are the model's own: a state has finitely many steps, and numbers in it end somewhere.  States that differ only
by an exchange of names (two writers, two members) may share one form: only that is looked at, and a trace is found
without it, so that a name means the same in all its lines.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """A protocol in small."""

    def initial(self) -> S:
        """Return the state in which everything begins."""
        ...

    def steps(self, state: S) -> Iterable[tuple[str, S]]:
        """Yield each step that can be taken now, in words, and the state behind it."""
        ...

    def form(self, state: S) -> S:
        """Return the one state that stands for all that differ from this one only by an exchange of names."""
        ...

    def broken(self, state: S) -> str | None:
        """Return the promise that this state breaks, or None."""
        ...


@dataclass(frozen=True)
class Violation(Generic[S]):
    """The shortest way to a state that breaks a promise."""

    promise: str
    steps: tuple[tuple[str, S], ...]

    def __str__(self) -> str:
        width = max(len(step) for step, _ in self.steps)
        lines = (f"{number:3}. {step:{width}}  {state}" for number, (step, state) in enumerate(self.steps))
        return "\n".join((*lines, f"broken: {self.promise}"))


@dataclass(frozen=True)
class Explored(Generic[S]):
    """The result: a violation, or the number of states and the words of all steps taken between them."""

    states: int
    steps: frozenset[str]
    violation: Violation[S] | None


def explore(model: Model[S]) -> Explored[S]:
    """Look at every state that the model can reach; end at the first that breaks a promise."""
    was_enabled = gc.isenabled()
    gc.disable()  # states refer to nothing that refers back: looking at all of them again and again finds no garbage
    try:
        return _explored(model)
    finally:
        if was_enabled:
            gc.enable()


def _explored(model: Model[S]) -> Explored[S]:
    start = model.form(model.initial())
    came_from: dict[S, S | None] = {start: None}
    words: set[str] = set()
    layer = [start]
    steps, form, broken = model.steps, model.form, model.broken
    while layer:
        following = []
        for state in layer:
            for word, behind in steps(state):
                words.add(word)
                found = form(behind)
                if found in came_from:
                    continue
                came_from[found] = state
                promise = broken(found)
                if promise is not None:
                    way = tuple(_replayed(model, _way(came_from, found)))
                    return Explored(len(came_from), frozenset(words), Violation(promise, way))
                following.append(found)
        layer = following
    return Explored(len(came_from), frozenset(words), None)


def _way(came_from: dict[S, S | None], last: S) -> list[S]:
    way = [last]
    while (before := came_from[way[-1]]) is not None:
        way.append(before)
    return way[::-1]


def _replayed(model: Model[S], forms: list[S]) -> Iterator[tuple[str, S]]:
    """Yield steps and states from the model's own beginning that lead through these forms."""
    state = model.initial()
    yield "begin", state
    for wanted in forms[1:]:
        word, state = next((word, behind) for word, behind in model.steps(state) if model.form(behind) == wanted)
        yield word, state
