"""The blocking client's driver: an operation that an error from outside interrupts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.driver import unwind
from lakefs.client.facade import driver_of
from lakefs.errors import EngineUnreachable
from lakefs.steps.steps import Steps, send, work
from lakefs.wire.messages import Ping


def test_an_error_of_any_kind_is_thrown_into_the_operation(tmp_path: Path) -> None:
    seen: list[str] = []

    def fails() -> None:
        raise BrokenPipeError("the reader is gone")

    def operation() -> Steps[None]:
        try:
            yield from work(fails)
        finally:
            seen.append("cleaning up")
            yield from send(Ping())
            seen.append("cleaned up")

    (tmp_path / "store").mkdir()
    with open_lake(tmp_path / "store") as lake, pytest.raises(BrokenPipeError):
        driver_of(lake).run(operation())
    assert seen == ["cleaning up", "cleaned up"]


def test_an_operation_left_between_two_steps_cleans_up_without_the_engine() -> None:
    seen: list[object] = []

    def operation() -> Steps[None]:
        try:
            yield from send(Ping())
        except KeyboardInterrupt as error:
            seen.append(error)
            try:
                yield from send(Ping())
            except EngineUnreachable as lost:
                seen.append(type(lost))
            raise

    steps = operation()
    next(steps)
    interrupt = KeyboardInterrupt()
    unwind(steps, interrupt)
    assert seen == [interrupt, EngineUnreachable]
    with pytest.raises(StopIteration):
        next(steps)


def test_unwinding_an_operation_that_has_ended_or_never_began_does_nothing() -> None:
    def operation() -> Steps[None]:
        yield from send(Ping())

    unwind(operation(), KeyboardInterrupt())
    ended = operation()
    ended.close()
    unwind(ended, KeyboardInterrupt())
