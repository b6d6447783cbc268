"""A head: the engine service of a lake on many members, without state on disk.

    names            asked over a connection for each client (`engine.head.names_link`), or one for each names shard
                     (`engine.head.client_names`)
    keys of spaces   put, found and read at their homes (`engine.head.key_homes`)
    chunks           hashed here, stored and read over the members (`engine.members.ports.Stripes`)

    DRAM tier        chunks that are read again, shared with clients on this machine (`engine.head.head_tier`)
    RDMA             the same tier, loads and puts, for clients on other machines (`engine.fabric`)
    key homes        keyed indexes of the members on this machine, for clients there (`engine.head.local_keys`)
    stamps           those of the names that lead, repeated here for clients on this machine (`engine.head.head_stamps`)

Clients use it as they use one engine.  Other memory that one engine shares with clients (segments of its own, pins, a
keyed index) does not exist here: these requests are refused, and Hello names no such feature.

Rules kept here:
- Names and the head see the same clients: each has a connection of its own to the names, and both end together.
- Memory for payload, answers and sessions is bounded as an engine's.
- Nothing is kept that another head, or this one started again, would need.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
import trio

from engine.chunks.manifests import HeldBlobs
from engine.chunks.payload import PayloadMemory
from engine.coordinator.names_shards import NamesShards
from engine.fabric.engine_fabric import EngineFabric
from engine.format.group_parts import FIRST_SHARD
from engine.head.client_names import ClientNames
from engine.head.head_binds import HeadBinds, ObjectBinds, SessionBinds
from engine.head.head_chunks import HeadChunks
from engine.head.head_clients import HeadClient, HeadSession
from engine.head.head_copies import HeadCopies
from engine.head.head_figures import OTHER_HEADS, figures_of_shards, gateways_with, leases_of, with_others
from engine.head.head_keyed import HeadKeyed, KeyMatches
from engine.head.head_keyed_commits import HeadKeyedCommits
from engine.head.head_keyed_puts import HeadKeyedPuts
from engine.head.head_loads import HeadKeyedLoads, HeadLoads
from engine.head.head_local import HeadLocal
from engine.head.head_manifests import HeadManifests
from engine.head.head_pins import HeadPins
from engine.head.head_reads import ChunkReads, HeadOpens
from engine.head.head_spaces import HeadSpaces
from engine.head.head_stamp_requests import HeadStampRequests, may_have_stamps
from engine.head.head_stamps import HeadStamps, open_head_stamps
from engine.head.head_tier import HeadMemory, HeadTier
from engine.head.head_watch import HeadWatch, ShardsWatch
from engine.head.home_reads import HomeReads
from engine.head.key_homes import KeyHomes
from engine.head.keyed_chunks import KeyedChunks
from engine.head.load_memory import LoadMemory
from engine.head.names_link import ConnectNames, NamesLink
from engine.head.session_renewal import SessionRenewal
from engine.host.tasks import plain_errors
from engine.members.ports import Members, Stripes
from engine.requests.about import check_note
from engine.requests.answer_memory import AnswerMemory
from engine.requests.dispatch import Group, Groups
from engine.requests.handlers import handles
from engine.requests.lent import LentRequests
from engine.requests.local_clients import TierRequests
from engine.requests.put import Puts
from engine.requests.sessions import SessionRequests
from engine.requests.slots import SlotPayloads
from engine.sessions.lendings import Lendings
from engine.sessions.references import Client, References
from lakefs.host.buffers import BufferPool
from lakefs.ids import NamesShard
from lakefs.ports import Clock, Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply, ServedClient, never, nothing

_OFFERED: Final = m.FEATURE_EACH | m.FEATURE_SOURCES | m.FEATURE_LENT_MEMORY | m.FEATURE_KEY_HOMES
"""Features of a head by itself, beside those of its DRAM tier."""
_OF_NAMES: Final = m.FEATURE_PLACES | m.FEATURE_WATCH_ALL | m.FEATURE_EXCHANGE
"""Features of the names that a head passes on."""
NOT_OFFERED: Final[tuple[type[m.Request], ...]] = (
    # memory of an engine: pins, the keyed index
    m.PinChunks,
    m.UnpinChunks,
    m.OpenKeyedIndex,
    # of members and names
    m.SetEpoch,
    m.SetSpaces,
    m.KeyedRead,
    m.StoreShards,
    m.OfferShards,
    m.ListShards,
    m.DropShards,
    m.GcBegin,
    m.GcMark,
    m.GcSweep,
    m.BindBlobs,
    m.BindPart,
    m.BindUpload,
    m.BindCopy,
    m.AcceptedAnswers,
    m.CoordinatorRange,
    m.CoordinatorTransact,
    m.CoordinatorWatch,
    m.CoordinatorLease,
    m.CoordinatorKeepAlive,
    m.CoordinatorRevoke,
    m.OpenCheckpoint,
    m.ReadCheckpoint,
    m.OpenTurns,
    m.FollowTurns,
    m.CloseTurns,
    m.JoinTurns,
    m.JoinGeneration,
    m.RefuseEpochs,
    m.BeginRoots,
    m.NextRoots,
    m.NameRoot,
    m.CheckNames,
    m.ReadNamedChunks,
)
"""Requests that a head refuses."""
PASSED_ON: Final[tuple[type[m.Request], ...]] = (
    m.Sync,
    m.ListNames,
    m.ListVersions,
    m.DeleteNames,
    m.Rename,
    m.Exchange,
    m.MakeFolder,
    m.RemoveFolder,
    m.MakeSymlink,
    m.SetAttributes,
    m.BucketCreate,
    m.BucketRemove,
    m.BucketSet,
    m.BucketList,
    m.AccessKeyCreate,
    m.AccessKeyList,
    m.AccessKeyRemove,
    m.UploadCreate,
    m.UploadList,
    m.UploadAbort,
    m.UploadedParts,
    m.RunGc,
    m.RunFsck,
    m.RunScrub,
    m.ChangeMember,
    m.SetLake,
    m.AddNamesShard,
)
"""Requests that names answer, as they are."""
REFUSAL: Final = "a head of a lake on many members does not offer"


ConnectShard = Callable[[NamesShard], ConnectNames]
"""Returns what connects to a names shard."""
AboutMachine = Callable[[], dict[str, Any]]
"""Returns what a machine has of the lake; JSON-able."""
NO_MEMORY: Final = HeadMemory()
"""That of a head without a DRAM tier."""


class HeadParts:
    """The parts of a head that its handlers share."""

    def __init__(
        self,
        stripes: Stripes,
        members: Members,
        offload: Offload,
        clock: Clock,
        buffers: BufferPool,
        about_machine: AboutMachine = dict,
        memory: HeadMemory = NO_MEMORY,
        machine: str = "",
        fabric: EngineFabric | None = None,
        stamps: HeadStamps | None = None,
    ) -> None:
        self.stamps = stamps
        self.stripes = KeyedChunks(stripes, members, offload)
        self.members = members
        self.homes = KeyHomes(members, clock, machine)
        self.about_machine = about_machine
        self.offload = offload
        self.clock = clock
        self.buffers = buffers
        self.payload_memory = PayloadMemory(buffers)
        self.load_memory = LoadMemory()
        self.references = References(clock, sessions=HeadSession, clients=HeadClient)
        self.lent = Lendings(offload)
        self.fabric = fabric or EngineFabric(None, "it is off")
        self.chunks = HeadChunks(self.stripes, members, offload)
        self.tier = HeadTier(self.stripes, self.chunks.lengths, offload, memory, self.fabric)
        self.manifests = HeadManifests(self.stripes)
        self.pins = HeadPins(self.references, members)
        self.answers = AnswerMemory()


class Head(Groups):
    """Implements `lakefs.wire.engine_port.EngineService` over names and members.  Made by `open_head`."""

    def __init__(
        self,
        parts: HeadParts,
        connect: ConnectNames,
        nursery: trio.Nursery,
        shards: NamesShards | None = None,
        connect_shard: ConnectShard | None = None,
    ) -> None:
        super().__init__(parts.references, _groups(parts), _served(), offers=REFUSAL)
        self.parts = parts
        self._connect = connect
        self._nursery = nursery
        self._shards = shards
        self._connect_shard = connect_shard

    def connected(
        self,
        peer: str,
        *,
        descriptors: bool,
        trusted: bool,
        uid: int | None = None,
        has_left: Callable[[], bool] = never,
        end: Callable[[], None] = nothing,
    ) -> ServedClient:
        """Begin a connection; that to the names begins with the client's first request to them."""
        client = super().connected(peer, descriptors=descriptors, trusted=trusted, uid=uid, has_left=has_left, end=end)
        assert isinstance(client, HeadClient)
        client.link = self._link(end, FIRST_SHARD)
        if self._shards is not None:
            join = partial(may_have_stamps, self.parts.stamps)
            client.shards = ClientNames(client.link, partial(self._link, end), self._shards, join)
        return client

    def _link(self, end: Callable[[], None], shard: NamesShard) -> NamesLink:
        """Return a link of a client, which `end` ends, to a names shard."""
        connect = self._connect
        if shard != FIRST_SHARD:
            assert self._connect_shard is not None, "where there are shards they can be connected to"
            connect = self._connect_shard(shard)
        link = NamesLink(self._nursery, connect, end, shard, tries_again=self._shards is not None)
        if self.parts.stamps is not None:
            link.learn = partial(self.parts.stamps.learn, shard=shard)
        return link

    def watch(self, client: ServedClient, request: m.Watch) -> HeadWatch | ShardsWatch:
        """Return a watch of the names' events, which begins later."""
        assert isinstance(client, HeadClient)
        if client.shards is None:
            return HeadWatch(client.first, request)
        return ShardsWatch(client.shards, request, self._nursery)


@asynccontextmanager
async def open_head(
    connect: ConnectNames,
    stripes: Stripes,
    members: Members,
    *,
    offload: Offload,
    clock: Clock,
    buffers: BufferPool,
    about_machine: AboutMachine = dict,
    memory: HeadMemory = NO_MEMORY,
    machine: str = "",
    fabric: EngineFabric | None = None,
    shards: NamesShards | None = None,
    connect_shard: ConnectShard | None = None,
) -> AsyncIterator[Head]:
    """Open a head; it ends with the block, and its connections to names with it.

    `about_machine` returns what this machine has of the lake: it is a part of the status.  `memory`: the head's DRAM
    tier, which the caller closes behind it.  `machine`: the id of this one, "" if it is not known.  `fabric`: the RDMA
    device, in which the tier is registered; the caller closes it last.  `shards`: those of the names, if there may be
    several; `connect_shard` returns what connects to another one than the first.
    """
    with plain_errors(), ExitStack() as stack:
        stamps = stack.enter_context(open_head_stamps())
        parts = HeadParts(stripes, members, offload, clock, buffers, about_machine, memory, machine, fabric, stamps)
        stack.callback(parts.homes.local.close)
        stack.callback(parts.load_memory.close)
        async with trio.open_nursery() as nursery:
            if stamps is not None:
                nursery.start_soon(stamps.run, connect)
                if shards is not None and connect_shard is not None:
                    nursery.start_soon(_follow_shards, nursery, stamps, shards, connect_shard)
            nursery.start_soon(SessionRenewal(parts.references, parts.chunks).run)
            if memory.tier is not None:
                nursery.start_soon(parts.tier.dram.run)
            if memory.shared_index is not None:
                nursery.start_soon(memory.shared_index.run)
            yield Head(parts, connect, nursery, shards, connect_shard)
            nursery.cancel_scope.cancel()


async def _follow_shards(
    nursery: trio.Nursery, stamps: HeadStamps, shards: NamesShards, connect_shard: ConnectShard
) -> None:
    """Follow the turns of each names shard behind the first, as soon as it is known."""
    followed = 1
    while True:
        count = await shards.wait_count(followed)
        for shard in map(NamesShard, range(followed, count)):
            nursery.start_soon(stamps.run, connect_shard(shard), shard)
        followed = count


class HeadAbout:
    """Handlers of requests about the head itself."""

    def __init__(self, parts: HeadParts) -> None:
        self._parts = parts
        self._greeting: m.HelloReply | None = None
        """The last one of the first names shard."""

    async def disconnected(self, client: Client) -> None:
        """End the client's connection to the names."""
        assert isinstance(client, HeadClient)
        await client.names.aclose()

    @handles(m.Hello)
    async def hello(self, client: HeadClient) -> Reply:
        if client.shards is None:
            names = (await client.first.connection()).hello
        else:
            names = self._greeting = await client.shards.greeting(self._greeting)
        features = (names.features & _OF_NAMES) | _OFFERED | self._parts.tier.features
        features |= m.FEATURE_FABRIC if self._parts.fabric.is_on else 0
        if self._parts.stamps is not None and names.features & m.FEATURE_TURNS:
            features |= m.FEATURE_STAMPS
        return Reply(msgspec.structs.replace(names, features=features, descriptors=client.descriptors))

    @handles(m.Ping)
    async def ping(self) -> Reply:
        return Reply(m.Done())

    @handles(m.NoteGateway)
    async def note_gateway(self, client: HeadClient, request: m.NoteGateway) -> Reply:
        check_note(request)
        client.gateway = request
        return Reply(m.Done())

    @handles(m.Status)
    async def status(self, client: HeadClient) -> Reply:
        names = await client.names.ask(m.Status(), m.StatusReply)
        found: dict[str, Any] = json.loads(names.status_json)
        shards = await figures_of_shards(client.shards)
        parts = self._parts
        machine = parts.about_machine()
        others = machine.pop(OTHER_HEADS, [])
        own = parts.references.statistics()
        counts = with_others(own, others)
        found |= {
            "clients": {**found["clients"], **counts, "leases": leases_of([found, *shards]) + counts["leases"]},
            "gateways": gateways_with(parts.references.gateways(), others),
            "buffers": {"in_use": parts.buffers.in_use, "capacity": parts.buffers.capacity},
            "lent_memory": parts.lent.statistics(),
            "head": {
                "ring_epoch": parts.members.tables[0].ring_epoch,
                "gc_generation": parts.members.generation,
                "members": len(parts.members.tables[0].members),
                "chunks_of_puts": parts.chunks.answers,
            },
            "dram": parts.tier.dram.statistics(),
            "rdma": parts.fabric.statistics(),
            "hot_index": {"state": "off"} if parts.tier.shared_index is None else parts.tier.shared_index.statistics(),
        } | machine
        if shards:
            found["names_shards"] = shards
        if others:
            counted = [(each["pid"], each["clients"]) for each in others]
            found["heads"] = [{"pid": pid, **clients} for pid, clients in sorted([(os.getpid(), own), *counted])]
        return Reply(m.StatusReply(json.dumps(found)))


async def _pass_on(client: Client, request: m.Request, body: Body, descriptors: object) -> Reply:
    """Return the names' answer to a request that the head does not look at."""
    assert isinstance(client, HeadClient)
    return Reply(await client.names.call(request))


def _groups(parts: HeadParts) -> list[Group]:
    """Return the handlers of a head, in groups; connections to names end last."""
    slots = SlotPayloads(parts)
    puts = Puts(parts, slots)
    lent = LentRequests(parts)
    lengths = parts.chunks.lengths
    blobs = HeldBlobs(parts.chunks, parts.manifests, parts.chunks.prepare)
    binds = HeadBinds(parts.references, parts.chunks, blobs)
    objects = ObjectBinds(binds, slots, parts.payload_memory, parts.offload)
    opens = HeadOpens(parts.tier, parts.manifests, lengths, parts.answers, parts.stamps)
    reads = ChunkReads(parts.tier, lengths, parts.answers)
    loads = HeadLoads(parts)
    about = HeadAbout(parts)
    return [
        *_keyed_groups(parts, binds, loads),
        Group(
            [puts, SessionRequests(parts.references), SessionBinds(binds), objects, HeadCopies(binds)],
            bodies={m.StoreChunks: puts.receive, m.PutObjects: objects.receive},
            ends=[puts.disconnected],
        ),
        Group([opens, reads, loads, TierRequests(parts.tier), lent], ends=[lent.disconnected]),
        Group([HeadStampRequests(parts.stamps)]),
        Group([about], ends=[about.disconnected], others=dict.fromkeys(PASSED_ON, _pass_on)),
    ]


def _keyed_groups(parts: HeadParts, binds: HeadBinds, loads: HeadLoads) -> list[Group]:
    """Return the handlers of a head for spaces and keys."""
    reads = HomeReads(parts.homes, parts.load_memory)
    matches = KeyMatches(parts.homes, parts.stripes.places, parts.chunks.lengths, reads)
    puts = HeadKeyedPuts(parts.homes, matches, parts.lent, parts.payload_memory, parts.offload)
    commits = HeadKeyedCommits(parts.homes, matches, parts.members, parts.stripes, binds)
    keyed = HeadKeyed(parts.homes, matches, parts.pins)
    return [
        Group([HeadSpaces(parts.homes), HeadKeyedLoads(matches, loads, parts.answers), keyed, parts.pins, commits]),
        Group([HeadLocal(parts.homes, parts.tier)]),
        Group([puts], bodies={m.KeyedPut: puts.receive}, ends=[parts.pins.disconnected]),
    ]


def _served() -> list[type[m.Request]]:
    """Return the requests that must have a handler."""
    return [request for request in m.REQUESTS.values() if request not in (m.Watch, *NOT_OFFERED)]
