"""The places of replicas of names: a host with one disk, a clock of its own, and a process that runs the product."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from engine.coordinator.names_leader import NamesLeader, open_names_leader
from engine.coordinator.records import LeaderRecord
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.format.layouts import Table
from engine.format.sizes import StoreSizes
from engine.head.leader_link import names_led_by
from engine.head.names_link import ConnectNames, NamesConnection
from engine.lake.names_replica import NamesReplica, Term
from engine.lake.replica_host import Drain
from engine.metadata.metadata_store import Metadata
from engine.mirror.copy_calls import InTurn
from engine.process.mirrored_names import LocalNames, NamesHost, open_names_in
from engine.requests.dispatch import Group
from engine.requests.table import NamesService
from engine.store.metadata_life import Leading
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import SUPERBLOCK_PATH, Superblock
from engine.tables.merged_tables import TableView
from lakefs.errors import EngineUnreachable
from lakefs.ids import NamesShard, ReplicaId
from lakefs.limits import MIB, NAMES_SILENCE_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineService
from lakefs.wire.frames import PROTOCOL_VERSION
from tests.sim.cluster.clients import SimClient, client_of
from tests.sim.cluster.etcd_nodes import EtcdNodes
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.network import Network
from tests.sim.cluster.process import SimProcess
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.sim.world.offload import SimOffload
from tests.sim.world.stopped_tasks import StoppedTasks, task_of

LAKE = b"a simulated lake"
DISK_BYTES = 64 * MIB
_END = b"\xff" * 64

Contents = dict[tuple[Table, bytes], bytes]


class DriftingClock(SimClock):
    """A clock of a machine that is a little too fast or too slow.  `stood_s`: its process was stopped so long."""

    stands_with_process = False
    """Weakened: it counts only while the process runs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.stood_s = 0.0

    def monotonic(self) -> float:
        """Return the seconds that this machine counts."""
        stood_s = self.stood_s if self.stands_with_process else 0.0
        return round((super().monotonic() - stood_s) * self.rate, 6)  # else ever shorter waits would end at no time


@dataclass
class Surroundings:
    """The surroundings of all places of one names shard."""

    rng: random.Random
    network: Network
    nodes: EtcdNodes
    stopped: StoppedTasks
    sizes: StoreSizes
    log: Callable[[str], None]
    places: list[ReplicaPlace] = field(default_factory=list)
    incarnation: bytes = b""
    """The coordinator's, when a lake was moved to it."""
    shard: NamesShard = FIRST_SHARD
    beside: list[str] = field(default_factory=list)
    """Machines of other names shards."""

    @property
    def keys(self) -> LogKeys:
        """The keys of the shard's log."""
        return LogKeys(self.shard)

    def new_random(self) -> random.Random:
        """Make a source of chance for a part, so that parts do not disturb each other."""
        return random.Random(self.rng.getrandbits(64))

    def connect_to(self, near: str, record: LeaderRecord) -> ConnectNames:
        """Return what connects a host to the replica that leads."""
        place = next(place for place in self.places if place.machine == record.machine)
        return partial(_connected, self.network, near, place)

    def names_from(self, near: str, leader: NamesLeader) -> ConnectNames:
        """Return what connects a host to whichever replica leads, as heads do."""
        return names_led_by(leader, partial(self.connect_to, near))


class _Process(SimProcess):
    """A process that is gone as soon as its disk is dead: what its tasks send then is sent by nobody."""

    def __init__(self, place: ReplicaPlace) -> None:
        super().__init__(place.machine, place.machine)
        self._disk = place.disk

    @property
    def is_gone(self) -> bool:
        return super().is_gone or self._disk.is_dead


@asynccontextmanager
async def running_replica(replica: NamesReplica) -> AsyncIterator[None]:
    """Run a replica during the block, and stop it cleanly at its end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replica.run)
        yield
        await replica.stop()


class ReplicaPlace:
    """A machine that has a replica.  Processes run there, one after the other; `ReplicaHost` for each of them."""

    def __init__(self, world: Surroundings, number: int) -> None:
        self.world = world
        self.shard = world.shard
        self.machine = f"r{number}"
        self.disk = self._new_disk()
        self.clock = DriftingClock(world.rng.choice((1.0, 0.999, 1.001)))
        self.slowest_s = 0.001
        self.offload = self._new_offload()
        self.process: SimProcess | None = None
        self.term: SimProcess | None = None
        """Serves names, while this replica leads."""
        self.service: EngineService | None = None
        self.metadata: Metadata | None = None
        """The present process's, from their opening on."""
        self.is_wanted = True
        self.is_caught_up = False
        """It has had all groups of the log since its disk is here; set by `Faults`."""
        self._power_fails = True
        self._stopped_at = 0.0
        self._rng = world.new_random()

    def _new_disk(self) -> SimDisk:
        return SimDisk(self.world.new_random(), capacity_bytes=DISK_BYTES)

    def _new_offload(self) -> SimOffload:
        return SimOffload(self.world.new_random(), slowest_s=self.slowest_s)

    # --- processes ---------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Run processes, one after the other, as long as the world lasts."""
        while True:
            while not self.is_wanted:  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.2)
            self.disk.crash_at = None
            self.offload = self._new_offload()
            process = self.process = _Process(self)
            self.world.log(f"{self.machine} starts")
            await process.run(partial(self._live, process))
            self.world.log(f"{self.machine} has ended" + (f": {process.error!r}" if process.error else ""))
            self.metadata = None
            if self.disk.is_dead or process.error is not None:
                self.disk = self.disk.crash() if self._power_fails else self.disk.kill()
            await trio.sleep(self._rng.choice((0.1, 0.5, 3.0)))

    async def _live(self, process: SimProcess) -> None:
        async with (
            far_etcd(self.world.nodes, self.machine, process=process) as coordinator,
            open_names_leader(coordinator) as leader,
        ):
            replica = NamesReplica(self, LAKE, coordinator, leader, self._open_term)
            async with running_replica(replica):
                await process.serve_until_stopped()

    def _open_term(self, names: LocalNames, checkpoints: Group) -> Term:
        return Term(NamesService(names.store, checkpoints=checkpoints), trio.sleep_forever)

    # --- what may happen ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True while a process runs."""
        return self.process is not None and not self.process.ended.is_set()

    @property
    def leads(self) -> bool:
        """True if it serves."""
        return self.term is not None

    def crash(self, *, power: bool, at_operation: int = 0) -> None:
        """Let the process, or the power of its host, fail: now, or at one of the next operations of its disk."""
        if not self.is_running or self.disk.is_dead:
            return
        assert self.process is not None
        self._power_fails = power
        for process in (self.process, self.term):
            if process is not None:
                process.dies_silently = power
        if at_operation:
            self.disk.crash_at = self.disk.operation_count + at_operation
            return
        self.disk._dead = True
        self.process.kill()
        self.resume()

    async def lose(self) -> None:
        """Lose the machine's disk with all that is on it; another process begins with an empty one."""
        self.is_wanted = self.is_caught_up = False
        self.crash(power=True)
        if self.process is not None:
            await self.process.ended.wait()
        await trio.sleep(0.05)
        self.disk = self._new_disk()
        self.is_wanted, self.is_caught_up = True, False

    async def restart(self) -> None:
        """Stop the process cleanly; another begins."""
        if self.is_running and not self.is_stopped:
            assert self.process is not None
            self.process.stop()
            with trio.move_on_after(60.0):
                await self.process.ended.wait()

    def stop(self) -> None:
        """Let the process stand still (SIGSTOP), or its machine be suspended."""
        if self.is_running and self.process is not None and self.process._nursery is not None:
            self._stopped_at = trio.current_time()
            self.world.stopped.stop(task_of(self.process._nursery))

    def resume(self) -> None:
        """Let it go on."""
        if self.process is not None and self.process._nursery is not None:
            if self.is_stopped:
                self.clock.stood_s += trio.current_time() - self._stopped_at
            self.world.stopped.resume(task_of(self.process._nursery))

    @property
    def is_stopped(self) -> bool:
        """True while it stands still."""
        nursery = None if self.process is None else self.process._nursery
        return nursery is not None and self.world.stopped.is_stopped(task_of(nursery))

    def contents(self) -> Contents | None:
        """Return all records that the replica has, whether it leads or not; None while it is away."""
        if self.metadata is None or self.metadata.failed is not None:
            return None
        with TableView(self.metadata._tables) as view:
            return {(table, key): value for table in Table for key, value in view.scan(table, b"", _END)}

    # --- the host of a replica ---------------------------------------------------------------------------

    def has_names(self) -> bool:
        """See `ReplicaHost`."""
        return self.disk.exists(SUPERBLOCK_PATH)

    def set_aside(self) -> None:
        """See `ReplicaHost`."""
        self.disk = self._new_disk()

    @asynccontextmanager
    async def open_names(
        self, leading: Leading, begin_anew: BeginAnew | None, *, is_new: bool
    ) -> AsyncIterator[LocalNames]:
        """See `ReplicaHost`."""
        host = NamesHost(
            self.clock,
            self.offload,
            self.offload,
            InTurn(),
            index_committed=self._note_index,
            copy_bytes_per_s=float("inf"),
        )
        try:
            async with open_names_in(
                [_Folder(self)],
                host,
                lake_id=LAKE,
                protection_losses=0,
                is_new=is_new,
                verify_index=False,
                shard=self.shard,
                sizes=self.world.sizes,
                leading=partial(self._noted, leading),
                begin_anew=begin_anew,
            ) as names:
                yield names
        finally:
            self.metadata = None

    @asynccontextmanager
    async def _noted(self, leading: Leading, metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        self.metadata = metadata
        async with leading(metadata, superblock):
            yield

    def leader_record(self, superblock: Superblock) -> LeaderRecord:
        """See `ReplicaHost`."""
        return LeaderRecord(ReplicaId(superblock.store_id), self.machine, (self.machine,))

    def connect_to(self, record: LeaderRecord) -> ConnectNames:
        """See `ReplicaHost`."""
        return self.world.connect_to(self.machine, record)

    @asynccontextmanager
    async def serving(self, service: EngineService) -> AsyncIterator[Drain]:
        """See `ReplicaHost`."""
        term = SimProcess(f"{self.machine} leads", self.machine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(term.serve_until_stopped)
            self.term, self.service = term, service
            self.world.log(f"{self.machine} leads")

            async def drain() -> None:
                term.stop()
                await trio.sleep(0.01)

            try:
                yield drain
            finally:
                self.world.log(f"{self.machine} leads no more")
                self.term = self.service = None
                term._end()
                nursery.cancel_scope.cancel()

    def _note_index(self) -> None:
        if os.path.exists(self.disk.local_path("index/data.mdb")):
            self.disk.note_index_sync()


class _Folder:
    """The folder of the names (`engine.mirror.copy_folders.CopyFolder`)."""

    name = "names"

    def __init__(self, place: ReplicaPlace) -> None:
        self._place = place

    def device(self) -> int | None:
        """See `CopyFolder`."""
        return 1

    def disk(self) -> SimDisk:
        """See `CopyFolder`."""
        return self._place.disk

    def set_aside(self) -> None:
        """See `CopyFolder`."""
        self._place.disk = self._place._new_disk()


@asynccontextmanager
async def _connected(network: Network, near: str, place: ReplicaPlace) -> AsyncIterator[NamesConnection]:
    """Connect a host to the names that a place serves, as `names_at` does: given up when nothing answers."""
    async with client_of(network, near, place.term, place.service) as client, trio.open_nursery() as nursery:
        nursery.start_soon(_end_when_silent, client)
        hello = (await client.call(m.Hello(PROTOCOL_VERSION, "head"))).message
        assert isinstance(hello, m.HelloReply)
        yield NamesConnection(client, hello, client.wait_ended)
        nursery.cancel_scope.cancel()


async def _end_when_silent(client: SimClient) -> None:
    """Lose a connection on which a Ping is not answered for NAMES_SILENCE_S."""
    while True:
        await trio.sleep(1.0)
        with trio.move_on_after(NAMES_SILENCE_S) as silence:
            try:
                await client.connection.ask(trio.lowlevel.checkpoint)
            except EngineUnreachable:
                return
        if silence.cancelled_caught:
            client.connection.lose("nothing answers there")
