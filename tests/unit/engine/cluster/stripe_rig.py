"""A lake of members in this process, on simulated disks, and a `Members` port that makes them fail; for tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum, auto
from functools import lru_cache
from typing import Final

import msgspec
import trio

from engine.coordinator.lake_state import LakeState
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep, UpkeepSettings
from engine.members.ports import Got, NewChunk, Wanted
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.store.keyed_store import KeyedStore
from engine.store.store import Store
from engine.stripes.stripes import LakeStripes
from lakefs.cluster import placing
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.members import Member
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.content.verify import granule_crcs
from lakefs.errors import EngineUnreachable, LakeError, StaleEpoch, StoreFull
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import Buffer, ChunkId, GcGeneration, MemberId, data_chunk_id
from lakefs.limits import GIB, MEMBER_ANSWER_S, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from tests.head_rig import begin_records
from tests.memory_coordinator import MemoryCoordinator
from tests.shards import listed
from tests.store_rig import client_of, in_flight, run, simulated_store

LAKE: Final = b"a lake of tests."
GENERATION: Final = GcGeneration(1)
_content: Final = random.Random(7).randbytes(5 * MIB)


def payload_of(length: int, seed: int = 0) -> bytes:
    """Return bytes of that length, the same for the same arguments."""
    return seed.to_bytes(4, "big")[:length] + _content[seed % 1000 :][: max(0, length - 4)]


def new(payload: Buffer) -> NewChunk:
    """Return a chunk to store."""
    return NewChunk(data_chunk_id(payload), memoryview(payload), granule_crcs(payload))


def id_of(number: int) -> MemberId:
    """Return the id of a member."""
    return MemberId(bytes((number + 1,)) * 16)


def table_of(protection: str, count: int, machines: int = 0) -> Table:
    """Return the first table of a lake of so many members, one on each machine, or on so many machines in turn."""
    members = tuple([Member(id_of(n), GIB, f"host{n % machines if machines else n}") for n in range(count)])
    return _table_of(protection, members, placing._partition_bits(members))


@lru_cache
def _table_of(protection: str, members: tuple[Member, ...], partition_bits: int) -> Table:
    """Make a table once; some tests let tables have fewer partitions, and theirs are not those of others."""
    table = first_table(Protection.parse(protection), members, accept_loss=True)
    assert table.partition_bits == partition_bits
    return table


class Fault(Enum):
    """Ways in which a member fails."""

    NONE = auto()
    AWAY = auto()
    LOST = auto()
    """Away, and nobody knows yet."""
    SILENT = auto()
    LATE = auto()
    ANSWER_LATE = auto()
    """Serves a request at once, and answers late."""
    FULL = auto()
    ANSWER_LOST = auto()
    """Stores, and its answer does not arrive."""
    LYING = auto()
    """Sends other bytes, with their right checksums."""
    SCRIBBLING = auto()
    """Answers after the caller has gone; the test writes to `abandoned` for it."""
    SHORT = auto()
    """Sends fewer bytes, with their right checksums."""
    MISSTATING = auto()
    """Says another length of each chunk (`RiggedMembers.misstated`), with the right bytes."""


class RiggedMembers:
    """`Members` over embedded engines.  `faults` says how a member fails."""

    def __init__(self, clients: dict[MemberId, EmbeddedEngine], tables: Sequence[Table]) -> None:
        self.clients = clients
        self.tables: Sequence[Table] = tables
        self.newer: Sequence[Table] = tables
        """The tables after the next StaleEpoch."""
        self.generation = GENERATION
        self.faults: dict[MemberId, Fault] = {}
        self.returning: dict[MemberId, float] = {}
        """The seconds after which a member returns that is waited for; others do not."""
        self.misstated = 1
        """Added to the length of each chunk by members that misstate it; 0: they say that it is 0."""
        self.calls: Counter[str] = Counter()
        self.bytes_read = 0
        self.abandoned: list[memoryview] = []
        self.pauses_s: list[float] = []
        """Times that the next requests take."""
        self.nursery: trio.Nursery | None = None
        """Where requests are begun; None: there are no connections yet, each has to be made by `call`."""
        self.asked: list[tuple[MemberId, list[bytes]]] = []
        """Begun requests: the member, and the chunks whose shards were asked for."""

    def is_up(self, member: MemberId) -> bool:
        return self.faults.get(member) is not Fault.AWAY and member in self.clients

    async def wait_return(self, member: MemberId) -> bool:
        if member in self.returning:
            await trio.sleep(self.returning.pop(member))
            del self.faults[member]
            return True
        return False

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        self.calls[type(request).__name__] += 1
        fault = self.faults.get(member, Fault.NONE)
        if not self.is_up(member) or fault is Fault.LOST:
            raise EngineUnreachable(f"member {member.hex()} is away")
        if fault is Fault.SILENT:
            await trio.sleep(MEMBER_ANSWER_S)
            self.faults[member] = Fault.AWAY
            raise EngineUnreachable(f"member {member.hex()} is silent")
        if fault is Fault.SCRIBBLING:
            self.abandoned += into
            await trio.sleep_forever()
        if self.pauses_s:
            await trio.sleep(self.pauses_s.pop(0))
        if fault is Fault.LATE:
            await trio.sleep(2.0)
        if fault is Fault.FULL and isinstance(request, m.StoreShards):
            raise StoreFull("no room")
        try:
            reply = await self.clients[member].call(request, body, into=into)
        except StaleEpoch:
            self.tables = self.newer
            raise
        if fault is Fault.ANSWER_LATE:
            await trio.sleep(2.0)
        if fault is Fault.ANSWER_LOST and isinstance(request, m.StoreShards | m.KeyedPut):
            reply.body.release()
            raise EngineUnreachable("the answer was lost")
        self.bytes_read += reply.body.nbytes
        if fault is Fault.MISSTATING and isinstance(reply.message, m.ReadChunksReply | m.ShardsOffered):
            said = [length and self.misstated and length + self.misstated for length in reply.message.chunk_lengths]
            reply.message = msgspec.structs.replace(reply.message, chunk_lengths=said)
        return _tampered(fault, request, reply)

    def begin(
        self,
        member: MemberId,
        request: m.Request,
        into: Sequence[memoryview],
        done: Callable[[Reply | LakeError], None],
    ) -> BegunCall | None:
        if self.nursery is None or not self.is_up(member):
            return None
        if isinstance(request, m.ReadChunks):
            self.asked.append((member, request.chunks))
        begun = BegunCall(self, member, done)
        self.nursery.start_soon(begun.run, request, into)
        return begun


class BegunCall:
    """A call in a task of its own: `Begun` for tests."""

    def __init__(self, members: RiggedMembers, member: MemberId, done: Callable[[Reply | LakeError], None]) -> None:
        self._members = members
        self._member = member
        self._done: Callable[[Reply | LakeError], None] | None = done
        self._scope = trio.CancelScope()

    async def run(self, request: m.Request, into: Sequence[memoryview]) -> None:
        with self._scope:
            try:
                self._end(await self._members.call(self._member, request, into=into))
            except LakeError as error:
                self._end(error)

    def give_up(self) -> None:
        self._done = None
        self._scope.cancel()

    def expire(self) -> None:
        self._members.faults[self._member] = Fault.AWAY
        self._end(EngineUnreachable(f"member {self._member.hex()} is silent"))
        self._scope.cancel()

    def _end(self, result: Reply | LakeError) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(result)
        elif isinstance(result, Reply):
            result.body.release()


def _tampered(fault: Fault, request: m.Request, reply: Reply) -> Reply:
    """Return the answer to a read as a lying member gives it: other bytes with their right CRCs, or fewer bytes."""
    message = reply.message
    if fault not in (Fault.LYING, Fault.SHORT) or not isinstance(message, m.ReadChunksReply | m.KeyedFound):
        return reply
    body = bytearray(reply.body.joined())
    reply.body.release()
    pieces, parts, at = [], [], 0
    for piece in message.pieces:
        part = body[at : at + piece.length]
        at += piece.length
        if part and fault is Fault.LYING:
            for place in range(0, len(part), 500):
                part[place] ^= 0x55
        elif part:
            part = part[:-1]
        pieces.append(msgspec.structs.replace(piece, length=len(part), crcs=granule_crcs(part)))
        parts.append(part)
    return Reply(msgspec.structs.replace(message, pieces=pieces), Body(parts))


class Rig:
    """A lake: members, its coordinator, and its stripes."""

    def __init__(self, members: RiggedMembers, stores: dict[MemberId, Store]) -> None:
        self.members = members
        self.stores = stores
        protection = members.tables[0].protection
        self.code = ErasureCode(protection.data, protection.parity)
        self.coordinator = MemoryCoordinator()
        self.state = LakeState(self.coordinator)
        self.parity = BufferPool(64 * MIB)
        self.stripes = LakeStripes(members, self.state, InlineOffload(), self.parity)

    @property
    def table(self) -> Table:
        return self.members.tables[0]

    def upkeep_of(self, names: KeyedStore, gate: BindGate) -> LakeUpkeep:
        """Make the lake's upkeep, for its names."""
        joined = JoinedGeneration(names.metadata, gate)
        stripes, settings = self.stripes, UpkeepSettings(name="six")
        return LakeUpkeep(self.coordinator, self.members, stripes, names, gate, joined, InlineOffload(), settings)

    def forget(self) -> None:
        """Let the head start again: it knows no chunk."""
        self.stripes = LakeStripes(self.members, self.state, InlineOffload(), self.parity)

    def lose(self, *members: int, fault: Fault = Fault.AWAY) -> None:
        """Let members fail from now on."""
        for number in members:
            self.members.faults[id_of(number)] = fault

    def heal(self) -> None:
        """End all failures."""
        self.members.faults.clear()

    async def store(self, *payloads: bytes) -> list[bool]:
        return await self.stripes.store(GENERATION, [new(payload) for payload in payloads])

    async def present(self, chunks: Sequence[ChunkId]) -> list[bool]:
        """Offer chunks; return for each if it is stored."""
        return [length > 0 for length in await self.stripes.offer(GENERATION, chunks)]

    async def read(self, chunk: ChunkId, chunk_bytes: int, offset: int = 0, length: int = 0) -> bytes:
        """Return what was wanted of a chunk; checks the answer's form.  Raises its error."""
        [got] = await self.stripes.read([Wanted(chunk, chunk_bytes, offset, length)])
        if isinstance(got, LakeError):
            raise got
        return bytes_of(got, offset, length)

    async def reads_back(self, payload: bytes) -> None:
        """Read a whole chunk with and without its length, and check the bytes."""
        chunk = data_chunk_id(payload)
        assert await self.read(chunk, len(payload)) == payload
        self.forget()
        assert await self.read(chunk, 0) == payload

    async def shards(self, payload: bytes) -> dict[int, list[int]]:
        """Return the numbers of the members that have each shard of a chunk."""
        found: dict[int, list[int]] = {}
        width = self.table.protection.width
        chunk = data_chunk_id(payload)
        for number in range(len(self.stores)):
            client = self.members.clients[id_of(number)]
            reply = await client.call(m.OfferShards(1 << 40, 1, [chunk] * width, [*range(width)]))
            assert isinstance(reply.message, m.ShardsOffered)
            for shard, length in enumerate(reply.message.lengths):
                if length:
                    found.setdefault(shard, []).append(number)
        return found

    def home(self, payload: bytes, shard: int) -> int:
        """Return the number of a shard's home."""
        return self.table.homes(data_chunk_id(payload))[shard][0] - 1

    async def chunk_count(self) -> int:
        """Return the number of chunks of which members have shards."""
        return len({shard.chunk for client in self.members.clients.values() for shard in await listed(client)})

    async def dirty(self) -> set[int]:
        """Return the dirty partitions."""
        return {note.partition for note in await self.state.dirty()}

    def check_given_back(self) -> None:
        """Check that no memory is held, and no extent in flight."""
        assert self.parity.in_use == 0, "parity memory was not given back"
        for store in self.stores.values():
            assert store.buffers.in_use == 0, "a member's memory was not given back"
            assert in_flight(store) == 0, "an extent was not settled"


def bytes_of(got: Got, offset: int, length: int) -> bytes:
    """Return the wanted bytes of an answer, whose checksums are checked."""
    assert got.offset % 65536 == 0
    assert got.offset <= offset
    assert granule_crcs(got.payload) == got.crcs
    begin = offset - got.offset
    return bytes(got.payload[begin : begin + length] if length else got.payload[begin:])


@asynccontextmanager
async def lake(protection: str = "4+2", count: int = 6, machines: int = 0) -> AsyncIterator[Rig]:
    """A lake of members, all up; at the end nothing is held."""
    table = table_of(protection, count, machines)
    async with AsyncExitStack() as stack:
        stores = {
            id_of(number): await stack.enter_async_context(simulated_store(cluster_id=LAKE)) for number in range(count)
        }
        clients = {member: client_of(store) for member, store in stores.items()}
        for client in clients.values():
            (await client.call(m.SetEpoch(table.ring_epoch, pack(table), GENERATION))).body.release()
        rig = Rig(RiggedMembers(clients, [table]), stores)
        await begin_records(rig.state, table)
        async with trio.open_nursery() as nursery:
            rig.members.nursery = nursery
            yield rig
            nursery.cancel_scope.cancel()
        rig.check_given_back()
        for client in clients.values():
            await client.aclose()


def in_lake(body: Callable[[Rig], Awaitable[None]], protection: str = "4+2", count: int = 6, machines: int = 0) -> None:
    """Run a test with a lake, in simulated time."""

    async def main() -> None:
        async with lake(protection, count, machines) as rig:
            await body(rig)

    run(main)
