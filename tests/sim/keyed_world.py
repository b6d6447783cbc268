"""Keyed blobs in the simulator: customers with spaces and keys, several lives on one disk, and their promises.

Each customer has a space of its own, where it alone puts, finds, removes and loses everything; so it knows of each key
what it may be bound to: one value (or none), or a few after an answer that never came.  All customers share a space
with a quota and a TTL; there a key has one of the values that were put to it, or none, and usage stays in bounds.
What was answered survives every crash, and reading a value gives its bytes.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final
from unittest import mock

import trio

from engine.format.keyed import SPACES_BEGIN, SPACES_END, unpack_space
from engine.format.layouts import Table
from engine.keyed.spaces import charge, charge_of_space
from engine.process.shared_index_life import run_keyed_index, run_shared_index
from engine.store.opening import open_store
from engine.store.store import Store
from engine.tiers.keyed_index import KeyedIndex
from lakefs.errors import BugError, EngineBusy, LakeError, OperationalError, SpaceNotFound, UserError
from lakefs.limits import MIB
from lakefs.shared_index.keyed_index import KeyFinder
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.keyed_index_check import check_keyed_index
from tests.sim.judges.history import SimFailure
from tests.sim.judges.inspection import check_tidy, check_whole
from tests.sim.workloads.lives import draw_sizes
from tests.sim.world.clock import SimClock
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.sim.world.offload import SimOffload
from tests.sim.world.sim_time import SimTime
from tests.sim.world.world import causes_of
from tests.store_rig import ask, client_of, gc, read, session_of, store_chunks

LIVES: Final = 5
CUSTOMERS: Final = 3
QUOTA_BYTES: Final = 400_000
SHARED: Final = "shared"
PARTS_BYTES: Final = (1, 60, 700, 65_535, 65_536, 90_000)
TTL_S_MAX: Final = 1000
ROUND_TRIP_S: Final = 11.0
"""Within this time upkeep has begun and ended a round."""
MET: Final = ("crashes", "operations", "evicted", "expired", "purged", "freed", "tables")
Value = tuple[bytes, ...]
"""The parts of a value."""


class Customer:
    """One client, its space, and what it knows of its keys, over all lives."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self.numbers: set[int] = set()
        """Numbers that its space has had."""
        self.may_be: dict[bytes, set[Value | None]] = {}
        """For each key the values that it may have; an absent key has none."""
        self.becomes: dict[bytes, Value | None] = {}
        """Values of the keys that the request under way changes, when it is done."""
        self._count = 0

    def key(self) -> bytes:
        """Return one of a few keys."""
        return f"{self.name}/{self._rng.randrange(8)}".encode().ljust(self._rng.choice((12, 64)), b".")

    def value(self, key: bytes) -> Value:
        """Return a value of its own for the key; some parts are those of other keys."""
        self._count += 1
        parts: list[bytes] = []
        for _ in range(self._rng.randint(1, 3)):
            length = self._rng.choice(PARTS_BYTES)
            own = b"%s %d of %s " % (key, self._count, self.name.encode())
            text = b"everybody's" if self._rng.random() < 0.3 else own
            parts.append((text * (length // len(text) + 1))[:length])
        return tuple(parts)

    def known(self, key: bytes) -> set[Value | None]:
        """Return the values that a key may have."""
        return self.may_be.get(key, {None})

    @contextmanager
    def changing(self, becomes: dict[bytes, Value | None]) -> Iterator[None]:
        """Say what keys have when the block is done: an onlooker who sees that earlier has seen what is durable."""
        self.becomes = becomes
        try:
            yield
        finally:
            self.becomes = {}

    def expect(self, good: bool, what: str) -> None:
        if not good:
            raise SimFailure(f"{self.name}: {what}")


class KeyedWorld:
    """The run of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"keyed {seed}")
        self.has_index = seed % 2 == 1
        self._index: KeyedIndex | None = None
        """The table of this life, if it has one."""
        self.sizes = draw_sizes(self.rng, huge=False)
        self.disk = SimDisk(self._random(), capacity_bytes=256 * MIB)
        self._ids = self._random()
        self.customers = [Customer(f"c{number}", self._random()) for number in range(CUSTOMERS)]
        self.shared_values: dict[bytes, set[Value]] = {}
        self.clock = SimClock()
        self.met = dict.fromkeys(MET, 0)

    def _random(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def run(self) -> None:
        """Live all lives, then two quiet ones; raise SimFailure when a promise was broken."""
        for _ in range(LIVES):
            ending = self.rng.choice(("stop", "kill", "crash", "crash"))
            self.disk.crash_at = (
                None if ending == "stop" else self.rng.choice((50, 300, 1200)) + self.rng.randrange(300)
            )
            crashed = self._live(self._work)
            self.met["crashes"] += crashed
            if crashed or ending != "stop":
                self.disk = self.disk.kill() if ending == "kill" else self.disk.crash()
        self.disk.crash_at = None
        self._live(self._rest)
        self._live(self._tidy)

    def _live(self, main: Callable[[Store], Awaitable[None]]) -> bool:
        """Live one life; returns True if it ended by a crash."""
        self.disk.operation_count = 0
        wall_ns = self.clock.last_ns + self.rng.choice((0, 0, 10**9, 60 * 10**9))
        self.clock = SimClock(wall_ns)

        async def life() -> None:
            offload = SimOffload(self._random(), slowest_s=self.rng.choice((0.0005, 0.02)))
            async with open_store(
                self.disk, self.clock, offload, grace_s=0.0, sizes=self.sizes, index_committed=self.disk.note_index_sync
            ) as store:
                await check_whole(store)
                async with self._indexed(store):
                    await self._look_at_all(store)
                    await main(store)
                for what in ("evicted", "expired", "purged"):
                    self.met[what] += getattr(store.keyed.counts, what)

        try:
            with self._determined():
                run_seeded(life, self.rng.getrandbits(32), clock=SimTime())
        except SimCrashed:
            return True
        except (BaseExceptionGroup, OperationalError) as error:
            # What serves is closed around the requests when the disk is dead: they fail in every way.
            broken = [cause for cause in causes_of(error) if not isinstance(cause, (SimCrashed, OperationalError))]
            if broken or not self.disk.is_dead:
                raise (broken or [error])[0] from None
            return True
        return False

    @asynccontextmanager
    async def _indexed(self, store: Store) -> AsyncIterator[None]:
        """Run the tables that clients look keys up in, and check that of the keys at the end."""
        if not self.has_index:
            yield
            return
        async with trio.open_nursery() as nursery:
            await nursery.start(run_shared_index, store, "memory", 800)
            await nursery.start(run_keyed_index, store)
            self._index = store.keyed_index
            try:
                yield
                await ask(client_of(store), m.Sync(), m.Done)
                self.met["tables"] += check_keyed_index(store)
            finally:
                self._index = None
            nursery.cancel_scope.cancel()

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Take ids and times of the product's own making from the seed, and allow small quotas."""
        with (
            mock.patch("engine.superblock.superblock.new_id16", self._new_id16),
            mock.patch("engine.sessions.references.new_id16", self._new_id16),
            mock.patch("engine.keyed.spaces.KEYED_QUOTA_BYTES_MIN", 1),
            mock.patch("engine.process.shared_index_life.KEYED_INDEX_ENTRIES_MIN", 800),
        ):
            yield

    def _new_id16(self) -> bytes:
        return self._ids.randbytes(16)

    # --- lives -------------------------------------------------------------------------------------

    async def _work(self, store: Store) -> None:
        async with trio.open_nursery() as onlookers:
            onlookers.start_soon(self._look_on)
            async with trio.open_nursery() as nursery:
                for customer in self.customers:
                    nursery.start_soon(self._serve, store, customer, self.rng.randint(5, 30))
                nursery.start_soon(self._keep_up, store)
            onlookers.cancel_scope.cancel()

    async def _look_on(self) -> None:
        """Look keys up in the table while they are changed: what is seen there is durable."""
        while self._index is not None:
            for customer in self.customers:
                for key, value in customer.becomes.items():
                    flag = self._flag(max(customer.numbers), key)
                    is_new = flag is True if value is not None else flag is False
                    if is_new and customer.known(key) != {value}:
                        customer.may_be[key] = {value}
            await trio.sleep(0.0007 if any(customer.becomes for customer in self.customers) else 0.01)

    def _flag(self, number: int, key: bytes) -> bool | None:
        """Return what the table says of a key, None if that is nothing, or there is no table."""
        if self._index is None:
            return None
        (flag,) = KeyFinder(self._index.table).match(number, [key])
        return flag

    async def _keep_up(self, store: Store) -> None:
        for _ in range(self.rng.randint(0, 4)):
            await trio.sleep(self.rng.uniform(0.0, 3.0))
            await store.metadata.checkpoint()

    async def _tidy(self, store: Store) -> None:
        """Collect: then nothing is left that no value needs."""
        await store.collector.run()
        await check_tidy(store)

    async def _rest(self, store: Store) -> None:
        """Let upkeep end its work, until all values have expired that ever will; quotas and expiries are kept then."""
        await trio.sleep(TTL_S_MAX + ROUND_TRIP_S)
        with store.metadata.view() as view:
            spaces = [unpack_space(value) for _, value in view.scan(Table.KEYED, SPACES_BEGIN, SPACES_END)]
        if any(space.removed for space in spaces):
            raise SimFailure("a removed space is still there")
        for space in spaces:
            if space.name == SHARED and charge_of_space(space) > 0.99 * QUOTA_BYTES:
                raise SimFailure(f"the shared space has {space.value_bytes} bytes after upkeep")
        now_ns = self.clock.wall_ns()
        with store.metadata.view() as view:
            over = [key for key, _ in view.scan(Table.KEYED, b"\x04", b"\x04" + now_ns.to_bytes(8, "big"))]
        if over:
            raise SimFailure(f"{len(over)} values have expired, and are still there")

    async def _look_at_all(self, store: Store) -> None:
        """Compare every key with what its customer knows."""
        client = client_of(store)
        for customer in self.customers:
            try:
                space = await ask(client, m.SpaceOpen(customer.name, create=False), m.SpaceStat)
            except SpaceNotFound:
                for key in customer.may_be:
                    customer.expect(None in customer.known(key), f"{key!r} is gone with its space")
                continue
            for key in list(customer.may_be):
                await self._match(client, customer, space.number, key)

    # --- operations ----------------------------------------------------------------------------------

    async def _serve(self, store: Store, customer: Customer, count: int) -> None:
        client, rng = client_of(store), self._random()
        kinds = (
            [self._put] * 6
            + [self._look] * 5
            + [self._remove] * 3
            + [self._shared] * 8
            + [self._lease_beside_gc] * 2
            + [self._put_garbage_beside_gc] * 2
        )
        for _ in range(count):
            kind = rng.choice([*kinds, self._drop_space, self._collect, self._collect])
            try:
                await kind(client, customer, rng)
            except LakeError as error:
                if isinstance(error, (BugError, UserError)) or not self.disk.is_dead:
                    raise SimFailure(f"{kind.__name__}: {error!r}") from error
                raise
            self.met["operations"] += 1
            await trio.sleep(rng.choice((0.0, 0.01, 0.5, 4.0)))

    async def _own(self, client: EngineClient, customer: Customer) -> int:
        number = (await ask(client, m.SpaceOpen(customer.name), m.SpaceStat)).number
        customer.numbers.add(number)
        return number

    async def _put(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        number = await self._own(client, customer)
        wanted = {key: customer.value(key) for key in sorted({customer.key() for _ in range(rng.randint(1, 3))})}
        before = {key: customer.known(key) for key in wanted}
        resize = rng.random() < 0.4
        stays = {key: {had for had in before[key] if _stays(had, value, resize)} for key, value in wanted.items()}
        for key, value in wanted.items():
            if stays[key] != before[key]:
                customer.may_be[key] = before[key] | {value}
        # An onlooker cannot tell a replacing value from the one before: both are there.
        with customer.changing({key: value for key, value in wanted.items() if before[key] == {None}}):
            outcomes = await self._send(client, number, wanted, rng, resize=resize)
        for (key, value), outcome in zip(wanted.items(), outcomes, strict=True):
            if outcome == m.KEYED_STORED:
                customer.expect(stays[key] != before[key], f"{key!r} was put, and had {before[key]}")
                customer.may_be[key] = {value}
            else:
                customer.expect(outcome == m.KEYED_PRESENT and bool(stays[key]), f"{key!r}: outcome {outcome}")
                customer.may_be[key] = stays[key]

    async def _send(
        self, client: EngineClient, number: int, values: dict[bytes, Value], rng: random.Random, *, resize: bool = False
    ) -> list[int]:
        """Put values in a body, or from a session; returns the outcomes."""
        parts = [part for value in values.values() for part in value]
        counts = [len(value) for value in values.values()]
        depths = [rng.randrange(4) for _ in values]
        if rng.random() < 0.6:
            lengths = [len(part) for part in parts]
            request = m.KeyedPut(number, list(values), counts, lengths, depths, resize=resize)
            return _good(await ask(client, request, m.KeyedOutcomes, *parts))
        session = await session_of(client)
        chunks = await store_chunks(client, session, parts)
        commit = m.KeyedCommit(session, number, list(values), counts, chunks, depths, end_session=True, resize=resize)
        return _good(await ask(client, commit, m.KeyedOutcomes))

    async def _look(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        await self._match(client, customer, await self._own(client, customer), customer.key())

    async def _match(self, client: EngineClient, customer: Customer, number: int, key: bytes) -> None:
        known = customer.known(key)
        flag = self._flag(number, key)
        customer.expect(
            flag is None or (known != {None} if flag else None in known), f"the table says {flag} of {key!r}"
        )
        found = await self._value_of(client, number, key)
        customer.expect(found in known, f"{key!r} has {_shown(found)}, not one of {list(map(_shown, known))}")
        customer.may_be[key] = {found}

    async def _value_of(self, client: EngineClient, number: int, key: bytes) -> Value | None:
        matched = await ask(client, m.KeyedMatch(number, [key], lease=True), m.KeyedMatched)
        parts = [await read(client, chunk) for chunk in matched.chunks]
        await ask(client, m.CloseLeases(matched.leases), m.Done)
        return tuple(parts) if matched.counts[0] else None

    async def _remove(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        number, key = await self._own(client, customer), customer.key()
        known = customer.known(key)
        customer.may_be[key] = known | {None}
        with customer.changing({key: None}):
            (outcome,) = (await ask(client, m.KeyedRemove(number, [key]), m.KeyedOutcomes)).outcomes
        is_right = known != {None} if outcome == m.KEYED_REMOVED else None in known
        customer.expect(is_right, f"removal of {key!r}: {outcome}")
        customer.may_be[key] = {None}

    async def _drop_space(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        number = await self._own(client, customer)
        for key in customer.may_be:
            customer.may_be[key] = customer.known(key) | {None}
        await ask(client, m.SpaceRemove(customer.name), m.Done)
        customer.may_be.clear()
        others = {number for other in self.customers for number in other.numbers}
        new = await self._own(client, customer)
        customer.expect(new != number and new not in others, f"number {new} was handed out again")

    async def _lease_beside_gc(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        """Find a value, remove its key, collect, and read it under its lease."""
        number, key = await self._own(client, customer), customer.key()
        matched = await ask(client, m.KeyedMatch(number, [key], lease=True), m.KeyedMatched)
        await self._remove_known(client, customer, number, key)
        await self._collect(client, customer, rng)
        for chunk in matched.chunks:
            await read(client, chunk)
        await ask(client, m.CloseLeases(matched.leases), m.Done)

    async def _put_garbage_beside_gc(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        """Remove a key and, while gc collects its value, put that value again; then read it."""
        number, key = await self._own(client, customer), customer.key()
        value = await self._value_of(client, number, key)
        if value is None:
            return
        await self._remove_known(client, customer, number, key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._collect, client, customer, rng)
            await trio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05)))
            customer.may_be[key] = {None, value}
            with customer.changing({key: value}):
                (outcome,) = await self._send(client, number, {key: value}, rng)
            customer.expect(outcome == m.KEYED_STORED, f"{key!r} was absent: outcome {outcome}")
            customer.may_be[key] = {value}
        await self._match(client, customer, number, key)

    async def _remove_known(self, client: EngineClient, customer: Customer, number: int, key: bytes) -> None:
        customer.may_be[key] = customer.known(key) | {None}
        with customer.changing({key: None}):
            await ask(client, m.KeyedRemove(number, [key]), m.KeyedOutcomes)
        customer.may_be[key] = {None}

    async def _shared(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        """Put and find keys that all customers use, in a space with a quota and a TTL."""
        request = m.SpaceOpen(SHARED, QUOTA_BYTES, rng.choice((0, 10, TTL_S_MAX)))
        stat = await ask(client, request, m.SpaceStat)
        customer.expect(
            charge(stat.value_bytes, stat.entries) <= QUOTA_BYTES, f"the quota holds {stat.value_bytes} bytes"
        )
        key = rng.choice((b"k%d", b"another key %d")) % rng.randrange(40)
        if rng.random() < 0.7:
            value = customer.value(key)
            self.shared_values.setdefault(key, set()).add(value)
            await self._send(client, stat.number, {key: value}, rng)
        found = await self._value_of(client, stat.number, key)
        is_right = found is None or found in self.shared_values.get(key, ())
        customer.expect(is_right, f"shared {key!r} has {_shown(found)}")

    async def _collect(self, client: EngineClient, customer: Customer, rng: random.Random) -> None:
        self.met["freed"] += (await gc(client))["freed_chunks"]


def _stays(had: Value | None, value: Value, resize: bool) -> bool:
    """Return True if a put of a value leaves the key the one that it had."""
    return had is not None and not (resize and len(b"".join(had)) != len(b"".join(value)))


def _shown(value: Value | None) -> str:
    return "nothing" if value is None else repr([part[:40] for part in value])


def _good(answer: m.KeyedOutcomes) -> list[int]:
    """Return the outcomes; raise the first failure, but not that of a space that is full."""
    for failure in answer.failures:
        if failure is not None and not isinstance(error := failure.as_error(), EngineBusy):
            raise error
    return answer.outcomes
