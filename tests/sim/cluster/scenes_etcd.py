"""Scenes of a lake over an etcd: two replicas of the names believe to lead it."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from engine.group_log.log_bounds import LEADER_LEASE_S
from lakefs.wire import messages as m
from tests.sim.cluster.customers import Customer
from tests.sim.cluster.etcd_machine import LakeReplica
from tests.sim.cluster.etcd_names import EtcdNames, ShardPlaces
from tests.sim.cluster.etcd_nodes import HOSTS
from tests.sim.cluster.network import Connection, Way
from tests.sim.cluster.places import NAMES_HOST
from tests.sim.cluster.points import PointOf
from tests.sim.cluster.stage import Stage
from tests.sim.replicas.quiet import wait_equal

NAMES = "o0", "o1", "o2"


async def two_replicas_lead(stage: Stage) -> None:
    """The leader of names and a head hear nothing of etcd: through that head nothing old is read, nothing is written.

    What the next leader changes goes through the other head.
    """
    names = stage.lake.names
    assert isinstance(names, EtcdNames)
    await both_lead(stage, names.places[0], NAMES)


async def both_lead(stage: Stage, places: ShardPlaces, names: Sequence[str]) -> None:
    """See `two_replicas_lead`; of the names shard of these places, where the names are."""
    cut_off, fresh = stage.rng.sample(stage.heads, 2)
    for name in names:
        await stage.put(name, stage.payload())
    await wait_equal(places.machines)
    leader = next(replica for replica in places.replicas if replica.leads)
    stage.lake.health.begin_elsewhere()
    async with stage.client(cut_off) as reader, stage.client(cut_off) as writer, trio.open_nursery() as nursery:
        await reader.read(names[0])
        nursery.start_soon(_read_again_and_again, reader, names)
        nursery.start_soon(_put_again_and_again, stage, writer, f"{names[0]}-old")
        _silence(stage, (leader.machine, cut_off.host), Way.SILENT)
        await stage.wait(lambda: _leads_beside(places, leader), "another replica leads")
        for name in names:
            await stage.put(name, stage.payload(), head=fresh)
        await stage.remove(names[-1], fresh)
        await trio.sleep(2 * LEADER_LEASE_S)
        nursery.cancel_scope.cancel()
    _silence(stage, (leader.machine, cut_off.host), Way.GOOD)
    await trio.sleep(2 * LEADER_LEASE_S)
    stage.lake.health.end_elsewhere()
    await stage.read_all()


async def a_former_leader_goes_on(stage: Stage) -> None:
    """The leader stands still at a message of gc or of the walk; another one leads; then the first goes on there."""
    names = stage.lake.names
    assert isinstance(names, EtcdNames)
    kind = stage.rng.choice((m.GcBegin, m.GcMark, m.GcSweep, m.GcSweep, m.DropShards))
    await former_goes_on(stage, names.places[0], kind, "")


async def former_goes_on(stage: Stage, places: ShardPlaces, kind: type[m.Request], prefix: str) -> None:
    """See `a_former_leader_goes_on`; it leads the names shard of these places.  `prefix`: of names, with the bucket."""
    contents = [stage.payload() for _ in range(4)]
    for number, content in enumerate(contents):
        await stage.put(f"{prefix}o{number}", content)
    await stage.remove(f"{prefix}o0")
    await stage.collect(stage.rng.choice((0, 2, 2)))
    await wait_equal(places.machines)
    leader = next(replica for replica in places.replicas if replica.leads)
    is_stopped = trio.Event()

    async def stop(_: Connection, __: m.Request) -> None:
        stage.lake.health.begin_elsewhere()
        leader.stop()
        is_stopped.set()
        await trio.lowlevel.checkpoint()

    head = stage.rng.choice(stage.heads)
    async with trio.open_nursery() as nursery:
        with stage.at(PointOf(kind, stop, near=NAMES_HOST)):
            if kind is m.DropShards:
                with stage.cut(stage.rng.choice(stage.homes(contents[1])), head):
                    await stage.put(f"{prefix}o1", contents[1][::-1], head=head)
                    await stage.put(f"{prefix}o4", contents[1], head=head)
            else:
                nursery.start_soon(stage.collect)
            await stage.wait(is_stopped.is_set, "the leader sends such a message")
        await stage.wait(lambda: _leads_beside(places, leader), "another replica leads")
        stage.lake.health.end_elsewhere()
        await stage.put(f"{prefix}back", contents[0])
        await stage.copy(f"{prefix}o2", f"{prefix}o5")
        await stage.remove(f"{prefix}o2")
        await stage.remove(f"{prefix}o3")
        await stage.collect(stage.rng.choice((0, 0, 1, 3)))
        if stage.rng.random() < 0.5:
            await stage.put(f"{prefix}late", contents[3])
        leader.resume()
        await trio.sleep(2 * LEADER_LEASE_S)
    await stage.read_all()


def _leads_beside(places: ShardPlaces, old: LakeReplica) -> bool:
    return any(replica.leads for replica in places.replicas if replica is not old)


def _silence(stage: Stage, hosts: tuple[str, ...], way: Way) -> None:
    for host in hosts:
        for node in HOSTS:
            stage.lake.world.network.set_way(host, node, way)
            stage.lake.world.network.set_way(node, host, way)


async def _read_again_and_again(reader: Customer, names: Sequence[str]) -> None:
    while True:
        for name in names:
            await reader.read(name)
            await trio.sleep(0.05)


async def _put_again_and_again(stage: Stage, writer: Customer, prefix: str) -> None:
    """Put names of its own, which are read back in the end if they were answered."""
    number = 0
    while True:
        number += 1
        await writer.put_object(f"{prefix}{number % 8}", stage.payload())
        await trio.sleep(0.4)
