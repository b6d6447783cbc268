"""No answer leaves before what it rests on is durable: changes, reads of them, and refusals because of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
import trio.testing

from engine.embedded import EmbeddedEngine
from lakefs.errors import LakeError
from lakefs.ids import data_chunk_id
from lakefs.offload import InlineOffload
from lakefs.wire import messages as m
from tests.store_rig import change, client_of, put, run, session_of, simulated_store, store_chunks

T = TypeVar("T")
SMALL, LARGE = b"small content", b"large content" * 10_000
NEW = b"new content"


class HeldJournal(InlineOffload):
    """Threads in which the journal's appends wait until they are let go."""

    def __init__(self) -> None:
        self.let_go = trio.Event()
        self.let_go.set()

    async def run(self, call: Callable[..., T], *args: object) -> T:
        if getattr(call, "__name__", "") == "_append_blocking":
            await self.let_go.wait()
        return await super().run(call, *args)


Ask = Callable[[EmbeddedEngine, bytes], Awaitable[object]]


def request(message: m.Request, *body: bytes) -> Ask:
    return lambda client, session: client.call(message, body)


async def offer(client: EmbeddedEngine, session: bytes) -> None:
    await client.call(m.Offer(session, [data_chunk_id(NEW)]))


async def store_again(client: EmbeddedEngine, session: bytes) -> None:
    await store_chunks(client, session, [NEW])


async def commit(client: EmbeddedEngine, session: bytes) -> None:
    await client.call(m.Commit(session, [change("bound", data_chunk_id(NEW))]))


async def refused_commit(client: EmbeddedEngine, session: bytes) -> None:
    absent = m.Condition(absent=True)
    await client.call(m.Commit(session, [change("new", data_chunk_id(SMALL), condition=absent)]))


CHANGES: dict[str, Ask] = {
    "a new name": request(m.PutObjects([len(NEW)], [change("new")]), NEW),
    "a removed name": request(m.DeleteNames([("bkt", "large")])),
    "a new bucket": request(m.BucketCreate("fresh")),
    "a removed bucket": request(m.BucketRemove("empty")),
}
ANSWERS: dict[str, list[Ask]] = {
    "a new name": [
        request(m.StatNames([("bkt", "new")])),
        request(m.ListNames("bkt")),
        request(m.OpenObjects([("bkt", "new")])),
        request(m.PutObjects([1], [change("new", condition=m.Condition(absent=True))]), b"x"),
        request(m.PutObjects([len(NEW)], [change("too")]), NEW),
        request(m.MakeFolder("bkt", "new/below/", exclusive=True)),
        request(m.Rename("bkt", "small", "bkt", "new", replace=False)),
        request(m.Copy("bkt", "small", "bkt", "new", condition=m.Condition(absent=True))),
        request(m.Copy("bkt", "new", "bkt", "copy")),
        request(m.DeleteNames([("bkt", "new")], m.Condition(etags=["another"]))),
        request(m.Locate([data_chunk_id(NEW)])),
        request(m.ReadChunks([data_chunk_id(NEW)], [0], [0])),
        offer,
        store_again,
        commit,
        refused_commit,
    ],
    "a removed name": [
        request(m.StatNames([("bkt", "large")])),
        request(m.ListNames("bkt")),
        request(m.OpenObjects([("bkt", "large")])),
        request(m.Rename("bkt", "large", "bkt", "elsewhere")),
        request(m.Copy("bkt", "large", "bkt", "elsewhere")),
        request(m.DeleteNames([("bkt", "large")])),
    ],
    "a new bucket": [
        request(m.BucketList()),
        request(m.BucketList("fresh")),
        request(m.BucketCreate("fresh")),
        request(m.ListNames("fresh")),
        request(m.StatNames([("fresh", "k")])),
        request(m.OpenObjects([("fresh", "k")])),
        request(m.DeleteNames([("fresh", "k")])),
        request(m.Rename("bkt", "missing", "fresh", "k")),
    ],
    "a removed bucket": [
        request(m.BucketList()),
        request(m.BucketList("empty")),
        request(m.BucketRemove("empty")),
        request(m.ListNames("empty")),
        request(m.StatNames([("empty", "k")])),
        request(m.OpenObjects([("empty", "k")])),
        request(m.DeleteNames([("empty", "k")])),
        request(m.MakeFolder("empty", "f/")),
        request(m.Rename("empty", "k", "bkt", "k")),
        request(m.Copy("bkt", "small", "empty", "k")),
        request(m.PutObjects([1], [change("k", bucket="empty", create_bucket=False)]), b"x"),
    ],
}


@pytest.mark.parametrize(
    ("changed", "index"), [(changed, index) for changed in ANSWERS for index in range(len(ANSWERS[changed]))]
)
def test_an_answer_waits_for_the_change_that_it_rests_on(changed: str, index: int) -> None:
    async def main() -> None:
        offload = HeldJournal()
        async with simulated_store(offload=offload) as store:
            writer, client = client_of(store), client_of(store)
            await put(writer, "small", SMALL)
            await put(writer, "large", LARGE)
            await writer.call(m.BucketCreate("empty"))
            session = await session_of(client)
            ended: list[str] = []

            async def tell(who: str, ask: Ask, asker: EmbeddedEngine) -> None:
                try:
                    await ask(asker, session)
                except LakeError as error:
                    ended.append(f"{who}: {error!r}")
                else:
                    ended.append(who)

            offload.let_go = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell, "change", CHANGES[changed], writer)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(tell, "answer", ANSWERS[changed][index], client)
                await trio.testing.wait_all_tasks_blocked()
                too_early = list(ended)
                offload.let_go.set()
            assert too_early == []
            assert len(ended) == 2

    run(main)


def test_what_rests_on_durable_things_only_is_answered_at_once() -> None:
    async def main() -> None:
        offload = HeldJournal()
        async with simulated_store(offload=offload) as store:
            writer, client = client_of(store), client_of(store)
            await put(writer, "small", SMALL)
            await trio.sleep(10)  # the index takes it over
            offload.let_go = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(CHANGES["a new bucket"], writer, b"")
                await trio.testing.wait_all_tasks_blocked()
                with trio.move_on_after(5) as waited:
                    await client.call(m.StatNames([("bkt", "small")]))
                    await client.call(m.OpenObjects([("bkt", "small")]))
                offload.let_go.set()
            assert not waited.cancelled_caught

    run(main)
