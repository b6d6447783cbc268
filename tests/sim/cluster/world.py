"""One seed, one history of a lake: members, names, two heads and their clients, and what happens to them.

made     members are started, the lake's first table is made
busy     clients put, read, move and remove; members crash, are cut off, fill up, are lost, drained, added
quiet    all faults end, the lake heals, garbage is collected; everything has to be whole, at home, and nothing else
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import trio

from engine.lake_upkeep.lake_upkeep import UpkeepSettings
from engine.walker.membership import MembershipSettings
from engine.walker.walker_pass import PassSettings
from lakefs.cluster.protection import Protection
from lakefs.errors import LakeError
from tests.sim.cluster.bucket_customers import BucketCustomer, BucketRegisters
from tests.sim.cluster.customers import Customer, Pool
from tests.sim.cluster.customers_buckets import ManyBuckets, OneBucket
from tests.sim.cluster.etcd_names import EtcdNames, open_etcd_names
from tests.sim.cluster.faults import Faults
from tests.sim.cluster.health import Health
from tests.sim.cluster.keyed import KeyedCustomer
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.names_place import NamesPlace
from tests.sim.cluster.network import Network
from tests.sim.cluster.places import HeadPlace, MemberPlace, Names, Place, Surroundings
from tests.sim.cluster.promises import Promises
from tests.sim.cluster.quiet import Quiet
from tests.sim.cluster.replica_faults import add_shards
from tests.sim.judges.history import SimFailure
from tests.sim.workloads.lives import draw_sizes
from tests.sim.world.clock import SimClock
from tests.sim.world.determinism import run_seeded
from tests.sim.world.sim_time import SimTime
from tests.sim.world.standstill import _place, _tasks

BITS = 3
"""Rows of a table: 8, so that a few objects meet in each, and a walk through all takes no time."""
HEADS = 2
SHARDS = 1, 1, 2, 2, 3
"""Names shards of a lake over an etcd, of which some are added while clients work."""
CUSTOMERS = 3
LONGEST_S = 8000.0
"""Simulated seconds of a history, at most."""


@dataclass
class History:
    """The history of a seed.  `log`: its steps, for people."""

    seed: int
    log: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.seconds:.0f} simulated s, {dict(sorted(self.met.items()))}"


class LakeWorld:
    """The run of one seed."""

    def __init__(
        self, seed: int, operations: int = 30, events: int = 12, *, has_etcd: bool = False, shards: int | None = None
    ) -> None:
        """`has_etcd`: the coordinator is an etcd, and the names have replicas; else they are on one machine.

        `shards`: names shards in the end, in a lake with an etcd; None: one, two or three, as the seed says.
        """
        self.seed = seed
        self.has_etcd = has_etcd
        self.history = History(seed)
        self._operations = operations
        self._events = events
        self._rng = random.Random(seed)
        self._ids = random.Random(self._rng.getrandbits(64))
        self._protection, self._member_count = self._rng.choice(
            [
                (Protection(4, 2), 6),
                (Protection(4, 2), 7),
                (Protection(4, 2), 8),
                (Protection(2, 1), 4),
                (Protection(2, 1), 5),
                (Protection(1, 1), 3),
            ]
        )
        self._is_rough = self._rng.random() < 0.3
        self._look_every_s = self._rng.choice((2.0, 1000.0))
        self._piece_bytes = random.Random(seed).choice((2000, 1 << 20))
        self._asked_shards = shards
        chance = random.Random(f"names shards {seed}")
        self._shards = chance.choice(SHARDS) if shards is None else shards
        self._shards = self._shards if has_etcd else 1
        self._buckets = BucketRegisters()
        self._begun = chance.randint(1, self._shards)

    @property
    def name(self) -> str:
        """The arguments that run it again."""
        return f"{self.seed}{self._kind}"

    @property
    def _kind(self) -> str:
        return (" --etcd" if self.has_etcd else "") + (
            "" if self._asked_shards is None else f" --shards {self._asked_shards}"
        )

    def run(self) -> History:
        """Live the history; raise SimFailure when the lake broke a promise."""
        with self._determined():
            try:
                run_seeded(self._main, self._rng.getrandbits(32), clock=SimTime())
            except BaseExceptionGroup as group:
                causes = [cause for cause in _leaves(group) if not isinstance(cause, trio.Cancelled)]
                failures = [cause for cause in causes if isinstance(cause, SimFailure)]
                bugs = [cause for cause in causes if not isinstance(cause, LakeError)]
                raise (failures or bugs or causes)[0] from None
        return self.history

    def _log(self, text: str) -> None:
        self.history.log.append(f"{trio.current_time():9.3f}  {text}")

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Take ids of the product's own making from the seed, and make tables small."""
        urandom = SimpleNamespace(urandom=self._ids.randbytes)
        with ExitStack() as stack:
            for target, instead in (
                ("lakefs.ids.os", urandom),
                ("engine.mirror.copy_list.os", urandom),
                ("lakefs.cluster.placing.PARTITION_BITS", BITS),
                ("lakefs.cluster.table_format.PARTITION_BITS", BITS),
                ("engine.walker.walker_pass.PARTITION_BITS", BITS),
                ("engine.lake_upkeep.named_chunks._BUCKET_BITS", BITS),
                ("engine.lake_upkeep.named_chunks._NUMBER_SHIFT", 64 - BITS),
                ("engine.lake_upkeep.names_fsck_requests.NAMED_PAGE", 4),
                ("engine.head.session_renewal.LOOK_EVERY_S", self._look_every_s),
                ("engine.format.group_parts._PIECE_BYTES", self._piece_bytes),
                ("engine.lake_gc.names_requests.ROOTS_PAGE", 3),
            ):
                stack.enter_context(mock.patch(target, instead))
            yield

    def _settings(self) -> UpkeepSettings:
        rng = self._rng
        return UpkeepSettings(
            name="simulated",
            gc_interval_s=rng.choice((5.0, 15.0)),
            look_interval_s=rng.choice((2.0, 5.0)),
            gc_batch=rng.choice((2, 10)),
            walk_share=1.0,
            walks=PassSettings(full_pass_s=rng.choice((60.0, 1000.0)), retry_s=5.0, idle_s=2.0),
            membership=MembershipSettings(out_after_s=rng.choice((8.0, 25.0)), answer_s=3.0),
        )

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            async with self._lake(nursery) as lake:
                await self._live(lake)
                self.history.seconds = trio.current_time()
                nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        await trio.sleep(LONGEST_S)
        root = trio.lowlevel.current_root_task()
        assert root is not None
        waits = "\n".join(f"  {task.name}: {_place(task.coro)}" for task in _tasks(root))
        raise SimFailure(f"the history stands still; tasks wait here:\n{waits}")

    def _new_random(self) -> random.Random:
        """Make a source of chance for a part, so that parts do not disturb each other."""
        return random.Random(self._rng.getrandbits(64))

    @asynccontextmanager
    async def _lake(self, nursery: trio.Nursery) -> AsyncIterator[SimLake]:
        """Make the places of a lake, and let their processes run."""

        def keep(place: Place) -> None:
            nursery.start_soon(place.keep)

        network, sizes = Network(self._new_random(), nursery), draw_sizes(self._rng, huge=False)
        world = Surroundings(self._rng, network, SimClock(), self._protection, sizes, self._settings(), self._log)
        members = [MemberPlace(world, number) for number in range(self._member_count)]
        if self.has_etcd:
            async with open_etcd_names(world, members, self._shards, self._begun) as etcd_names:
                for member in members:
                    keep(member)
                await etcd_names.make(members)
                lake = self._with_heads(world, members, etcd_names, keep)
                for head in lake.heads:
                    keep(head)
                yield lake
            return
        names = NamesPlace(world, members)
        lake = self._with_heads(world, members, names, keep)
        for place in (*members, names, *lake.heads):
            keep(place)
        yield lake

    def _with_heads(
        self, world: Surroundings, members: list[MemberPlace], names: Names, keep: Callable[[Place], None]
    ) -> SimLake:
        heads = [HeadPlace(world, number, names, members) for number in range(HEADS)]
        health = Health(self._protection.parity)
        return SimLake(world, self._new_random(), members, names, heads, health, self._is_rough, keep)

    async def _live(self, lake: SimLake) -> None:
        await until(lambda: lake.is_all_up)
        self._log(f"{self._protection}, {self._member_count} members, {'rough' if self._is_rough else 'gentle'}")
        promises, pool = Promises(), Pool(self._new_random())
        await self._busy(lake, promises, pool)
        self._log("quiet")
        reader = Customer("reader", self._new_random(), promises, pool, lake.health, self._log, is_reader=True)
        await Quiet(lake, promises, self._buckets if self._shards > 1 else None).end(reader)

    async def _busy(self, lake: SimLake, promises: Promises, pool: Pool) -> None:
        """Let clients work, and things happen."""
        names = lake.names
        buckets = ManyBuckets(names) if isinstance(names, EtcdNames) and self._shards > 1 else OneBucket()
        customers = [
            Customer(f"c{number}", self._new_random(), promises, pool, lake.health, self._log, buckets=buckets)
            for number in range(CUSTOMERS)
        ]
        of_buckets = [
            BucketCustomer(f"b{number}", self._new_random(), self._buckets, self._log)
            for number in range(HEADS if self._shards > 1 else 0)
        ]
        keyed = KeyedCustomer(self._new_random(), lake.names, lake.health, self._log)
        async with trio.open_nursery() as busy:
            busy.start_soon(Faults(lake).run, self._events)
            busy.start_soon(keyed.work, lake.heads, self._operations)
            if isinstance(names, EtcdNames):
                busy.start_soon(add_shards, lake, names)
            for customer_of_buckets in of_buckets:
                busy.start_soon(customer_of_buckets.work, lake.heads, self._operations)
            for customer in customers:
                busy.start_soon(customer.work, lake.heads, self._operations)
        self.history.met.update(lake.met)
        if isinstance(names, EtcdNames):
            self.history.met.update({f"names: {what}": count for what, count in names.met.items()})
        self.history.met["operations"] = sum(customer.operations for customer in customers)
        self.history.met["failures"] = sum(customer.failures for customer in customers)
        self.history.met["operations on buckets"] = sum(customer.operations for customer in of_buckets)
        for customer in customers:
            self.history.met.update({f"{what} across": count for what, count in customer.across.items()})
        self.history.met["keyed operations"], self.history.met["keyed hits"] = keyed.operations, keyed.hits


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
