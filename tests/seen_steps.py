"""Watches the steps of an operation as they are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lakefs.steps.steps import Send, Start, Step, Steps
from lakefs.wire import messages as m

T = TypeVar("T")


def asks(step: Step, request: type[m.Request]) -> bool:
    """Return whether the step sends a request of that type."""
    return isinstance(step, Start) and isinstance(step.effect, Send) and isinstance(step.effect.request, request)


def seen(steps: Steps[T], see: Callable[[Step, object], Steps[None] | None]) -> Steps[T]:
    """Take the same steps; call `see` with each one and its answer, after it was taken.

    Steps that `see` returns are taken before the operation gets the answer.
    """
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, error = None, None
        try:
            answer = yield step
        except BaseException as raised:  # noqa: BLE001 - thrown into the operation, which raises it
            error = raised
        between = see(step, answer)
        if between is not None:
            yield from between
