"""The end of a history of names with replicas: all faults end, and everything has to be there, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from engine.coordinator.records import LogRecord, decode
from engine.head.names_link import ConnectNames
from lakefs.ids import Sequence
from tests.sim.cluster.etcd_nodes import EtcdFaults
from tests.sim.judges.history import SimFailure
from tests.sim.replicas.customers import Customer, Promises
from tests.sim.replicas.places import Contents, ReplicaPlace, Surroundings

QUIET_S: Final = 180.0
"""Within so long everything is well again: leases of 30 s have run out, and copies were made."""
_PREFIX: Final = b"/lake/lake/keys/"


class Quiet:
    """Ends one history.  `connect`: to whoever leads."""

    def __init__(self, world: Surroundings, promises: Promises, connect: ConnectNames) -> None:
        self._world = world
        self._promises = promises
        self._connect = connect
        self._reader = Customer("reader", "beside", world, promises)

    async def end(self) -> None:
        """Let all be well, and look at everything; SimFailure."""
        heal(self._world)
        await self._read_all()
        await wait_equal(self._world)
        await wait_trimmed(self._world)
        self._promises.registers.check()
        power = self._world.rng.random() < 0.7
        for place in self._world.places:
            place.crash(power=power)
        await self._read_all()
        await wait_equal(self._world, " behind a crash of all")
        self._promises.registers.check()

    async def _read_all(self) -> None:
        with trio.move_on_after(QUIET_S) as bound:
            while not await self._reader.read_all(self._connect):  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.5)
        if bound.cancelled_caught:
            raise SimFailure(f"names cannot be read in {QUIET_S:g} s")


def heal(world: Surroundings) -> None:
    """End all faults of replicas, of etcd, and of ways."""
    nodes = world.nodes
    world.network.heal()
    nodes.faults = EtcdFaults()
    nodes.state.is_full, nodes.state.quota_bytes = False, None
    for host in nodes.hosts:
        nodes.start(host)
        nodes.resume(host)
    for place in world.places:
        place.disk.crash_at = None
        place.resume()


async def wait_equal(world: Surroundings, when: str = "") -> None:
    """Wait until all replicas are there and have the same records; SimFailure."""

    def is_equal() -> bool:
        found: list[Contents | None] = [place.contents() for place in world.places]
        return found[0] is not None and all(each == found[0] for each in found)

    await _until(world, is_equal, f"replicas do not become equal{when}")


async def wait_trimmed(world: Surroundings) -> None:
    """Wait until nothing is left in the log, but for parts of trimmed groups that came late; SimFailure."""
    state, keys = world.nodes.state, world.keys

    def is_trimmed() -> bool:
        record = state.current(_PREFIX + keys.log)
        assert record is not None, "the log was begun"
        assert record.value is not None, "the log is not removed"
        begin = _PREFIX + keys.group(Sequence(decode(LogRecord, record.value).trimmed + 1))
        return not any(state.current(key) for key in state._keys if begin <= key < _PREFIX + keys.groups[1])

    await _until(world, is_trimmed, "the log is not trimmed")


async def _until(world: Surroundings, condition: Callable[[], bool], what: str) -> None:
    with trio.move_on_after(QUIET_S) as bound:
        while not condition():  # noqa: ASYNC110 - on a clock that jumps
            await trio.sleep(1.0)
    if bound.cancelled_caught:
        raise SimFailure(f"{what}, in {QUIET_S:g} s: {[_state(place) for place in world.places]}")


def _state(place: ReplicaPlace) -> str:
    metadata = place.metadata
    if metadata is None:
        return f"{place.machine} is away"
    return f"{place.machine} has group {metadata.durable_sequence}, {metadata.kept_sequence} on its disk"
