"""The trio driver of operations: what happens when one is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from lakefs.client.trio.driver import CLEANUP_S
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import EngineUnreachable
from lakefs.host.offload import InlineOffload
from lakefs.ids import Buffer
from lakefs.limits import CHUNK_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.offers import Offers


class StuckEngine:
    """Answers until it gets the request `stuck`, which it never answers; `after` says what happens to later ones."""

    epoch = 0
    carries_descriptors = False
    offers = Offers()

    def __init__(self, stuck: type[m.Request], *, after: str = "answers") -> None:
        self._stuck = stuck
        self._after = after
        self.asked: list[type[m.Request]] = []

    def is_connected(self) -> bool:
        return True

    async def call(
        self,
        request: m.Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        is_stuck = isinstance(request, self._stuck) or (self._stuck in self.asked and self._after == "hangs")
        self.asked.append(type(request))
        if is_stuck:
            await trio.sleep_forever()
        if self._stuck in self.asked and self._after == "fails":
            raise EngineUnreachable("gone")
        return Reply(m.SessionOpened(bytes(16)) if isinstance(request, m.SessionOpen) else m.Done())

    def tell(self, request: m.Request) -> bool:
        return False

    def watch(
        self, bucket: str, *, others_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[m.WatchEvent]]:
        raise NotImplementedError


async def cancel_a_put(engine: StuckEngine) -> None:
    lake = TrioLake(engine, InlineOffload())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(lake.put, "bkt/k", bytes(CHUNK_BYTES + 1), create_bucket=True))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("after", ["answers", "fails"])
def test_a_cancelled_put_ends_its_session(after: str) -> None:
    engine = StuckEngine(m.StoreChunks, after=after)
    trio.run(cancel_a_put, engine)
    assert engine.asked[-1] is m.SessionEnd


def test_a_cancelled_put_gives_up_on_an_engine_that_does_not_answer() -> None:
    engine = StuckEngine(m.StoreChunks, after="hangs")
    clock = MockClock(autojump_threshold=0)

    async def main() -> float:
        began = trio.current_time()
        await cancel_a_put(engine)
        return trio.current_time() - began

    assert trio.run(main, clock=clock) == pytest.approx(CLEANUP_S)
    assert engine.asked[-1] is m.SessionEnd


def test_a_put_that_breaks_on_an_unexpected_error_raises_it() -> None:
    class BrokenEngine(StuckEngine):
        async def call(
            self,
            request: m.Request,
            body: Sequence[Buffer] = (),
            descriptors: Sequence[int] = (),
            *,
            into: Sequence[memoryview] = (),
        ) -> Reply:
            raise ZeroDivisionError

    async def main() -> None:
        await TrioLake(BrokenEngine(m.Ping), InlineOffload()).put("bkt/k", b"x")

    with pytest.raises(ZeroDivisionError):
        trio.run(main)


def test_a_cancelled_put_waits_for_the_session_that_it_asked_for_but_not_for_ever() -> None:
    engine = StuckEngine(m.SessionOpen)

    async def main() -> float:
        began = trio.current_time()
        await cancel_a_put(engine)
        return trio.current_time() - began

    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == pytest.approx(CLEANUP_S)
    assert engine.asked == [m.SessionOpen]
