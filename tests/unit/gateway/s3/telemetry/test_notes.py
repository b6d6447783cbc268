"""Notes of a gateway's counts: when they are sent, and to which engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio
from trio.testing import MockClock

from gateway.s3.protocol.operation import Operation
from gateway.s3.telemetry.notes import keep_noted, note_of
from gateway.s3.telemetry.traffic import CLASSES, OPERATIONS, Snapshot
from lakefs.errors import EngineUnreachable, LakeError, UnsupportedVersion
from lakefs.ids import Buffer
from lakefs.limits import GATEWAY_NOTE_S
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Done, NoteGateway, Request
from lakefs.wire.offers import Offers


class Engine:
    """Takes notes, or refuses them with `failure`."""

    carries_descriptors = False
    offers = Offers()

    def __init__(self) -> None:
        self.epoch = 1
        self.failure: LakeError | None = None
        self.asked: list[Request] = []

    def is_connected(self) -> bool:
        return True

    def tell(self, request: Request) -> bool:
        raise AssertionError("a busy client leaves that out")

    def watch(self, bucket: str, *, others_only: bool = False) -> AbstractAsyncContextManager[Any]:
        raise AssertionError("a note watches nothing")

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        return Reply(Done(), epoch=self.epoch)


class Noting:
    """A gateway that notes its counts to an engine."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.counts = Snapshot(passed_on={"new": 0})

    def note(self) -> NoteGateway:
        return note_of("http://127.0.0.1:9000", self.counts, has_door=True)

    async def asked_after(self, periods: int) -> int:
        """Return the count of requests in so many periods from now."""
        before = len(self.engine.asked)
        await trio.sleep(periods * GATEWAY_NOTE_S)
        return len(self.engine.asked) - before

    def run(self, *steps: tuple[str, int]) -> None:
        """Do each named step; then so many requests are sent in ten periods."""

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_noted, self.engine, self.note)
                await trio.sleep(GATEWAY_NOTE_S / 2)
                assert self.engine.asked == [self.note()]
                for step, requests in steps:
                    getattr(self, step)()
                    assert await self.asked_after(10) == requests, step
                nursery.cancel_scope.cancel()

        trio.run(main, clock=MockClock(autojump_threshold=0))

    def idle(self) -> None:
        pass

    def answer(self) -> None:
        self.counts = self.counts.plus(Snapshot(passed_on={"new": 1}))

    def reconnect(self) -> None:
        self.engine.epoch += 1

    def lose(self) -> None:
        self.engine.failure = EngineUnreachable("away")

    def outdate(self) -> None:
        self.engine.failure = UnsupportedVersion("no such request")

    def update(self) -> None:
        self.engine.failure = None
        self.engine.epoch += 1


def test_a_note_has_the_sums_of_this_process() -> None:
    counts = Snapshot(repeated={"GetObject": 3, "HeadObject": 2}, passed_on={"new": 4, "changed": 0})
    counts.requests[OPERATIONS.index(Operation.GET_OBJECT.value) * len(CLASSES) + 1] = 7
    counts.requests[OPERATIONS.index(Operation.PUT_OBJECT.value) * len(CLASSES) + 4] = 1
    found = note_of("https://h:1", counts, has_door=False)
    assert found == NoteGateway("https://h:1", os.getpid(), False, 8, 5, {"new": 4, "changed": 0})


def test_counts_are_noted_when_they_have_changed_and_on_each_new_connection() -> None:
    Noting().run(("idle", 0), ("answer", 1), ("idle", 0), ("reconnect", 1), ("answer", 1))


def test_counts_that_were_not_noted_are_noted_later() -> None:
    Noting().run(("lose", 0), ("answer", 10), ("update", 1), ("idle", 0))


def test_an_engine_that_takes_no_notes_is_asked_once() -> None:
    Noting().run(("outdate", 0), ("answer", 1), ("answer", 0), ("reconnect", 1), ("update", 1), ("answer", 1))
