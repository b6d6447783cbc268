"""Clients of names that have replicas: each change and each read is noted at the registers of its names.

A value is the modification time that a put gave its object: each is put once.  Connections are those of a head for its
clients (`engine.head.names_link`): they end with the term of the leader, and what was under way has an unknown end.

A move brings an object from a name of its own, which nobody else uses, to one of all.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import trio

from engine.coordinator.names_leader import open_names_leader
from engine.head.names_link import ConnectNames, NamesLink
from lakefs.errors import BucketNotFound, KeyNotFound, LakeError, OperationalError, PreconditionFailed
from lakefs.ids import EMPTY_BLOB
from lakefs.wire import messages as m
from tests.linear import NOTHING, PRESENT, Found, Nothing, Value
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.judges.history import SimFailure
from tests.sim.judges.registers import Registers
from tests.sim.replicas.places import Surroundings

M = TypeVar("M", bound=m.Message)
BUCKET: Final = "bkt"
KEYS: Final = "a", "b", "d/c", "d/e"
_SECOND_NS: Final = 1_000_000_000

Step = Callable[[NamesLink], Awaitable[bool]]


class Promises:
    """The knowledge of all clients of one world."""

    def __init__(self) -> None:
        self.registers = Registers()
        self.met: Counter[str] = Counter()
        self._values = itertools.count(1)

    def new_value(self) -> int:
        """Return a value that nobody has put."""
        return next(self._values)


class Customer:
    """One client, beside a head on a host."""

    def __init__(self, name: str, host: str, world: Surroundings, promises: Promises) -> None:
        self.name = name
        self._host = host
        self._world = world
        self._promises = promises
        self._rng: random.Random = world.new_random()
        self._steps: list[tuple[int, Step]] = [
            (6, self.put),
            (2, self.put_new),
            (7, self.read),
            (3, self.remove),
            (3, self.move),
            (3, self.list_all),
        ]

    async def work(self, operations: int) -> None:
        """Do so many operations, whoever leads."""
        steps, weights = [step for _, step in self._steps], [weight for weight, _ in self._steps]
        async with self.reached() as connect:
            left = operations
            while left:
                async with trio.open_nursery() as nursery:
                    link = NamesLink(nursery, connect, lambda: None)
                    left = await self._use(link, left, steps, weights)
                    await link.aclose()
                    nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def reached(self) -> AsyncIterator[ConnectNames]:
        """Follow the leader of the names from this host; yields what connects to whichever leads."""
        async with far_etcd(self._world.nodes, self._host) as coordinator, open_names_leader(coordinator) as leader:
            yield self._world.names_from(self._host, leader)

    async def try_once(self, connect: ConnectNames, step: Step) -> bool:
        """Do a step over a connection of its own; False if that cannot be done now."""
        async with trio.open_nursery() as nursery:
            link = NamesLink(nursery, connect, lambda: None)
            done = await step(link)
            await link.aclose()
            nursery.cancel_scope.cancel()
        return done

    async def _use(self, link: NamesLink, left: int, steps: list[Step], weights: list[int]) -> int:
        """Work over one connection until it is lost; returns how many operations are left."""
        while left:
            await trio.sleep(self._rng.choice((0.001, 0.02, 0.3, 1.5)))
            left -= 1
            step = self._rng.choices(steps, weights)[0]
            if not await step(link):
                await trio.sleep(self._rng.uniform(0.01, 0.3))
                break
        return left

    async def read_all(self, connect: ConnectNames) -> bool:
        """List all names, and read each by itself; False if that cannot be done now."""

        async def read_each(link: NamesLink) -> bool:
            done = await self.list_all(link)
            for key in KEYS:
                done = done and await self._read(link, key)
            return done

        return await self.try_once(connect, read_each)

    # --- operations: each returns False when its connection cannot be used any more -----------------------

    async def put(self, link: NamesLink) -> bool:
        """Put a name."""
        return await self._put(link, self._rng.choice(KEYS))

    async def put_new(self, link: NamesLink) -> bool:
        """Put a name that must not exist."""
        return await self._put(link, self._rng.choice(KEYS), is_new=True)

    async def read(self, link: NamesLink) -> bool:
        """Look a name up."""
        return await self._read(link, self._rng.choice(KEYS))

    async def remove(self, link: NamesLink) -> bool:
        """Remove a name; the answer has what was removed."""
        key, begun = self._rng.choice(KEYS), self._promises.registers.begin()
        try:
            found = await _result(link, m.DeleteNames([(BUCKET, key)]))
        except BucketNotFound:
            found = None
        except LakeError as error:
            return self._failed("remove", key, begun, error, writes=None)
        self._done("remove", key, begun, _value(found), writes=None)
        return True

    async def move(self, link: NamesLink) -> bool:
        """Put a name of one's own, and move it over one of all."""
        target, value = self._rng.choice(KEYS), self._promises.new_value()
        own = f"own-{value}"
        begun = self._promises.registers.begin()
        try:
            await self._commit(link, own, value)
        except LakeError as error:
            return self._failed("put", own, begun, error, writes=value)
        self._done("put", own, begun, writes=value)
        begun = self._promises.registers.begin()
        try:
            await _result(link, m.Rename(BUCKET, own, BUCKET, target))
        except LakeError as error:
            self._promises.registers.lost(own, begun, value, writes=None, who=self.name)
            return self._failed("move", target, begun, error, writes=value)
        self._promises.registers.done(own, begun, value, writes=None, who=self.name)
        self._done("move", target, begun, writes=value)
        return True

    async def list_all(self, link: NamesLink) -> bool:
        """List all names, as of one moment."""
        registers = self._promises.registers
        begun = registers.begin()
        try:
            page = await link.ask(m.ListNames(BUCKET), m.Listed)
        except (KeyNotFound, BucketNotFound):
            page = m.Listed([])
        except LakeError as error:
            return self._lost("list", error)
        found = {entry.key: entry.mtime_ns // _SECOND_NS for entry in page.entries}
        for key in KEYS:
            registers.done(key, begun, found.pop(key, None), who=self.name)
        for key, value in found.items():
            registers.done(key, begun, value, who=self.name)
        self._note("list", str(found))
        return True

    async def _read(self, link: NamesLink, key: str) -> bool:
        begun = self._promises.registers.begin()
        try:
            found = await _result(link, m.StatNames([(BUCKET, key)]))
        except (KeyNotFound, BucketNotFound):
            found = None
        except LakeError as error:
            return self._lost(f"read {key}", error)
        self._done("read", key, begun, _value(found))
        return True

    async def _put(self, link: NamesLink, key: str, *, is_new: bool = False) -> bool:
        value, begun = self._promises.new_value(), self._promises.registers.begin()
        required: Found = None if is_new else NOTHING
        try:
            await self._commit(link, key, value, is_new=is_new)
        except PreconditionFailed:
            self._done("refused", key, begun, PRESENT)
            return True
        except LakeError as error:
            return self._failed("put", key, begun, error, required, writes=value)
        self._done("put", key, begun, required, writes=value)
        return True

    async def _commit(self, link: NamesLink, key: str, value: int, *, is_new: bool = False) -> None:
        session = (await link.ask(m.SessionOpen(), m.SessionOpened)).session
        filler = self._rng.choice((b"", bytes(700), bytes(3000)))
        attributes = m.ObjectAttributes(mtime_ns=value * _SECOND_NS, xattrs={"user.filler": filler} if filler else {})
        condition = m.Condition(absent=True) if is_new else m.NO_CONDITION
        change = m.NameChange(BUCKET, key, EMPTY_BLOB, attributes, condition, create_bucket=True)
        await _result(link, m.Commit(session, [change], end_session=True))

    # --- notes -------------------------------------------------------------------------------------------

    def _done(
        self, what: str, key: str, begun: int, found: Found = NOTHING, *, writes: Value | Nothing = NOTHING
    ) -> None:
        self._promises.registers.done(key, begun, found, writes=writes, who=self.name)
        self._note(what, f"{key}: found {found!r}, writes {writes!r}")

    def _failed(
        self, what: str, key: str, begun: int, error: LakeError, found: Found = NOTHING, *, writes: Value
    ) -> bool:
        """Note a change whose outcome nobody knows."""
        self._promises.registers.lost(key, begun, found, writes=writes, who=self.name)
        return self._lost(f"{what} {key} {writes!r}", error)

    def _lost(self, what: str, error: LakeError) -> bool:
        if not isinstance(error, OperationalError):
            raise SimFailure(f"{self.name}: {what}: {error!r}")
        self._promises.met["failures"] += 1
        self._world.log(f"{self.name}: {what}: {error!r}")
        return False

    def _note(self, what: str, text: str) -> None:
        self._promises.met[what] += 1
        self._promises.met["operations"] += 1
        self._world.log(f"{self.name}: {what} {text}")


async def _result(link: NamesLink, request: m.Request) -> m.ObjectStat | None:
    """Ask for one name; raise its failure."""
    (result,) = (await link.ask(request, m.NameResults)).results
    if result.failure is not None:
        raise result.failure.as_error()
    return result.stat


def _value(stat: m.ObjectStat | None) -> int | None:
    return None if stat is None else stat.mtime_ns // _SECOND_NS
