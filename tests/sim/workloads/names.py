"""The part of a simulated workload that changes names: moving, copying, removing, folders, symlinks, attributes.

Half of the changes ask only to be visible, half of the removals ask for the folder to stay.
"""

from __future__ import annotations

import random

from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.names import parse_object_name
from lakefs.steps.steps import send
from lakefs.wire.messages import (
    DeleteNames,
    MakeFolder,
    MakeSymlink,
    NameResults,
    ObjectAttributes,
    ObjectStat,
    RemoveFolder,
    Rename,
    Request,
    SetAttributes,
    Sync,
)
from tests.sim.judges.model import MARK

LONG = "long-" + "n" * 500
KEYS = ("a", "b", "c", "d/x", "d/y", "d/e/z", "d/e/w", "f/", "f/a", "g/h/i/j", "a/b", f"d/{LONG}", LONG)
FOLDERS = ("d/", "d/e/", "f/", "g/", "g/h/", "a/", "m/", "m/n/", "d/m/")
BUCKETS = ("left", "right")


class NameWorkload:
    """The part of a workload that changes names; `_lake` is its connection now."""

    _lake: TrioLake

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def remove(self) -> None:
        names = [parse_object_name(self._name()) for _ in range(self._rng.choice((1, 1, 1, 4)))]
        await self._ask(
            DeleteNames([(name.bucket, name.key) for name in names], keep_folder=self._coin(), durable=self._coin())
        )

    async def move(self) -> None:
        await self._move(self._name(), self._name(), replace=self._rng.random() < 0.8)

    async def move_folder(self) -> None:
        await self._move(self._folder(), self._folder(), replace=True)

    async def _move(self, source: str, target: str, *, replace: bool) -> None:
        names = (*parse_object_name(source), *parse_object_name(target))
        await self._ask(
            Rename(*names, replace, create_bucket=True, keep_folder=self._coin(), durable=self._rng.random() < 0.8)
        )

    async def copy(self) -> None:
        await self._lake.copy(self._name(), self._name(), create_bucket=True)

    async def make_folder(self) -> None:
        exclusive, create = self._rng.random() < 0.3, self._coin()
        attributes = ObjectAttributes(mode=0o700) if self._coin() else None
        name = parse_object_name(self._folder())
        await self._ask(MakeFolder(*name, exclusive, create, attributes, durable=self._coin()))

    async def remove_folder(self) -> None:
        name = parse_object_name(self._folder())
        await self._ask(RemoveFolder(*name, keep_folder=self._coin(), durable=self._coin()))

    async def make_symlink(self) -> None:
        name = parse_object_name(self._name())
        attributes = ObjectAttributes(xattrs={MARK: b"made"} if self._coin() else {})
        target = self._rng.choice((b"x", b"../d/x", b"t" * 4095))
        await self._ask(MakeSymlink(*name, target, attributes, durable=self._coin()))

    async def set_attributes(self) -> None:
        """Set the mark of an object or symlink; for a folder something that the model does not know."""
        bucket, key = parse_object_name(self._name() if self._rng.random() < 0.8 else self._folder())
        mark = self._rng.choice((b"a", b"b", b"c" * 300))
        if key.endswith("/"):
            request = SetAttributes(bucket, key, mode=0o700, durable=self._coin())
        else:
            request = SetAttributes(bucket, key, xattrs={MARK: mark}, durable=self._coin())
        await self._ask(request)

    async def sync(self) -> None:
        await driver_of(self._lake).run(send(Sync()))

    async def bucket(self) -> None:
        if self._rng.random() < 0.5:
            await self._lake.create_bucket(self._rng.choice((*BUCKETS, "third")))
        else:
            await self._lake.remove_bucket(self._rng.choice((*BUCKETS, "third")))

    # --- below --------------------------------------------------------------------------------------

    async def _ask(self, request: Request, *body: bytes) -> list[ObjectStat]:
        """Send a request about names; return the stats of those that exist; raise the first failure of an item."""
        reply = await driver_of(self._lake).run(send(request, body=body))
        assert isinstance(reply.message, NameResults)
        for result in reply.message.results:
            if result.failure is not None:
                raise result.failure.as_error()
        return [result.stat for result in reply.message.results if result.stat is not None]

    def _coin(self) -> bool:
        return self._rng.random() < 0.5

    def _bucket(self) -> str:
        return self._rng.choice(BUCKETS)

    def _name(self) -> str:
        return f"{self._bucket()}/{self._rng.choice(KEYS)}"

    def _folder(self) -> str:
        return f"{self._bucket()}/{self._rng.choice(FOLDERS)}"
