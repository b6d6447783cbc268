"""Scenes of a lake whose names are in two shards: gc, epochs, copies, and buckets that come and go, over both."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import trio

from engine.coordinator.records import GENERATION_KEY
from engine.etcd.etcd_link import TXN, Method
from engine.format.group_parts import FIRST_SHARD
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from tests.sim.cluster.bucket_customers import BUCKETS, BucketCustomer
from tests.sim.cluster.clients import SimClient
from tests.sim.cluster.etcd_machine import LakeReplica
from tests.sim.cluster.etcd_names import EtcdNames
from tests.sim.cluster.lake import until
from tests.sim.cluster.network import Connection
from tests.sim.cluster.places import HeadPlace
from tests.sim.cluster.points import PointOf
from tests.sim.cluster.replica_faults import add_shard
from tests.sim.cluster.scenes_etcd import both_lead, former_goes_on
from tests.sim.cluster.stage import Stage
from tests.store_rig import ask

SECOND: Final = NamesShard(1)
OLD: Final = 2
"""Cycles behind which what was stored before is not protected by its generation any more."""
_TRIES: Final = 20
_PREFIX: Final = b"/lake/lake/keys/"


def names_of(stage: Stage) -> EtcdNames:
    """Return the names of the stage's lake."""
    assert isinstance(stage.lake.names, EtcdNames)
    return stage.lake.names


async def bucket_in(stage: Stage, shard: NamesShard) -> str:
    """Make a bucket in a names shard; return its name."""
    async with connected(stage.heads[0]) as client:
        for number in range(_TRIES):
            bucket = f"in{shard}-{number}"
            if names_of(stage).shard_of(bucket) is None:
                await ask(client, m.BucketCreate(bucket), m.Buckets)
                await trio.sleep(0.5)  # the head hears of it
                if names_of(stage).shard_of(bucket) == shard:
                    return bucket
    raise AssertionError(f"no bucket is made in names shard {shard}")


async def cycles_over_two_shards(stage: Stage) -> None:
    """Content that names of either shard refer to outlives cycles; all other is freed."""
    for shard in (FIRST_SHARD, SECOND):
        bucket = await bucket_in(stage, shard)
        for number in range(3):
            await stage.put(f"{bucket}/o{number}", stage.payload())
        await stage.put(f"{bucket}/long", stage.payload(), stage.payload())
        await stage.remove(f"{bucket}/o0")
    await stage.collect(OLD + 1)
    await stage.read_all()


async def a_put_to_another_shard_outlives_cycles(stage: Stage) -> None:
    """A put is so long that its chunks are freed before its commit, which is in the second shard."""
    bucket = await bucket_in(stage, SECOND)
    content = (stage.payload(),)  # without a manifest, which the commit would miss
    rest = partial(stage.collect, stage.rng.randint(2, 4))
    await stage.put_in_session(f"{bucket}/late", content, partial(trio.sleep, 0.0), rest)
    await stage.read_all()


async def a_shard_is_added_during_a_cycle(stage: Stage) -> None:
    """A shard is added just before a cycle's generation; there a name is bound to what was stored before the last."""
    names = names_of(stage)
    await stage.put("o", stage.payload())
    await stage.collect(OLD)
    is_met, released = trio.Event(), trio.Event()

    async def hold(_: str, method: Method, request: Any, is_answer: bool) -> None:
        if method is TXN and not is_answer and _puts(request, GENERATION_KEY):
            is_met.set()
            await released.wait()

    async with trio.open_nursery() as nursery:

        async def add() -> None:
            await stage.collect()
            names.machines.nodes.meet = hold
            nursery.start_soon(stage.collect)
            await is_met.wait()
            await add_shard(stage.lake, names)
            await trio.sleep(0.3)  # heads hear of it

        # The first shard has a bucket by now, so a new one is made in the second.
        await stage.put_in_session("new-bucket/late", (stage.payload(),), partial(trio.sleep, 0.0), add)
        names.machines.nodes.meet = None
        released.set()
    await stage.read_all()


async def epochs_over_two_shards(stage: Stage) -> None:
    """Members are added and drained; older epochs are retired."""
    bucket = await bucket_in(stage, SECOND)
    for number in range(4):
        await stage.put(f"{bucket}/o{number}", stage.payload())
    epoch = stage.tables[0].ring_epoch
    await stage.add()
    await stage.wait(lambda: stage.tables[0].ring_epoch > epoch and len(stage.tables) == 1, "the next epoch")
    await stage.read_all()


async def buckets_come_and_go(stage: Stage) -> None:
    """Buckets are made and removed through both heads, of which one hears of no change of the lake's records."""
    deaf, other = stage.rng.sample(stage.heads, 2)
    customers = [_bucket_customer(stage, f"b{number}") for number in range(3)]
    with stage.deaf(deaf):
        async with trio.open_nursery() as nursery:
            for customer, heads in zip(customers, ([deaf], [other], [other]), strict=True):
                nursery.start_soon(customer.work, heads, 60)


async def a_removal_is_lost(stage: Stage) -> None:
    """A bucket's removal is not durable when the leader is lost; others would make the bucket in another shard."""
    names = names_of(stage)
    head, other = stage.rng.sample(stage.heads, 2)
    customer, remover = (_bucket_customer(stage, name) for name in ("b0", "b1"))
    bucket = BUCKETS[0]
    async with connected(head) as client, connected(other) as elsewhere:
        await _fill_first_shard(stage, client)
        await customer.create(client, bucket)
        assert names.shard_of(bucket) == FIRST_SHARD, "it is made in the shard that has fewer"
        await _leave_first_shard_fuller(stage, client)
        leader = await led(stage, FIRST_SHARD)
        released = trio.Event()

        async def hold(near: str, method: Method, request: Any, is_answer: bool) -> None:
            if (
                near == leader.machine
                and method is TXN
                and not is_answer
                and _puts(request, names.machines.keys.groups[0])
            ):
                await released.wait()

        stage.lake.health.begin_elsewhere()
        async with trio.open_nursery() as nursery:
            names.machines.nodes.meet = hold
            nursery.start_soon(remover.remove, elsewhere, bucket)
            with trio.move_on_after(2.0):
                await until(lambda: names.shard_of(bucket) is None)
            with trio.move_on_after(2.0):
                await customer.create(client, bucket)
            leader.crash(power=True)
            await stage.wait(lambda: names.places[0].leader not in (None, leader), "another replica leads")
            names.machines.nodes.meet = None
            released.set()
        stage.lake.health.end_elsewhere()
    async with connected(head) as client:
        for step in (customer.look, customer.remove, customer.look):
            await step(client, bucket)


async def _fill_first_shard(stage: Stage, client: SimClient) -> None:
    """Make two buckets in each shard."""
    for number in range(4):
        await ask(client, m.BucketCreate(f"fill{number}"), m.Buckets)
        await trio.sleep(0.5)


async def _leave_first_shard_fuller(stage: Stage, client: SimClient) -> None:
    """Remove the buckets of the second shard."""
    for number in range(4):
        if names_of(stage).shard_of(f"fill{number}") == SECOND:
            await ask(client, m.BucketRemove(f"fill{number}"), m.Done)
    await trio.sleep(0.5)


async def a_copy_between_walks(stage: Stage) -> None:
    """A cycle has walked the first shard; then a name of the second is copied there, and removed."""
    first, second = await bucket_in(stage, FIRST_SHARD), await bucket_in(stage, SECOND)
    for number in range(3):
        await stage.put(f"{second}/o{number}", stage.payload())
    await stage.collect(OLD + 1)

    async def move(_: Connection, __: m.Request) -> None:
        await stage.copy(f"{second}/o0", f"{first}/copy")
        await stage.remove(f"{second}/o0")

    with stage.at(PointOf(m.BeginRoots, move)):
        await stage.collect()
    await stage.read_all()


async def a_copy_is_slow(stage: Stage) -> None:
    """A copy across shards has opened its source, which is removed then, and a cycle runs before chunks are offered."""
    first, second = await bucket_in(stage, FIRST_SHARD), await bucket_in(stage, SECOND)
    for number in range(3):
        await stage.put(f"{second}/o{number}", stage.payload())
    await stage.collect(OLD + 1)
    copier, other = stage.rng.sample(stage.heads, 2)

    async def remove(_: Connection, __: m.Request) -> None:
        await stage.remove(f"{second}/o0", other)
        await stage.collect()

    with stage.at(PointOf(m.OfferShards, remove, near=copier.host)):
        await stage.copy(f"{second}/o0", f"{first}/copy", copier)
    await stage.read_all()


async def two_replicas_of_another_shard_lead(stage: Stage) -> None:
    """The second shard is led as in `two_replicas_lead`."""
    bucket = await bucket_in(stage, SECOND)
    await both_lead(stage, names_of(stage).places[SECOND], [f"{bucket}/o{number}" for number in range(3)])


async def a_former_leader_of_a_shard_goes_on(stage: Stage) -> None:
    """With names in the second shard: its leader, or the first shard's, stands still at a message of a cycle.

    Another one leads then, and the first goes on there, as in `a_former_leader_goes_on`.
    """
    shard = stage.rng.choice((FIRST_SHARD, SECOND, SECOND))
    kind = stage.rng.choice((m.JoinGeneration, m.BeginRoots, m.NextRoots, m.NextRoots, m.GcMark, m.GcSweep))
    bucket = await bucket_in(stage, SECOND)
    await former_goes_on(stage, names_of(stage).places[shard], kind, f"{bucket}/")


# --- parts of scenes -------------------------------------------------------------------------------------


def _bucket_customer(stage: Stage, name: str) -> BucketCustomer:
    return BucketCustomer(name, random.Random(stage.rng.getrandbits(64)), stage.buckets, stage.lake.log)


@asynccontextmanager
async def connected(head: HeadPlace) -> AsyncIterator[SimClient]:
    """Connect a client to a head for the block."""
    async with head.connect() as client:
        await client.call(m.Hello(1, "stage"))
        yield client


async def led(stage: Stage, shard: NamesShard) -> LakeReplica:
    """Return the replica that leads a shard."""
    places = names_of(stage).places[shard]
    await until(lambda: places.leader is not None)
    leader = places.leader
    assert leader is not None
    return leader


def _puts(request: Any, key: bytes) -> bool:
    """Return True for a transaction that puts a key that begins so."""
    for operation in request.success:
        if _puts(operation.txn, key) or operation.put.key.startswith(_PREFIX + key):
            return True
    return False
