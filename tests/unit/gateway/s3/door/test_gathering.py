"""When gathered PUTs are stored: at once, many at a time, never two requests beside each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import trio
import trio.testing

from gateway.s3.door._repeater import Put
from gateway.s3.door.gathering import Gathering
from lakefs.limits import S3_PUTS_GATHERED_MAX


class Puts:
    """Puts that wait to be taken, as numbers."""

    def __init__(self) -> None:
        self.waiting: list[int] = []

    @property
    def gathered(self) -> int:
        return len(self.waiting)

    def take_puts(self, count_max: int) -> list[int]:
        taken, self.waiting = self.waiting[:count_max], self.waiting[count_max:]
        return taken


class Scene:
    """A gathering whose store takes as long as the test says."""

    def __init__(self) -> None:
        self.puts = Puts()
        self.gathering = Gathering(cast(Any, self.puts))
        self.gathering.store = self._store
        self.requests: list[list[int]] = []
        self.under_way = 0
        self.may_end = trio.Event()
        self.next = 0

    async def _store(self, puts: Sequence[Put]) -> None:
        assert not self.under_way, "one request at a time"
        self.under_way += 1
        self.requests.append(cast(Any, list(puts)))
        await self.may_end.wait()
        self.may_end = trio.Event()
        self.under_way -= 1

    def come(self, count: int) -> None:
        """Let so many puts come in one turn of the door."""
        self.puts.waiting += range(self.next, self.next + count)
        self.next += count
        self.gathering.after_turn()

    @property
    def sizes(self) -> list[int]:
        return [len(request) for request in self.requests]


def run(body: Callable[[Scene], Awaitable[None]]) -> None:
    """Run `body` with a gathering at work, on a clock that it moves."""

    async def main() -> None:
        scene = Scene()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.gathering.run)
            await settle()
            await body(scene)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=CLOCK)


CLOCK = trio.testing.MockClock()
settle = trio.testing.wait_all_tasks_blocked


def test_the_first_is_stored_at_once_and_those_that_come_meanwhile_together() -> None:
    async def body(scene: Scene) -> None:
        scene.come(1)
        await settle()
        assert scene.sizes == [1]
        scene.come(3)
        scene.come(2)
        await settle()
        assert scene.sizes == [1]
        scene.may_end.set()
        await settle()
        assert scene.sizes == [1, 5]

    run(body)


def test_a_request_has_a_bounded_number_of_puts() -> None:
    async def body(scene: Scene) -> None:
        scene.come(S3_PUTS_GATHERED_MAX + 7)
        await settle()
        scene.may_end.set()
        await settle()
        CLOCK.jump(0.001)
        await settle()
        assert scene.sizes == [S3_PUTS_GATHERED_MAX, 7]
        assert [put for request in scene.requests for put in request] == list(range(S3_PUTS_GATHERED_MAX + 7))

    run(body)


def test_after_many_the_next_request_waits_for_as_many_to_come() -> None:
    async def body(scene: Scene) -> None:
        scene.come(20)
        await settle()
        scene.may_end.set()
        await settle()
        scene.come(19)
        await settle()
        assert scene.sizes == [20]
        scene.come(1)
        await settle()
        assert scene.sizes == [20, 20]

    run(body)


def test_the_pause_ends_soon_though_fewer_come_or_none() -> None:
    async def body(scene: Scene) -> None:
        for count in (1, 0, 3):
            scene.come(20)
            await settle()
            scene.may_end.set()
            await settle()
            scene.come(count)
            await settle()
            CLOCK.jump(0.001)
            await settle()
            scene.may_end.set()
            await settle()
        assert scene.sizes == [20, 1, 20, 20, 3]

    run(body)


def test_after_few_there_is_no_pause() -> None:
    async def body(scene: Scene) -> None:
        scene.come(2)
        await settle()
        scene.come(1)
        scene.may_end.set()
        await settle()
        assert scene.sizes == [2, 1]

    run(body)
