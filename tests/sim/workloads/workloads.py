"""Workloads of a simulated lake: tasks that put, get, rename, copy, hold sessions and handles, and check what they get.

The witness judges whether the answers are right in order and time.  A workload checks what only it can: the bytes, and
which failures are allowed now (`Weather`).  A put that fails may or may not have happened.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import OpenedObject, TrioLake
from lakefs.errors import (
    BugError,
    ChunkNotFound,
    CorruptionError,
    DiskFailed,
    EngineUnreachable,
    LakeError,
    SessionLost,
    StoreFull,
    StoreReadOnly,
    UserError,
)
from lakefs.ids import BlobId, ChunkKind, data_chunk_id
from lakefs.names import parse_object_name
from lakefs.wire.messages import NameChange, ObjectAttributes, ObjectStat, PutObjects
from tests.sim.judges.history import History, SimFailure
from tests.sim.judges.model import Bound
from tests.sim.workloads.names import NameWorkload
from tests.sim.workloads.pins import PinWorkload
from tests.sim.workloads.sessions import SessionWorkload
from tests.sim.workloads.uploads import UploadWorkload
from tests.sim.workloads.versions import VersionWorkload
from tests.sim.world.contents import Contents
from tests.sim.world.disk import SimDisk
from tests.sim.world.sim_time import pause

Connect = Callable[[], AbstractAsyncContextManager[TrioLake]]


@dataclass
class Weather:
    """The failures of the service that are allowed now."""

    disk: SimDisk
    met: Counter[str]
    """Events that workloads saw, with their numbers."""
    disk_full: bool = False
    """New content may not fit; removing, renaming and collecting must work."""
    reserve_lost: bool = False
    """Others have taken the room of the reserve, too, while no engine held it: nothing has to work."""
    disk_failing: bool = False
    cuts: bool = False
    damaged: bool = False
    """The disk has lied or rotted: errors that say so are right, wrong bytes are not."""
    leases_end: bool = False
    """A connection that is made again has lost its leases: objects that were open for reading may be gone."""

    def excuses(self, error: LakeError, *, storing: bool) -> bool:
        """Return whether the error has a cause outside the engine."""
        if self.disk.is_dead:
            return True
        if isinstance(error, UserError):
            return True  # the witness judges these
        if self.damaged and isinstance(error, CorruptionError):
            return True
        if self.damaged and storing and isinstance(error, ChunkNotFound):
            return True  # a damaged chunk counts as absent when a put refers to it
        if self.disk_full and storing and isinstance(error, StoreFull):
            return True
        if self.disk_failing and isinstance(error, (DiskFailed, StoreReadOnly)):
            return True
        if self.reserve_lost and isinstance(error, (StoreFull, StoreReadOnly)):
            return True
        if self.leases_end and not storing and isinstance(error, ChunkNotFound):
            return True
        return self.cuts and isinstance(error, (EngineUnreachable, SessionLost))


class Workload(NameWorkload, SessionWorkload, PinWorkload, UploadWorkload, VersionWorkload):
    """One client, doing operations of random kinds over one connection after the other."""

    def __init__(
        self,
        connect: Connect,
        history: History,
        contents: Contents,
        weather: Weather,
        rng: random.Random,
        *,
        slowest_s: float,
        is_wanted: Callable[[int], bool],
    ) -> None:
        """`is_wanted`: whether the operation of that number is done; a shrinker leaves some out."""
        super().__init__(rng)
        self._is_wanted = is_wanted
        self._number = 0
        self._connect = connect
        self._history = history
        self._contents = contents
        self._weather = weather
        self._slowest_s = slowest_s
        self._kinds = self._weighted()
        self._storing = self._storing_kinds()

    def _weighted(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        """The kinds of operations, each with its weight."""
        return [
            (24, self.put),
            (6, self.put_many),
            (12, self.get),
            (3, self.get_many),
            (6, self.hold_open),
            (4, self.pin),
            (10, self.remove),
            (8, self.move),
            (5, self.move_folder),
            (6, self.copy),
            (4, self.conditional_put),
            (6, self.compose),
            (6, self.adopt),
            (2, self.abandon),
            (2, self.lie),
            (6, self.upload),
            (4, self.finish_upload),
            (3, self.make_folder),
            (3, self.remove_folder),
            (4, self.make_symlink),
            (4, self.set_attributes),
            (6, self.put_visible),
            (6, self.put_keeping_the_node),
            (3, self.sync),
            (5, self.list_names),
            (4, self.stat),
            (1, self.bucket),
            (2, self.keep_versions),
            (4, self.remove_version),
            (3, self.read_version),
            (2, self.copy_version),
            (4, self.collect),
            (5, self.put_again_beside_gc),
            (4, self.commit_beside_gc),
            (2, self.check),
        ]

    def _storing_kinds(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """The kinds that need room."""
        return (
            self.put,
            self.put_many,
            self.conditional_put,
            self.put_visible,
            self.put_keeping_the_node,
            self.compose,
            self.upload,
            self.finish_upload,
            self.adopt,
            self.abandon,
            self.lie,
            self.put_again_beside_gc,
            self.commit_beside_gc,
            self.copy,
            self.copy_version,
            self.make_folder,
            self.make_symlink,
            self.set_attributes,
            self.bucket,
        )

    async def work(self, count: int) -> None:
        """Do that many operations."""
        kinds = [kind for _, kind in self._kinds]
        weights = [weight for weight, _ in self._kinds]
        plan = self._rng
        while count > 0:
            on_this_connection = min(count, plan.randint(1, 30))
            count -= on_this_connection
            chosen = plan.choices(kinds, weights, k=on_this_connection)
            try:
                async with self._connect() as self._lake:
                    for kind in chosen:
                        # A source of its own: an operation that is left out does not disturb the others.
                        self._rng = random.Random(plan.getrandbits(64))
                        self._number += 1
                        if self._is_wanted(self._number - 1):
                            await self._do(kind)
            except LakeError as error:
                self._judge(error, "connect", storing=False)

    async def _do(self, kind: Callable[[], Awaitable[None]]) -> None:
        """Do one operation, which may be cancelled on the way."""
        patience_s = self._rng.uniform(0.0, 3 * self._slowest_s) if self._rng.random() < 0.1 else math.inf
        with trio.move_on_after(patience_s) as scope:
            try:
                await kind()
                self._weather.met[kind.__name__] += 1
            except LakeError as error:
                self._judge(error, kind.__name__, storing=kind in self._storing)
        self._weather.met["cancelled"] += scope.cancelled_caught
        self._weather.met["operations"] += 1
        await self._pause()

    def _judge(self, error: LakeError, what: str, *, storing: bool) -> None:
        self._weather.met[type(error).__name__] += 1
        if isinstance(error, BugError) or not self._weather.excuses(error, storing=storing):
            raise SimFailure(f"{what}: {error!r}") from error

    # --- storing -----------------------------------------------------------------------------------

    async def put(self) -> None:
        name, content = self._name(), self._contents.take()
        blob = self._contents.blob_of(content)
        result = await self._lake.put(name, content, create_bucket=True)
        self._expect(result.stat.blob == blob and result.size_bytes == len(content), f"put of {name}")

    async def put_many(self) -> None:
        objects: list[tuple[str, bytes]] = []
        for _ in range(self._rng.randint(2, 9)):
            content = self._contents.take_small() if self._rng.random() < 0.6 else self._contents.take()
            if len(content) < 200_000:
                self._contents.register_chunk(content)
                objects.append((self._name(), content))
        stats = await self._lake.put_many(objects, create_bucket=True)
        for (name, content), stat in zip(objects, stats, strict=True):
            self._expect(stat.blob == data_chunk_id(content), f"put of {name} among {len(objects)}")

    async def conditional_put(self) -> None:
        name, content = self._name(), self._contents.take()
        blob = self._contents.blob_of(content)
        if self._rng.random() < 0.5:
            result = await self._lake.put(name, content, if_absent=True, create_bucket=True)
        else:
            stat = await self._lake.stat(name)
            await self._pause()
            result = await self._lake.put(name, content, if_match=stat.etag or "none", create_bucket=True)
        self._expect(result.stat.blob == blob, f"conditional put of {name}")

    async def put_visible(self) -> None:
        """Put without waiting for durability; often one of several at once."""
        for _ in range(self._rng.choice((1, 1, 3))):
            name, content = self._name(), self._contents.take_small()
            await self._put_one(name, content, keep_node=0, durable=False)
        if self._coin():
            await self.sync()

    async def put_keeping_the_node(self) -> None:
        """Put over the node that was seen, as a file is written through its handle, again and again."""
        name = self._name()
        stat = await self._lake.stat(name)
        for _ in range(self._rng.choice((1, 2))):
            await self._pause()
            content = self._contents.take() if self._rng.random() < 0.5 else self._contents.take_small()
            if len(content) < 200_000:
                found = await self._put_one(name, content, keep_node=stat.node, durable=self._coin())
                self._expect(found.node == stat.node, f"{name}: the node {stat.node} was not kept: {found}")

    async def _put_one(self, name: str, content: bytes, *, keep_node: int, durable: bool) -> ObjectStat:
        self._contents.register_chunk(content)
        bucket, key = parse_object_name(name)
        change = NameChange(bucket, key, b"", ObjectAttributes(), create_bucket=not keep_node, keep_node=keep_node)
        request = PutObjects([len(content)], [change], durable=durable)
        (stat,) = await self._ask(request, content)
        self._expect(stat.blob == data_chunk_id(content), f"put of {name}, durable {durable}")
        return stat

    # --- reading -----------------------------------------------------------------------------------

    async def get(self) -> None:
        name = self._name()
        since = self._history.here
        content = await self._lake.get(name)
        self._check_content(since, name, bytes(content))

    async def get_many(self) -> None:
        names = [self._name() for _ in range(self._rng.randint(1, 5))]
        since = self._history.here
        for name, content in zip(names, await self._lake.get_many(names), strict=True):
            self._check_content(since, name, bytes(content))

    async def hold_open(self) -> None:
        """Read an object in ranges, over some time: all must be of the version that was opened."""
        name = self._name()
        async with await self._lake.open(name) as opened:
            content = self._contents.by_blob[BlobId(opened.stat.blob)]
            if self._rng.random() < 0.7:
                replacement = self._contents.take_small()
                self._contents.register_chunk(replacement)
                try:
                    await self._lake.put(name, replacement, create_bucket=True)
                except LakeError as error:
                    self._judge(error, "put beside an open object", storing=True)
            for _ in range(self._rng.randint(1, 5)):
                await self._read_range(opened, content)
                if self._rng.random() < 0.3:
                    await self._lake.gc()
                await trio.sleep(self._rng.choice((0.0, self._slowest_s, 3.0)))

    async def _read_range(self, opened: OpenedObject, content: bytes) -> None:
        offset = self._rng.randint(0, len(content))
        length = self._rng.choice((0, 1, 4096, 70_000, len(content)))
        found = await opened.read(offset, length)
        self._expect(found == content[offset : offset + length], f"range {offset}+{length} of {opened.stat}")

    async def list_names(self) -> None:
        prefix = self._rng.choice(("", "d", "d/", "f/", "g/h"))
        delimiter = self._rng.choice(("", "/"))
        after = ""
        driver = driver_of(self._lake)
        while True:
            page = await driver.run(
                driver.steps.list_page(
                    f"{self._bucket()}/{prefix}", after=after, delimiter=delimiter, limit=self._rng.randint(1, 9)
                )
            )
            after = page.next_after
            if not after:
                return

    async def stat(self) -> None:
        await self._lake.stat(self._name() if self._rng.random() < 0.7 else self._folder())

    # --- upkeep ------------------------------------------------------------------------------------

    async def collect(self) -> None:
        await self._lake.gc()

    async def put_again_beside_gc(self) -> None:
        """Put contents again that nothing refers to any more, while gc is about to free them."""
        contents = [self._contents.take_small() for _ in range(3)]
        for content in contents:
            self._contents.register_chunk(content)
        name = self._name()
        for content in contents:
            await self._lake.put(name, content, create_bucket=True)
        await self._lake.remove(name)

        async def put_again() -> None:
            await self._pause()
            await self._lake.put_many([(self._name(), content) for content in contents], create_bucket=True)

        await self._beside_gc(put_again)

    async def commit_beside_gc(self) -> None:
        """Commit a session and end it while gc runs."""
        parts, tree = self._contents.compose()
        session = await self._open_session()
        try:
            await self._bring(session, [(ChunkKind.DATA, part) for part in parts])
            await self._bring(session, [(ChunkKind.MANIFEST, payload) for _, payload in tree.manifests])
            await self._beside_gc(lambda: self._commit(session, tree.blob))
        finally:
            await self._end_session(session)

    async def _beside_gc(self, work: Callable[[], Awaitable[None]]) -> None:
        errors: list[LakeError] = []

        async def guarded(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except LakeError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(guarded, self.collect)
            nursery.start_soon(guarded, work)
        if errors:
            raise errors[0]

    async def check(self) -> None:
        report = await self._lake.fsck(full=self._rng.random() < 0.5)
        excused = self._weather.damaged or self._weather.disk_failing  # a read that failed is damage, too
        self._expect(report["damage"] == 0 or excused, f"fsck of the running store: {report['findings']}")

    # --- below -------------------------------------------------------------------------------------

    def _check_content(self, since: int, name: str, content: bytes) -> None:
        bucket, key = parse_object_name(name)
        blobs = self._contents.by_blob
        good = self._history.was(
            since, lambda state: blobs.get(state.get(bucket, {}).get(key, _NOTHING).blob) == content
        )
        self._expect(good, f"get of {name}: {len(content)} bytes that it never had")

    def _expect(self, good: bool, what: str) -> None:
        if not good:
            raise SimFailure(what)

    async def _pause(self) -> None:
        choice = self._rng.random()
        if choice < 0.5:
            await trio.lowlevel.checkpoint()
        else:
            await pause(self._rng.uniform(0.0, self._slowest_s * (20 if choice > 0.9 else 1)))


_NOTHING = Bound(BlobId(b"none"))
