"""No answer leaves before what it rests on is durable: changes, reads of them, and refusals because of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
import trio.testing

from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_shared_index
from engine.requests.table import Service
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.errors import AlreadyExists, DiskFailed, LakeError, StoreReadOnly
from lakefs.host.offload import InlineOffload
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIA_DRAM, MEDIUM_DRAM
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, change, client_of, good, put, run, session_of, simulated_store, store_chunks

T = TypeVar("T")
SMALL, LARGE = b"small content", b"large content" * 10_000
NEW = b"new content"


class HeldJournal(InlineOffload):
    """Threads in which the journal's appends wait until the test lets them go."""

    def __init__(self) -> None:
        self.close_later = trio.Event()
        self.close_later.set()

    async def run(self, call: Callable[..., T], *args: object) -> T:
        if getattr(call, "__name__", "") == "_append_blocking":
            await self.close_later.wait()
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

            offload.close_later = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell, "change", CHANGES[changed], writer)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(tell, "answer", ANSWERS[changed][index], client)
                await trio.testing.wait_all_tasks_blocked()
                too_early = list(ended)
                offload.close_later.set()
            assert too_early == []
            assert len(ended) == 2

    run(main)


LINK = m.MakeSymlink("bkt", "new", b"t", m.ObjectAttributes(), durable=False)
VISIBLE: dict[str, m.Request] = {
    "put": m.PutObjects([len(NEW)], [change("new")], durable=False),
    "delete": m.DeleteNames([("bkt", "small")], durable=False),
    "rename": m.Rename("bkt", "small", "bkt", "new", durable=False),
    "folder": m.MakeFolder("bkt", "new/", durable=False),
    "attributes": m.SetAttributes("bkt", "small", mode=0, durable=False),
    "symlink": LINK,
    "removed folder": m.RemoveFolder("bkt", "folder/", durable=False),
}


@pytest.mark.parametrize("what", [*VISIBLE, "commit"])
def test_who_asks_for_no_more_than_visible_is_answered_at_once_and_nobody_else(what: str) -> None:
    async def main() -> None:
        offload = HeldJournal()
        async with simulated_store(offload=offload) as store:
            client, other = client_of(store), client_of(store)
            await put(client, "small", SMALL)
            await client.call(m.MakeFolder("bkt", "folder/"))
            session = await session_of(client)
            (chunk,) = await store_chunks(client, session, [LARGE])
            request = VISIBLE.get(what) or m.Commit(session, [change("new", chunk)], True, durable=False)
            body = [NEW] if isinstance(request, m.PutObjects) else []
            offload.close_later = trio.Event()
            before = store.metadata.durable_sequence
            told: list[m.Message] = []
            names = ("small", "new", "new/", "folder/")

            async def tell(asker: EmbeddedEngine, question: m.Request) -> None:
                told.append((await asker.call(question)).message)

            with trio.fail_after(60):
                answered = (await client.call(request, body)).message
            assert isinstance(answered, m.NameResults)
            assert answered.results[0].failure is None
            assert store.metadata.durable_sequence == before
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell, other, m.ListNames("bkt"))
                nursery.start_soon(tell, other, m.StatNames([("bkt", key) for key in names]))
                nursery.start_soon(tell, client, m.Sync())
                await trio.testing.wait_all_tasks_blocked()
                too_early = list(told)
                offload.close_later.set()
            assert too_early == []
            assert len(told) == 3

    run(main)


def test_a_refusal_of_who_asks_for_no_more_than_visible_leaves_at_once() -> None:
    async def main() -> None:
        offload = HeldJournal()
        async with simulated_store(offload=offload) as store:
            client = client_of(store)
            await put(client, "small", SMALL)
            offload.close_later = trio.Event()
            with trio.fail_after(60):
                await client.call(LINK)
                with pytest.raises(AlreadyExists):
                    await client.call(LINK)
            offload.close_later.set()

    run(main)


def test_what_was_only_visible_fails_the_sync_and_all_that_follows_when_the_journal_fails() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await put(client, "small", SMALL)
            disk.fail_next("sync_data", DiskFailed("planted"), path="journal/")
            await client.call(LINK)
            with pytest.raises(StoreReadOnly):
                await client.call(m.Sync())
            with pytest.raises(StoreReadOnly):
                await client.call(m.MakeFolder("bkt", "f/", durable=False))
            with pytest.raises(StoreReadOnly):
                await client.call(m.StatNames([("bkt", "new")]))
        async with simulated_store(disk.crash()) as store:
            (found,) = good(await ask(client_of(store), m.StatNames([("bkt", "small")]), m.NameResults))
            assert found.size_bytes == len(SMALL)
            await ask(client_of(store), m.Sync(), m.Done)

    run(main)


def test_what_rests_on_durable_things_only_is_answered_at_once() -> None:
    async def main() -> None:
        offload = HeldJournal()
        async with simulated_store(offload=offload) as store:
            writer, client = client_of(store), client_of(store)
            await put(writer, "small", SMALL)
            await trio.sleep(10)  # the index takes it over
            offload.close_later = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(CHANGES["a new bucket"], writer, b"")
                await trio.testing.wait_all_tasks_blocked()
                with trio.move_on_after(5) as waited:
                    await client.call(m.StatNames([("bkt", "small")]))
                    await client.call(m.OpenObjects([("bkt", "small")]))
                offload.close_later.set()
            assert not waited.cancelled_caught

    run(main)


def test_the_place_in_memory_of_a_chunk_that_is_not_durable_yet_is_told_when_it_is() -> None:
    async def main() -> None:
        offload, tier, payload = HeldJournal(), DramTier(Arena(2, MIB)), bytes(20 * KIB)
        async with simulated_store(offload=offload, tier=tier) as store, trio.open_nursery() as nursery:
            await nursery.start(run_shared_index, store, "memory", 100)
            client, told = EmbeddedEngine(Service(store)), list[m.Message]()
            await put(client, "small", SMALL)  # so that there is a segment

            async def locate() -> None:
                told.append((await client.call(m.Locate([data_chunk_id(payload)], MEDIA_DRAM))).message)

            offload.close_later = trio.Event()
            request = m.PutObjects([len(payload)], [change("new")], durable=False)
            nursery.start_soon(client.call, request, [payload])
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked()
                (await client.call(m.OpenObjects([("bkt", "new")], durable=False))).body.release()
            await trio.testing.wait_all_tasks_blocked()
            assert data_chunk_id(payload) in tier
            async with trio.open_nursery() as asking:
                asking.start_soon(locate)
                await trio.testing.wait_all_tasks_blocked()
                too_early = list(told)
                offload.close_later.set()
            nursery.cancel_scope.cancel()
        tier.close()
        assert too_early == []
        assert isinstance(told[0], m.Located)
        assert told[0].grants[0].medium == MEDIUM_DRAM

    run(main)
