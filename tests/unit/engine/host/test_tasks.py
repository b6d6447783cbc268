"""One plain error comes out of nurseries instead of a group, also beside a cancellation."""

from __future__ import annotations

import pytest
import trio

from engine.host.tasks import plain_errors
from lakefs.errors import CoordinatorLost, EngineUnreachable, LakeError


async def _fail(error: BaseException) -> None:
    raise error


async def _fail_when_cancelled(error: BaseException) -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise error


def _ends_with(kind: type[BaseException], *errors: BaseException, late: BaseException | None = None) -> None:
    async def main() -> None:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                if late is not None:
                    nursery.start_soon(_fail_when_cancelled, late)
                for error in errors:
                    nursery.start_soon(_fail, error)

    with pytest.raises(kind) as raised:
        trio.run(main)
    assert type(raised.value) is kind


def test_a_single_error_and_the_first_of_lake_errors_are_raised_bare() -> None:
    _ends_with(ValueError, ValueError("a bug"))
    _ends_with(CoordinatorLost, CoordinatorLost("lost"))
    _ends_with(CoordinatorLost, CoordinatorLost("lost"), late=CoordinatorLost("lost, too"))


def test_a_bug_beside_other_errors_stays_in_a_group() -> None:
    _ends_with(ExceptionGroup, CoordinatorLost("lost"), late=ValueError("a bug"))


@pytest.mark.parametrize("count", [1, 2])
def test_lake_errors_beside_a_cancellation_are_one_plain_error(count: int) -> None:
    caught: list[LakeError] = []

    async def main() -> None:
        with trio.CancelScope() as outer:
            try:
                with plain_errors():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(trio.sleep_forever)
                        for _ in range(count):
                            nursery.start_soon(_fail_when_cancelled, EngineUnreachable("away"))
                        outer.cancel()
            except LakeError as error:
                caught.append(error)
            await trio.lowlevel.checkpoint()
            raise AssertionError("the cancellation holds")
        assert outer.cancelled_caught

    trio.run(main)
    assert [str(error) for error in caught] == ["away"]


def test_a_cancellation_alone_is_one_and_beside_a_bug_it_hides_nothing() -> None:
    async def cancelled(*errors: BaseException) -> None:
        with trio.CancelScope() as outer, plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(trio.sleep_forever)
                for error in errors:
                    nursery.start_soon(_fail_when_cancelled, error)
                outer.cancel()
        assert outer.cancelled_caught
        assert not errors

    trio.run(cancelled)
    with pytest.raises(BaseExceptionGroup) as raised:
        trio.run(cancelled, ValueError("a bug"))
    assert raised.group_contains(ValueError)
