"""Events of a history of names with replicas: drawn one after the other, and each also ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import trio
import trio.lowlevel

from engine.etcd import etcd_messages as e
from engine.etcd.etcd_link import COMPACT
from engine.format.group_parts import FIRST_SHARD, LogKeys
from tests.sim.cluster.etcd_nodes import HOSTS, EtcdFaults
from tests.sim.cluster.network import Way
from tests.sim.replicas.places import ReplicaPlace, Surroundings

Event = Callable[[], Awaitable[None]]
KEYS = LogKeys(FIRST_SHARD)


class Faults:
    """The events of one history.  `clients`: the hosts of clients."""

    def __init__(self, world: Surroundings, clients: Sequence[str], met: Counter[str]) -> None:
        self._world = world
        self._clients = clients
        self._met = met
        self._rng = world.new_random()
        self.kinds: Sequence[tuple[int, Event]] = [
            (6, self.crash),
            (6, self.stop),
            (5, self.cut_off_replica),
            (2, self.cut_off_client),
            (6, self.divide),
            (4, self.lose_disk),
            (3, self.slow_disk),
            (2, self.restart),
            (4, self.trouble_etcd),
            (2, self.compact),
            (2, self.fill_etcd),
        ]

    async def run(self, count: int) -> None:
        """Let that many events happen, and wait until each has ended."""
        kinds, weights = [kind for _, kind in self.kinds], [weight for weight, _ in self.kinds]
        async with trio.open_nursery() as events:
            for _ in range(count):
                await trio.sleep(self._rng.choice((0.1, 0.5, 2.0, 6.0)))
                events.start_soon(self._rng.choices(kinds, weights)[0])

    def _met_now(self, what: str, where: str = "") -> None:
        self._met[what] += 1
        self._world.log(f"-- {what} {where}")

    def _place(self) -> ReplicaPlace:
        """Return a place: often the one that leads."""
        leaders = [place for place in self._world.places if place.leads]
        return self._rng.choice(leaders if leaders and self._rng.random() < 0.5 else self._world.places)

    # --- replicas ----------------------------------------------------------------------------------------

    async def crash(self) -> None:
        """Kill a process, or let the power fail: of one, or of all."""
        power, at_operation = self._rng.random() < 0.5, self._rng.choice((0, 0, self._rng.randrange(1, 30)))
        places = self._world.places if self._rng.random() < 0.15 else [self._place()]
        for place in places:
            self._met_now("power lost" if power else "killed", place.machine)
            place.crash(power=power, at_operation=at_operation)
        await trio.lowlevel.checkpoint()

    async def stop(self) -> None:
        """Let a process stand still for a while; its lease may run out."""
        place = self._place()
        if place.is_running and not place.is_stopped:
            self._met_now("stopped", place.machine)
            place.stop()
            await trio.sleep(self._rng.choice((0.5, 3.0, 5.0, 9.0, 15.0)))
            self._world.log(f"-- goes on {place.machine}")
            place.resume()

    async def restart(self) -> None:
        """Restart a replica cleanly."""
        place = self._place()
        self._met_now("restarted", place.machine)
        await place.restart()

    async def slow_disk(self) -> None:
        """Let a replica have a slow disk, from its next process on; the next process may come soon."""
        place = self._place()
        self._met_now("slow", place.machine)
        place.offload._slowest_s = self._rng.choice((0.3, 1.5))
        await trio.sleep(self._rng.uniform(2.0, 15.0))
        place.offload._slowest_s = place.slowest_s

    async def lose_disk(self) -> None:
        """Lose a disk, if all others have had all groups since theirs are there."""
        place = self._place()
        others = [other for other in self._world.places if other is not place]
        if not others or not all(other.is_caught_up for other in others):
            return
        self._met_now("disk lost", place.machine + (", which leads" if place.leads else ""))
        await place.lose()

    # --- ways and etcd -----------------------------------------------------------------------------------

    async def cut_off_replica(self) -> None:
        """Cut a replica off from etcd, or from everybody."""
        place = self._place()
        hosts = HOSTS if self._rng.random() < 0.6 else self._others(place.machine)
        await self._cut_off(place.machine, hosts)

    async def cut_off_client(self) -> None:
        """Cut a client off from etcd, or from a replica."""
        hosts = HOSTS if self._rng.random() < 0.5 else [self._place().machine]
        await self._cut_off(self._rng.choice(self._clients), hosts)

    async def divide(self) -> None:
        """Part the leader from etcd, or let it stand still, while a client does not hear of another leader."""
        place, client = self._place(), self._rng.choice(self._clients)
        self._met_now("divided", f"{place.machine}, {client}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._silence, client, HOSTS, 20.0)
            if self._rng.random() < 0.5:
                nursery.start_soon(self._silence, place.machine, HOSTS, 12.0)
            elif place.is_running and not place.is_stopped:
                place.stop()
                await trio.sleep(self._rng.uniform(5.0, 9.0))
                place.resume()

    async def _silence(self, host: str, others: Sequence[str], seconds: float) -> None:
        for way in (Way.SILENT, Way.GOOD):
            for other in others:
                self._world.network.set_way(host, other, way)
                self._world.network.set_way(other, host, way)
            if way is Way.SILENT:
                await trio.sleep(seconds)

    def _others(self, host: str) -> list[str]:
        machines = [place.machine for place in self._world.places]
        everybody = [*HOSTS, *self._clients, *machines, *self._world.beside]
        return [other for other in everybody if other != host]

    async def _cut_off(self, host: str, others: Sequence[str]) -> None:
        network, way = self._world.network, self._rng.choice((Way.CUT, Way.SILENT, Way.LATE))
        self._met_now(f"way: {way.name}", f"{host} to {others}")
        directions = self._rng.choice(("both", "both", "there", "back"))
        for other in others:
            if directions != "back":
                network.set_way(host, other, way)
            if directions != "there":
                network.set_way(other, host, way)
        await trio.sleep(self._rng.choice((0.5, 4.0, 8.0, 15.0)))
        for other in others:
            network.set_way(host, other, Way.GOOD)
            network.set_way(other, host, Way.GOOD)
        self._world.log(f"-- good way from {host}")

    async def trouble_etcd(self) -> None:
        """Kill, stop or separate a node of etcd."""
        nodes, host = self._world.nodes, self._rng.choice(HOSTS)
        what = self._rng.choice(("killed", "stopped", "separated"))
        self._met_now(f"etcd {what}", host)
        if what == "separated":
            await self._cut_off(host, [other for other in HOSTS if other != host])
            return
        (nodes.kill if what == "killed" else nodes.stop)(host)
        await trio.sleep(self._rng.uniform(0.3, 8.0))
        nodes.start(host)
        nodes.resume(host)

    async def compact(self) -> None:
        """Let somebody compact etcd, up to now or a while ago."""
        state = self._world.nodes.state
        self._met_now("compacted")
        state.answer(COMPACT, e.CompactRequest(revision=max(1, state.revision - self._rng.choice((0, 3, 30)))))
        await trio.lowlevel.checkpoint()

    async def fill_etcd(self) -> None:
        """Let etcd be full for a while."""
        state = self._world.nodes.state
        self._met_now("etcd full")
        state.is_full, state.quota_bytes = True, 0
        await trio.sleep(self._rng.choice((0.5, 4.0, 12.0)))
        state.is_full, state.quota_bytes = False, None


async def watch_caught_up(world: Surroundings) -> None:
    """Note which replicas have had all groups since their disks are there, until cancelled."""
    while True:
        await trio.sleep(0.5)
        leader = next((place for place in world.places if place.leads), None)
        if leader is None or leader.metadata is None:
            continue
        end = leader.metadata.kept_sequence
        for place in world.places:
            if place.metadata is None or place.is_stopped or not place.is_wanted:
                continue
            if place.metadata.kept_sequence >= end:
                place.is_caught_up = True


def draw_faults(chance: float) -> EtcdFaults:
    """Return the faults of messages to and from etcd; `chance`: from 0, none, to 1."""
    return EtcdFaults(
        loses_requests=0.03 * chance,
        loses_answers=0.06 * chance,
        holds_requests=0.03 * chance,
        holds_answers=0.02 * chance,
        holds_watches=0.05 * chance,
        ends_watches=0.04 * chance,
    )
