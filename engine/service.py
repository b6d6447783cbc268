"""The engine's answers: one handler for each request of `lakefs.wire.messages`.

The handlers live beside what they are about (`puts`, `name_requests`, `reads`, `upload_requests`,
`access_key_requests`); here is the table, what a connection is, and the few requests that are about the engine itself.

Rules kept here:
- A reply leaves only when everything it rests on is durable; of a change that was asked for with `durable` false,
  when it is visible.
- A request's body and descriptors are given back or closed exactly once, whether it succeeds or not.
- What a client sends is checked here or in the handler before it is used; a bad request harms nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from engine.access_key_requests import AccessKeyRequests
from engine.buckets import find_bucket
from engine.chunk_reads import ChunkReads
from engine.holds import Client
from engine.hot_index_requests import HotIndexRequests
from engine.index_upkeep import with_what_happens
from engine.loads import Loads
from engine.memory_requests import MemoryRequests
from engine.name_requests import NameRequests
from engine.payloads import ReceivedBody
from engine.pin_requests import PinRequests
from engine.puts import Puts
from engine.reads import Reads
from engine.slab_requests import SlabRequests
from engine.slots import SlotRequests
from engine.store import Store
from engine.upload_requests import UploadRequests
from engine.watch import Watch
from lakefs.errors import IndexDamaged, InvalidArgument, UnsupportedVersion
from lakefs.limits import COMPACT_SHARE, COMPACT_SHARE_MOST, SCRUB_STEP_S_MAX
from lakefs.service import Body, Reply, ServedClient
from lakefs.sockets import close_all, let_go
from lakefs.wire import messages as m

Handler = Callable[[Client, Any, Body, Sequence[int]], Awaitable[Reply]]


class Service:
    """Implements `lakefs.service.EngineService` on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._puts = Puts(store)
        self._reads = Reads(store)
        names = NameRequests(store)
        uploads = UploadRequests(store)
        access_keys = AccessKeyRequests(store)
        self._handlers: Final[dict[type[m.Request], Handler]] = {
            m.Hello: self._hello,
            m.Ping: self._ping,
            m.Status: self._status,
            m.SessionOpen: self._puts.session_open,
            m.SessionJoin: self._puts.session_join,
            m.SessionEnd: self._puts.session_end,
            m.Offer: self._puts.offer,
            m.StoreChunks: self._puts.store_chunks,
            m.SourceOpen: self._puts.source_open,
            m.SourceClose: self._puts.source_close,
            m.StoreFromSource: self._puts.store_from_source,
            **SlabRequests(store).handlers,
            m.Commit: self._puts.commit,
            m.PutObjects: self._puts.put_objects,
            m.StatNames: names.stat_names,
            m.DeleteNames: names.delete_names,
            m.Rename: names.rename,
            m.Copy: names.copy,
            m.MakeFolder: names.make_folder,
            m.RemoveFolder: names.remove_folder,
            m.MakeSymlink: names.make_symlink,
            m.SetAttributes: names.set_attributes,
            m.ListNames: names.list_names,
            m.ListVersions: names.list_versions,
            m.BucketList: names.bucket_list,
            m.BucketCreate: names.bucket_create,
            m.BucketRemove: names.bucket_remove,
            m.BucketSet: names.bucket_set,
            m.UploadCreate: uploads.create,
            m.UploadPut: uploads.put,
            m.UploadList: uploads.list_,
            m.UploadParts: uploads.parts,
            m.UploadComplete: uploads.complete,
            m.UploadAbort: uploads.abort,
            m.UploadedParts: uploads.of_object,
            m.AccessKeyCreate: access_keys.create,
            m.AccessKeyList: access_keys.list_,
            m.AccessKeyRemove: access_keys.remove,
            **self._reading_handlers(),
            m.RunGc: self._run_gc,
            m.RunFsck: self._run_fsck,
            m.RunScrub: self._run_scrub,
            m.Sync: self._sync,
            **_about_memory(store, self._puts),
        }

    def _reading_handlers(self) -> dict[type[m.Request], Handler]:
        pins = PinRequests(self._store)
        return {
            m.OpenObjects: self._reads.open_objects,
            m.CloseLeases: self._reads.close_leases,
            m.Locate: self._reads.locate,
            m.OpenSegments: self._reads.open_segments,
            m.OpenHotIndex: HotIndexRequests(self._store).open,
            m.PinChunks: pins.pin,
            m.UnpinChunks: pins.unpin,
            m.ReadChunks: ChunkReads(self._store).read_chunks,
        }

    # --- EngineService -----------------------------------------------------------------------------

    def connected(self, peer: str, *, descriptors: bool, trusted: bool) -> ServedClient:
        """A connection has begun."""
        return self._store.holds.connect(peer, descriptors=descriptors, trusted=trusted)

    async def disconnected(self, client: ServedClient) -> None:
        """A connection has ended."""
        assert isinstance(client, Client)
        close_all(client.sources.values())  # they were checked
        client.sources.clear()
        self._store.lent.end_all(client)
        self._store.segments.pins.end_all(client.pins)
        self._store.holds.disconnect(client)

    async def receive(self, client: ServedClient, request: m.Request, body_bytes: int) -> Body:
        """Memory for the body of a request."""
        if isinstance(request, (m.StoreChunks, m.PutObjects)):
            if sum(request.lengths) != body_bytes:
                raise InvalidArgument(
                    f"lengths add up to {sum(request.lengths)}, the body has {body_bytes} bytes"
                )
            return await self._puts.receive(request)
        if body_bytes:
            raise InvalidArgument(f"{type(request).__name__} has no body, {body_bytes} bytes came with it")
        return ReceivedBody()

    async def serve(
        self, client: ServedClient, request: m.Request, body: Body, descriptors: Sequence[int]
    ) -> Reply:
        """Do the request."""
        assert isinstance(client, Client)
        handler = self._handlers.get(type(request))
        try:
            if handler is None:
                raise UnsupportedVersion(f"this engine does not offer {type(request).__name__}")
            if descriptors and not isinstance(request, m.SourceOpen | m.LendMemory):
                raise InvalidArgument(f"{type(request).__name__} takes no descriptors")
            return await handler(client, request, body, descriptors)
        except IndexDamaged as error:
            raise with_what_happens(self._store, error) from error
        finally:
            body.release()
            let_go(descriptors)

    def watch(self, client: ServedClient, request: m.Watch) -> Watch:
        """Events of a bucket.  BucketNotFound, EngineBusy."""
        with self._store.metadata.view() as view:
            find_bucket(view, request.bucket)
        return self._store.watchers.subscribe(request.bucket, client if request.others_only else None)

    # --- about the engine --------------------------------------------------------------------------

    async def _hello(self, client: Client, request: m.Hello, body: Body, descriptors: Sequence[int]) -> Reply:
        return Reply(self._store.hello(descriptors=client.descriptors))

    async def _ping(self, client: Client, request: m.Ping, body: Body, descriptors: Sequence[int]) -> Reply:
        return Reply(m.Done())

    async def _status(
        self, client: Client, request: m.Status, body: Body, descriptors: Sequence[int]
    ) -> Reply:
        return Reply(m.StatusReply(json.dumps(await self._store.status())))

    async def _sync(self, client: Client, request: m.Sync, body: Body, descriptors: Sequence[int]) -> Reply:
        await self._store.metadata.sync()
        return Reply(m.Done())

    async def _run_gc(
        self, client: Client, request: m.RunGc, body: Body, descriptors: Sequence[int]
    ) -> Reply:
        report = await self._store.collect(COMPACT_SHARE_MOST if request.compact else COMPACT_SHARE)
        return Reply(m.ReportReply(json.dumps(asdict(report))))

    async def _run_fsck(
        self, client: Client, request: m.RunFsck, body: Body, descriptors: Sequence[int]
    ) -> Reply:
        return Reply(m.ReportReply(json.dumps(await self._store.check(full=request.full))))

    async def _run_scrub(
        self, client: Client, request: m.RunScrub, body: Body, descriptors: Sequence[int]
    ) -> Reply:
        scrubber = self._store.scrubber
        if not 0 <= request.for_s <= SCRUB_STEP_S_MAX or request.rate_bytes_per_s < -1:
            raise InvalidArgument(
                f"a scrub goes on for 0 to {SCRUB_STEP_S_MAX:.0f} seconds, at a rate of -1 or more"
            )
        done = False
        if request.for_s:
            rate = None if request.rate_bytes_per_s < 0 else request.rate_bytes_per_s
            done = await scrubber.advance(request.for_s, rate_bytes_per_s=rate, restart=request.restart)
        report = {"done": done, **scrubber.status()}
        if request.damaged:
            report["damaged"] = await self._store.damaged()
        return Reply(m.ReportReply(json.dumps(report)))


def _about_memory(store: Store, puts: Puts) -> dict[type[m.Request], Handler]:
    """What clients ask about memory that they lend."""
    memory = MemoryRequests(store)
    slots = SlotRequests(store, puts)
    return {
        m.LendMemory: memory.lend,
        m.ReturnMemory: memory.give_back,
        m.StoreSlots: slots.store,
        m.PutSlots: slots.put,
        m.LoadSlots: Loads(store).load_slots,
    }
