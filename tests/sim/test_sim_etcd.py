"""A coordinator on a simulated etcd under faults: what clients find is one history, and each step is done once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import trio

from engine.coordinator.coordinator import (
    Changes,
    Compare,
    Coordinator,
    Delete,
    HasValue,
    IsAbsent,
    Operation,
    Outcome,
    Put,
    Transacted,
)
from engine.etcd.etcd_coordinator import EtcdCoordinator
from engine.etcd.etcd_session import EtcdSessions, Slot, _Session
from engine.etcd.etcd_transaction import EtcdTransaction
from engine.etcd.etcd_watch import _Follower
from lakefs.errors import EngineUnreachable
from lakefs.ids import Revision
from tests.contract.coordinators import as_values, next_changes
from tests.linear import NOTHING, Found
from tests.sim.cluster.etcd_nodes import HOSTS, EtcdFaults
from tests.sim.cluster.network import Way
from tests.sim.etcd_world import World, noticed, play
from tests.sim.world.sim_time import pause

KEYS: Final = b"a", b"b"
CLIENTS: Final = "one", "two", "three"
STEPS: Final = 40


async def _read(world: World, coordinator: Coordinator, key: bytes, host: str) -> None:
    begun = world.registers.begin()
    try:
        found = (await coordinator.get(key)).entry
    except EngineUnreachable:
        world.figures["unreachable"] += 1
        return
    world.registers.done(key.decode(), begun, None if found is None else found.value, who=host)


async def _write(world: World, coordinator: Coordinator, key: bytes, host: str) -> None:
    """Write a new value or remove the key, perhaps on a condition; give up soon, perhaps."""
    world.values += 1
    rng, name, begun = world.rng, key.decode(), world.registers.begin()
    value = rng.choice((None, *[b"%d" % world.values] * 3))
    older = b"%d" % rng.randrange(max(1, world.values - 4), world.values + 1)
    conditions: tuple[list[Compare], ...] = [], [IsAbsent(key)], [HasValue(key, older)]
    compares = rng.choice(conditions)
    required: Found = NOTHING if not compares else older if isinstance(compares[0], HasValue) else None
    done = None
    with trio.move_on_after(rng.choice((100.0, rng.uniform(0.0, 2.0)))), suppress(EngineUnreachable):
        done = await coordinator.transact(compares, [Delete(key) if value is None else Put(key, value)])
    world.figures["lost" if done is None else done.outcome.name] += 1
    if done is None:
        world.registers.lost(name, begun, required, writes=value, who=host)
    elif done.outcome is Outcome.DONE:
        world.registers.done(name, begun, required, writes=value, who=host)
    else:
        [seen] = done.seen
        world.registers.done(name, begun, None if seen is None else seen.value, who=host)


async def _client(world: World, host: str) -> None:
    async with world.process(host) as coordinator:
        for _ in range(STEPS):
            await world.rng.choice((_read, _write))(world, coordinator, world.rng.choice(KEYS), host)
            await pause(world.rng.uniform(0.0, 0.6))


async def _watcher(world: World, seen: dict[Revision, dict[bytes, bytes | None]]) -> None:
    async with world.process("beside") as coordinator, coordinator.watch(b"\0", b"z", Revision(1)) as watch:
        while True:
            try:
                event = await next_changes(watch)
            except EngineUnreachable:
                continue
            assert not seen or event.revision > max(seen), "in order, and once"
            seen[event.revision] = as_values(event)


async def _trouble(world: World) -> None:
    """Let things happen to nodes and ways, one after the other."""
    network, nodes, rng = world.network, world.nodes, world.rng
    while True:
        await pause(rng.uniform(0.5, 3.0))
        host, client = rng.choice(HOSTS), rng.choice(CLIENTS)
        way = rng.choice((Way.CUT, Way.SILENT, Way.LATE))
        match rng.choice(("kill", "stop", "separate", "one way", "client")):
            case "kill":
                nodes.kill(host)
            case "stop":
                nodes.stop(host)
            case "separate":
                world.separate(host, way=way)
            case "one way":
                network.set_way(*rng.choice(((host, client), (client, host))), way)
            case _:
                world.separate(client, way=way)
        await pause(rng.uniform(0.2, 8.0))
        world.heal()


FAULTS: Final = EtcdFaults(
    loses_requests=0.03,
    loses_answers=0.06,
    holds_requests=0.04,
    holds_answers=0.02,
    holds_watches=0.05,
    ends_watches=0.05,
)


async def history(world: World) -> None:
    """Let clients work while things happen; then what they found is one history, and a watch has seen it."""
    seen: dict[Revision, dict[bytes, bytes | None]] = {}
    async with trio.open_nursery() as watching:
        world.nodes.faults = FAULTS
        watching.start_soon(_watcher, world, seen)
        async with trio.open_nursery() as trouble:
            trouble.start_soon(_trouble, world)
            async with trio.open_nursery() as nursery:
                for host in CLIENTS:
                    nursery.start_soon(_client, world, host)
            trouble.cancel_scope.cancel()
        world.nodes.faults = EtcdFaults()
        world.heal()
        await pause(30.0)  # what is under way arrives
        watching.cancel_scope.cancel()
    world.registers.check()
    etcd = world.nodes.state
    changed = [
        etcd.changes_of(revision, b"/lake/lake/keys/", b"/lake/lake/keyt") for revision in range(1, etcd.revision + 1)
    ]
    made = {
        changes[0].revision: {change.key.removeprefix(b"/lake/lake/keys/"): change.value for change in changes}
        for changes in changed
        if changes
    }
    assert made == seen, "a watch has seen each change"
    world.figures["elections"] = etcd.term - 2


def test_what_clients_find_of_keys_is_linearizable_and_a_watch_sees_it_whatever_happens() -> None:
    figures: Counter[str] = Counter()
    for seed in range(30):
        figures += play(history, seed).figures
    for figure in ("DONE", "CONFLICT", "lost", "elections"):
        assert figures[figure] > 10, f"too little was tried: {figures}"


def test_a_world_is_the_same_each_time() -> None:
    def operations(seed: int) -> str:
        return str(sorted(play(history, seed).registers.operations.items()))

    assert operations(3) == operations(3)
    assert operations(3) != operations(4)


async def _in_one_step(
    self: EtcdCoordinator,
    compares: Sequence[Compare],
    then_ops: Sequence[Operation],
    else_ops: Sequence[Operation] = (),
) -> Transacted:
    """Send a transaction without a marker, whoever asks."""
    return await self._transact_unmarked(EtcdTransaction(self._prefix, compares, then_ops, else_ops))


def _taken_again(_: EtcdSessions, session: _Session, slot: Slot) -> None:
    """Use the slot of a transaction again that has no clear end."""
    session.free.append(slot)


def _unfiltered(self: _Follower, events: Iterable[Any]) -> Iterator[Changes]:
    """Return all changes of a stream, also those from before its beginning."""
    self._next = Revision(0)
    return _CHANGES(self, events)


async def _hasty(self: _Follower, response: Any) -> bool:
    """Begin a stream behind what has changed until then."""
    if response.created:
        self._next = max(self._next, Revision(response.header.revision + 1))
    return await _TAKE(self, response)


_CHANGES: Final = _Follower._changes
_TAKE: Final = _Follower._take
PLANTED: Final[dict[str, tuple[tuple[type, str, object], str]]] = {
    "a transaction is repeated without a marker": ((EtcdCoordinator, "transact", _in_one_step), "is no register"),
    "the slot of a try that may yet be done is used again": (
        (EtcdSessions, "_give_back", _taken_again),
        "is no register",
    ),
    "a watch that begins again repeats what it has seen": ((_Follower, "_changes", _unfiltered), "in order, and once"),
    "a watch that begins again leaves out what it has missed": ((_Follower, "_take", _hasty), "seen each change"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_of_the_client_is_noticed(bug: str) -> None:
    target, words = PLANTED[bug]
    with mock.patch.object(*target):
        noticed([partial(play, history, seed) for seed in range(30)], words)
