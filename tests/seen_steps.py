"""An operation's steps, looked at as they are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lakefs.steps.steps import Send, Start, Step, Steps
from lakefs.wire import messages as m

T = TypeVar("T")


def asks(step: Step, request: type[m.Request]) -> bool:
    """Whether the step sends such a request."""
    return isinstance(step, Start) and isinstance(step.effect, Send) and isinstance(step.effect.request, request)


def seen(steps: Steps[T], see: Callable[[Step, object], Steps[None] | None]) -> Steps[T]:
    """The same steps; `see` is told each, with its answer, when it has been taken.

    Steps that it gives are taken before the operation learns of the answer.
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
