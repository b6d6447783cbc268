"""Services that serve a choice of requests: names without a segment, content without names; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from engine.process.embedded import EmbeddedEngine
from engine.requests import table
from engine.requests.dispatch import Dispatch
from engine.requests.table import NamesService
from engine.server.listener import Server
from engine.store.store import Store
from lakefs.client.trio.engine import connect_engine
from lakefs.errors import UnsupportedVersion
from lakefs.ids import EMPTY_BLOB
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, change, good, read, run, session_of, simulated_store, store_chunks

CONTENT = (
    m.Offer(bytes(16), []),
    m.StoreChunks(bytes(16), [1], [5]),
    m.SourceOpen(),
    m.StoreFromSource(bytes(16), 1, [0], [1]),
    m.PutObjects([5], [change("k")]),
    m.Locate([]),
    m.ReadChunks([], [], []),
    m.PinChunks([]),
    m.OpenSegments([]),
    m.OpenSlabs([]),
    m.OpenSharedIndex(),
    m.LendMemory(1),
    m.KeyedMatch(1, [], lease=False),
    m.RunGc(),
    m.RunFsck(),
    m.RunScrub(),
)


@asynccontextmanager
async def names_alone(disk: SimDisk | None = None) -> AsyncIterator[EngineClient]:
    async with names_store(disk) as store:
        client = EmbeddedEngine(NamesService(store), descriptors=False)
        yield client
        await client.aclose()


def content_alone(store: Store) -> Dispatch:
    """A service of one engine's chunks."""
    groups = table.about(store), table.content(store), table.lending(store), table.upkeep(store)
    return Dispatch(store, groups, watches=False, offers="this process keeps content; it does not serve")


async def bind_empty(client: EngineClient, *keys: str) -> list[m.ObjectStat]:
    """Bind keys to the empty blob, which needs no content."""
    session = await session_of(client)
    changes = [change(key, EMPTY_BLOB) for key in keys]
    return good(await ask(client, m.Commit(session, changes, end_session=True), m.NameResults))


def test_names_are_served_without_a_segment_and_outlive_the_process() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with names_alone(disk) as client:
            assert (await ask(client, m.Hello(1, "test"), m.HelloReply)).features & m.FEATURE_PLACES
            await bind_empty(client, "a/one", "a/two")
            await ask(client, m.Rename("bkt", "a/one", "bkt", "b/three"), m.NameResults)
            await ask(client, m.Copy("bkt", "b/three", "bkt", "four"), m.NameResults)
            await ask(client, m.SetAttributes("bkt", "four", mode=0o600), m.NameResults)
            await ask(client, m.MakeFolder("bkt", "c/"), m.NameResults)
            await ask(client, m.MakeSymlink("bkt", "link", b"four", m.ObjectAttributes()), m.NameResults)
            await ask(client, m.DeleteNames([("bkt", "a/two")]), m.NameResults)
            key = (await ask(client, m.AccessKeyCreate([], False), m.AccessKeys)).keys[0]
            assert (await ask(client, m.AccessKeyList(), m.AccessKeys)).keys[0].access_key == key.access_key
            await ask(client, m.Sync(), m.Done)
        assert not disk.list_folder("segments")
        async with names_alone(disk) as client:
            listed = await ask(client, m.ListNames("bkt"), m.Listed)
            assert [entry.key for entry in listed.entries] == ["b/three", "c/", "four", "link"]
            assert json.loads((await ask(client, m.Status(), m.StatusReply)).status_json)["state"] == "serving"

    run(main)


def test_objects_are_opened_with_leases_and_without_places() -> None:
    async def main() -> None:
        async with names_store() as store:
            client = EmbeddedEngine(NamesService(store), descriptors=False)
            await bind_empty(client, "one")
            names = [("bkt", "one"), ("bkt", "none")]
            one, none = (await ask(client, m.OpenObjects(names, lease_inline=True), m.OpenResults)).results
            assert one.opened is not None
            assert one.opened.lease
            assert not one.opened.grants
            assert none.failure is not None
            assert store.references.statistics()["leases"] == 1
            await ask(client, m.CloseLeases([one.opened.lease]), m.Done)
            assert store.references.statistics()["leases"] == 0
            await ask(client, m.OpenObjects(names, lease_inline=True), m.OpenResults)
            await client.aclose()
            assert store.references.statistics() == {"connections": 0, "sessions": 0, "leases": 0}

    run(main)


def test_uploads_are_kept_and_completed_of_parts_that_a_holder_has_looked_at() -> None:
    async def main() -> None:
        async with names_alone() as client:
            await ask(client, m.BucketCreate("bkt"), m.Buckets)
            upload = await ask(client, m.UploadCreate("bkt", "big", m.ObjectAttributes()), m.UploadStat)
            session = await session_of(client)
            part = m.UploadPut(session, "bkt", "big", upload.upload, 1, EMPTY_BLOB, b"\1" * 16)
            assert (await ask(client, part, m.PartStat)).size_bytes == 0
            with pytest.raises(UnsupportedVersion, match="without content"):
                await client.call(m.UploadPut(session, "bkt", "big", upload.upload, 2, b"\1" * 33, b"\1" * 16))
            assert len((await ask(client, m.UploadList("bkt"), m.Uploads)).entries) == 1
            await ask(client, m.UploadAbort("bkt", "big", upload.upload), m.Done)
            assert not (await ask(client, m.UploadList("bkt"), m.Uploads)).entries

    run(main)


def test_watches_tell_of_changes() -> None:
    async def main() -> None:
        async with names_store() as store:
            watcher, writer = (EmbeddedEngine(NamesService(store), descriptors=False) for _ in range(2))
            async with watcher.watch("") as events:
                await bind_empty(writer, "one")
                event = await anext(events)
                assert (event.kind, event.key) == ("put", "one")
            await watcher.aclose()
            await writer.aclose()

    run(main)


@pytest.mark.parametrize("request_", CONTENT, ids=lambda request: type(request).__name__)
def test_content_is_refused_by_name_where_names_are_kept(request_: m.Request) -> None:
    async def main() -> None:
        async with names_alone() as client:
            body = [b"12345"] if isinstance(request_, (m.StoreChunks, m.PutObjects)) else []
            refusal = f"names are kept here, without content; this process does not serve {type(request_).__name__}$"
            with pytest.raises(UnsupportedVersion, match=refusal):
                await client.call(request_, body)

    run(main)


def test_a_blob_whose_content_nobody_has_looked_at_is_bound_to_no_name() -> None:
    async def main() -> None:
        async with names_alone() as client:
            session = await session_of(client)
            with pytest.raises(UnsupportedVersion, match="without content"):
                await client.call(m.Commit(session, [change("k", b"\1" * 33)]))
            with pytest.raises(Exception, match="bkt"):
                good(await ask(client, m.StatNames([("bkt", "k")]), m.NameResults))

    run(main)


def test_spaces_are_served_where_names_are_if_they_are_chosen() -> None:
    async def main() -> None:
        async with names_store() as store:
            service = Dispatch(store, [table.about(store), table.spaces(store)])
            client = EmbeddedEngine(service, descriptors=False)
            opened = await ask(client, m.SpaceOpen("kv", create=True), m.SpaceStat)
            assert (await ask(client, m.SpaceList(), m.Spaces)).spaces[0].number == opened.number
            with pytest.raises(UnsupportedVersion, match="does not offer StatNames"):
                await client.call(m.StatNames([]))
            await client.aclose()

    run(main)


def test_content_is_served_without_names() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = EmbeddedEngine(content_alone(store), descriptors=False)
            session = await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"content" * 99])
            assert await read(client, chunk) == b"content" * 99
            located = await ask(client, m.Locate([chunk]), m.Located)
            assert located.grants[0].stored_bytes == 7 * 99
            requests: list[m.Request] = [m.StatNames([("bkt", "k")]), m.Commit(session, []), m.BucketList()]
            for request in requests:
                with pytest.raises(
                    UnsupportedVersion, match=f"keeps content; it does not serve {type(request).__name__}"
                ):
                    await client.call(request)
            with pytest.raises(UnsupportedVersion, match="does not serve Watch"):
                async with client.watch(""):
                    pass
            await client.aclose()
            assert store.buffers.in_use == 0

    run(main)


def test_refusals_arrive_over_a_socket_and_the_connection_goes_on() -> None:
    """A body that is announced to a process that does not serve the request is passed over."""

    async def main() -> None:
        async with names_store() as store, trio.open_nursery() as nursery:
            network = TrioNetwork()
            server = Server(NamesService(store), network, token="secret")
            address = await nursery.start(server.listen_and_serve, "tcp://127.0.0.1:0")
            async with connect_engine(address, token="secret", network=network) as client:
                for _ in range(2):
                    with pytest.raises(UnsupportedVersion, match=r"does not serve PutObjects$"):
                        await client.call(m.PutObjects([70_000], [change("k")]), [bytes(70_000)])
                await bind_empty(client, "k")
            await server.drain(5)
            nursery.cancel_scope.cancel()

    trio.run(main)
