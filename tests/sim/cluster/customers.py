"""Clients of a simulated lake: they put, read, move and remove objects through a head, and check what they get.

Every operation ends within `BOUND_S`.  One that fails while the lake owes an answer is tried again, and has to succeed
within `health.PATIENCE_S`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

import trio

from lakefs.client.trio.lake import TrioLake
from lakefs.content.manifest import CutKind, build
from lakefs.errors import AcrossShards, BucketNotFound, BugError, EngineUnreachable, KeyNotFound, LakeError, UserError
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.lake.multipart import ListedPart
from lakefs.wire import messages as m
from tests.sim.cluster.clients import SimClient
from tests.sim.cluster.customers_buckets import Buckets, OneBucket, path_of, place_of
from tests.sim.cluster.health import PATIENCE_S, Health
from tests.sim.cluster.places import HeadPlace
from tests.sim.cluster.promises import Content, Promises
from tests.sim.judges.history import SimFailure
from tests.sim.world.offload import SimOffload
from tests.store_rig import ask, change, good

T = TypeVar("T")
BOUND_S = 400.0
SIZES = (1, 900, 5_000, 65_536, 65_537, 140_000, 300_000)
NAMES_A_CUSTOMER = 5
Step = Callable[[], Awaitable[None]]


class Pool:
    """Payloads of chunks: many objects have the same ones, so that chunks are found present, or just freed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._known: list[bytes] = []

    def take(self) -> bytes:
        """Return a payload, new or used before."""
        if self._known and self._rng.random() < 0.5:
            return self._rng.choice(self._known[-12:])
        payload = self._rng.randbytes(self._rng.choice(SIZES))
        self._known.append(payload)
        return payload


class Customer:
    """One client of one head."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        promises: Promises,
        pool: Pool,
        health: Health,
        log: Callable[[str], None],
        *,
        is_reader: bool = False,
        buckets: Buckets | None = None,
    ) -> None:
        """`is_reader`: nobody else is at work, so what it reads is what every key has."""
        self._buckets = buckets or OneBucket()
        self.name = name
        self.operations = 0
        self.failures = 0
        self.across: Counter[str] = Counter()
        """Copies and renames between buckets of two names shards, which were answered."""
        self.is_reader = is_reader
        self._rng = rng
        self._promises = promises
        self._pool = pool
        self._health = health
        self._log = log
        self._client: SimClient | None = None
        self._head: HeadPlace | None = None
        self._kinds: Sequence[tuple[int, Step]] = (
            (6, self.put),
            (6, self.put_blob),
            (8, self.get),
            (4, self.remove),
            (3, self.rename),
            (2, self.copy),
            (2, self.hold_open),
            *([(4, self.upload), (4, self.list)] if self._buckets.are_many else []),
        )

    async def work(self, heads: Sequence[HeadPlace], count: int) -> None:
        """Do that many operations."""
        kinds, weights = [kind for _, kind in self._kinds], [weight for weight, _ in self._kinds]
        while count > 0:
            some = min(count, self._rng.randint(1, 12))
            count -= some
            async with self.at(self._rng.choice(heads)):
                for _ in range(some):
                    await self._do(self._rng.choices(kinds, weights)[0])
                    await trio.sleep(self._rng.choice((0.0, 0.01, 0.5, 3.0)))

    async def _do(self, kind: Step) -> None:
        with trio.move_on_after(BOUND_S) as bound:
            await kind()
        if bound.cancelled_caught:
            raise SimFailure(f"{self.name}: {kind.__name__} has not ended in {BOUND_S:g} s")
        self.operations += 1

    # --- the connection ------------------------------------------------------------------------------

    @asynccontextmanager
    async def at(self, head: HeadPlace) -> AsyncIterator[None]:
        """Work at a head during the block."""
        self._head = head
        self._stack = AsyncExitStack()
        try:
            yield
        finally:
            await self._leave()

    async def _leave(self) -> None:
        self._client = None
        await self._stack.aclose()

    async def _reach(self) -> SimClient:
        if self._client is not None and not self._client.is_connected():
            await self._leave()
        if self._client is None:
            assert self._head is not None
            client = await self._stack.enter_async_context(self._head.connect())
            try:
                await client.call(m.Hello(1, "customer"))
            except LakeError:
                await self._leave()  # as a handshake that fails
                raise
            self._client = client
        return self._client

    async def _try(self, what: str, call: Callable[[SimClient], Awaitable[T]]) -> T | None:
        """Return the result of a call; None when it failed, and may fail now.  UserErrors are raised."""
        owed_since = trio.current_time()
        while True:
            was_owed = self._health.is_owed
            if not was_owed or self._health.unwell_since > owed_since:
                owed_since = trio.current_time()
            try:
                return await call(await self._reach())
            except UserError:
                raise
            except LakeError as error:
                self.failures += 1
                self._log(f"{self.name}: {what}: {error!r}{' (owed)' if was_owed else ''}")
                if isinstance(error, BugError):
                    raise SimFailure(f"{self.name}: {what}: {error!r}") from error
                if not (was_owed and self._health.is_owed):
                    return None
                if trio.current_time() - owed_since > PATIENCE_S:
                    raise SimFailure(f"{self.name}: {what} is owed, and fails: {error!r}") from error
                await trio.sleep(1.0)

    # --- writing -------------------------------------------------------------------------------------

    def _own(self) -> str | None:
        """Return a key that this client may write now."""
        buckets = self._buckets.all()
        numbered = [(buckets[number % len(buckets)], number) for number in range(max(NAMES_A_CUSTOMER, len(buckets)))]
        names = [f"{bucket}/{self.name}-{number}".lstrip("/") for bucket, number in numbered]
        free = [name for name in names if not self._promises.key(name).rests]
        return self._rng.choice(free) if free else None

    async def _write(
        self, name: str, content: Content | None, what: str, call: Callable[[SimClient], Awaitable[T]]
    ) -> None:
        key = self._promises.key(name)
        key.begins(content)
        self._log(f"{self.name}: {what} {name}")
        if await self._try(f"{what} {name}", call) is None:
            key.begins(content)
            return
        key.has(content)
        if content is not None:
            self._promises.buckets.add(place_of(name)[0])
        self._log(f"{self.name}: {what} {name}: done")

    async def put(self) -> None:
        """Put an object of one chunk."""
        name, payload = self._own(), self._pool.take()
        if name is not None:
            await self.put_object(name, payload)

    async def put_object(self, name: str, payload: bytes) -> None:
        """Put an object of one chunk."""
        request = m.PutObjects([len(payload)], [change_of(name)])

        async def call(client: SimClient) -> bool:
            good(await ask(client, request, m.NameResults, payload))
            return True

        await self._write(name, (payload,), "put", call)

    async def put_blob(self) -> None:
        """Put an object of several chunks in a session, each offered first."""
        name = self._own()
        if name is None:
            return
        content = tuple(self._pool.take() for _ in range(self._rng.randint(1, 4)))
        pauses = [self._rng.choice((0.0, 1.0, 10.0)) for _ in range(2)]
        await self.put_in_session(name, content, [partial(trio.sleep, pause_s) for pause_s in pauses])

    async def put_in_session(self, name: str, content: Content, rests: Sequence[Step] = ()) -> None:
        """Put an object in a session; `rests`: awaited behind the offer, and behind the store."""
        left = [*rests]

        async def call(client: SimClient) -> bool:
            taken, left[:] = [*left], []  # who begins anew is in a hurry
            await store_in_session(client, name, content, taken)
            return True

        await self._write(name, content, "put blob", call)

    async def upload(self) -> None:
        """Upload an object in a part, and complete that some time later; uploads that fail are left."""
        name, payload = self._own(), self._pool.take()
        if name is None or place_of(name)[0] not in self._promises.buckets:
            return
        rests = [self._rng.choice((0.0, 1.0, 10.0, 30.0))]

        async def call(client: SimClient) -> bool:
            lake = TrioLake(client, self._offload(), network=True)
            begun = await lake.create_upload(path_of(name))
            part = await lake.put_part(begun, 1, payload)
            await trio.sleep(rests.pop() if rests else 0.0)
            await lake.complete_upload(begun, [ListedPart(1, part.etag)])
            return True

        await self._write(name, (payload,), "upload", call)

    async def remove(self) -> None:
        """Remove an object."""
        name = self._own()
        if name is not None:
            await self.remove_object(name)

    async def remove_object(self, name: str) -> None:
        """Remove an object."""
        await self._write(name, None, "remove", lambda client: _delete(client, name))

    async def rename(self) -> None:
        """Rename an object."""
        await self._move("rename", removes=True)

    async def copy(self) -> None:
        """Copy an object, without its content."""
        await self._move("copy", removes=False)

    async def _move(self, what: str, *, removes: bool) -> None:
        source, target = self._own(), self._own()
        if source is not None and target is not None and source != target:
            await self.move_object(what, source, target, removes=removes)

    async def move_object(self, what: str, source: str, target: str, *, removes: bool) -> None:
        """Rename an object, or copy it."""
        here, there = self._promises.key(source), self._promises.key(target)
        if len(here.may_be) > 1 or here.may_be == [None]:
            return
        (content,) = here.may_be
        before = [*there.may_be]
        there.begins(content)
        if removes:
            here.begins(None)
        self._log(f"{self.name}: {what} {source} to {target}")
        places = *place_of(source), *place_of(target)
        done = await self._try(f"{what} {source} to {target}", self._moving(what, places, removes=removes))
        if done is not None and self._buckets.is_across(places[0], places[2]):
            self.across[what] += 1
        if done is False:
            there.may_be, here.may_be = before, [content]
            there.rests_until = here.rests_until = 0.0
            self._log(f"{self.name}: {what} {source} to {target}: they are in different names shards")
            return
        if done:
            there.has(content)
            self._promises.buckets.add(places[2])
            if removes:
                here.has(None)
            self._log(f"{self.name}: {what} {source} to {target}: done")
            return
        there.begins(content)
        if removes:
            here.begins(None)

    def _moving(
        self, what: str, places: tuple[str, str, str, str], *, removes: bool
    ) -> Callable[[SimClient], Awaitable[bool]]:
        """Return what moves a name, from bucket and name to another: True, or False if it is in another names shard.

        SimFailure if it was moved across names shards, or refused where there is but one.
        """
        buckets = places[0], places[2]
        is_across = removes and self._promises.buckets.issuperset(buckets) and self._buckets.is_across(*buckets)
        kind = m.Rename if removes else m.Copy
        attempts = 0

        async def call(client: SimClient) -> bool:
            nonlocal attempts
            attempts += 1
            try:
                good(await ask(client, kind(*places, create_bucket=True), m.NameResults))
            except KeyNotFound:
                if not (removes and attempts > 1):
                    raise
            except AcrossShards:
                if not (removes and self._buckets.is_across(*buckets)):
                    raise
                return False
            if is_across:
                raise SimFailure(f"{self.name}: {what} of {places}, across names shards, was done")
            return True

        return call

    # --- reading -------------------------------------------------------------------------------------

    async def get(self) -> None:
        """Read an object, of anybody's."""
        name = self._rng.choice(sorted(self._promises.keys) or [f"{self.name}-0"])
        await self.read(name)

    async def read(self, name: str) -> bool:
        """Read an object whole and check it; False if it could not be read, and need not be."""
        look = self._promises.look(name)
        may_learn = (self.is_reader or place_of(name)[1].startswith(f"{self.name}-")) and not look.key.rests
        offload = self._offload()
        exists = place_of(name)[0] in self._promises.buckets

        async def call(client: SimClient) -> list[bytes | None]:
            lake = TrioLake(client, offload, network=True)
            try:
                return [bytes(await lake.get(path_of(name)))]
            except KeyNotFound:
                return [None]
            except BucketNotFound as error:
                if exists:
                    raise SimFailure(f"{self.name}: get {name}: its bucket exists: {error!r}") from error
                return [None]

        found = await self._try(f"get {name}", call)
        if found is None:
            return False
        self._promises.check(name, look, found[0])
        if may_learn and len(look.key.may_be) > 1:
            look.key.may_be = [
                content for content in look.key.may_be if (None if content is None else b"".join(content)) == found[0]
            ]
        return True

    async def list(self) -> None:
        """List a bucket."""
        bucket = self._rng.choice(self._buckets.all())
        exists, looks = bucket in self._promises.buckets, self._promises.looks(bucket)

        async def call(client: SimClient) -> set[str]:
            try:
                listed = await ask(client, m.ListNames(bucket), m.Listed)
            except BucketNotFound:
                if exists:
                    raise
                return set()
            return {f"{bucket}/{entry.key}" for entry in listed.entries}

        listed = await self._try(f"list {bucket}", call)
        if listed is not None:
            self._promises.check_listed(looks, listed)

    async def hold_open(self) -> None:
        """Open an object, remove or replace it, and read it later: what was opened stays."""
        name = self._own()
        if name is None or not self._health.is_owed:
            return
        look = self._promises.look(name)
        try:
            client = await self._reach()
            lake = TrioLake(client, self._offload(), network=True)
            async with await lake.open(path_of(name)) as opened:
                contents = look.contents()
                await self._write(name, None, "remove", lambda client: _delete(client, name))
                await trio.sleep(self._rng.choice((1.0, 20.0, 50.0)))
                if not client.is_connected():
                    return
                found = await opened.read(0, opened.stat.size_bytes)
        except LakeError as error:
            if self._is_owed_here() and not isinstance(error, (UserError, EngineUnreachable)):
                raise SimFailure(f"{self.name}: {name} was open, and cannot be read: {error!r}") from error
            return
        if not any(content is not None and b"".join(content) == found for content in contents):
            raise SimFailure(f"{self.name}: {name} was open, and has other bytes: {found[:20]!r}")

    def _is_owed_here(self) -> bool:
        """Return True if the lake owes answers, and this connection stands."""
        return self._health.is_owed and self._client is not None and self._client.is_connected()

    def _offload(self) -> SimOffload:
        return SimOffload(random.Random(self._rng.getrandbits(32)), slowest_s=0.0)


def change_of(name: str, blob: bytes = b"") -> m.NameChange:
    """Bind a key of the promises."""
    bucket, key = place_of(name)
    return change(key, blob, bucket=bucket)


async def store_in_session(client: SimClient, name: str, content: Content, rests: Sequence[Step]) -> None:
    """Store a blob: offer, store what is absent, and commit; rests are between."""
    chunks = [data_chunk_id(payload) for payload in content]
    tree = build(CutKind.PARTS, list(zip(chunks, map(len, content), strict=True)))
    session = (await ask(client, m.SessionOpen(), m.SessionOpened)).session
    try:
        parts: list[tuple[int, ChunkId, bytes]] = [(1, c, p) for c, p in zip(chunks, content, strict=True)]
        parts += [(2, chunk, bytes(payload)) for chunk, payload in tree.manifests]
        present = (await ask(client, m.Offer(session, [chunk for _, chunk, _ in parts]), m.Offered)).present
        for rest in rests[:1]:
            await rest()
        missing = [part for part, is_there in zip(parts, present, strict=True) if not is_there]
        if missing:
            request = m.StoreChunks(session, [kind for kind, _, _ in missing], [len(p) for _, _, p in missing])
            await ask(client, request, m.Stored, *[payload for _, _, payload in missing])
        for rest in rests[1:]:
            await rest()
        commit = m.Commit(session, [change_of(name, tree.blob)], end_session=True)
        good(await ask(client, commit, m.NameResults))
    finally:
        with trio.move_on_after(1.0, shield=True):
            try:
                (await client.call(m.SessionEnd(session))).body.release()
            except LakeError:
                await trio.lowlevel.checkpoint()


async def _delete(client: SimClient, name: str) -> bool:
    results = await ask(client, m.DeleteNames([place_of(name)]), m.NameResults)
    for result in results.results:
        if result.failure is not None and not isinstance(error := result.failure.as_error(), UserError):
            raise error
    return True
