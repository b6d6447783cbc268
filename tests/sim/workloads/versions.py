"""The part of a simulated workload that uses versions: keep them or not, list them, read, copy and remove one."""

from __future__ import annotations

import random

from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.ids import BlobId
from lakefs.steps.steps import send
from lakefs.wire.messages import (
    Copy,
    DeleteNames,
    ListedVersions,
    ListVersions,
    ObjectStat,
    OpenObjects,
    OpenResults,
    Request,
    StatNames,
    VersionEntry,
)
from tests.sim.world.contents import Contents


class VersionWorkload:
    """The part of a workload that is about versions; `_lake` is its connection now."""

    _lake: TrioLake
    _rng: random.Random
    _contents: Contents

    def _name(self) -> str:
        raise NotImplementedError

    def _bucket(self) -> str:
        raise NotImplementedError

    def _expect(self, good: bool, what: str) -> None:
        raise NotImplementedError

    async def _pause(self) -> None:
        raise NotImplementedError

    async def _ask(self, request: Request, *body: bytes) -> list[ObjectStat]:
        raise NotImplementedError

    async def keep_versions(self) -> None:
        versioning = self._rng.choice(("enabled", "enabled", "suspended"))
        await self._lake.set_bucket(self._bucket(), versioning=versioning)

    async def remove_version(self) -> None:
        """Remove one version of any key; at times the key itself with it."""
        bucket = self._bucket()
        chosen = await self._some_version(bucket)
        if chosen is None:
            return
        names, versions = [(bucket, chosen.key)], [chosen.version]
        if self._rng.random() < 0.3:
            names, versions = [*names, (bucket, chosen.key)], [*versions, ""]
        keep_folder = self._rng.random() < 0.5
        await self._ask(DeleteNames(names, keep_folder=keep_folder, versions=versions))

    async def read_version(self) -> None:
        bucket = self._bucket()
        chosen = await self._some_version(bucket)
        if chosen is None:
            return
        await self._pause()
        if chosen.is_marker or self._rng.random() < 0.5:
            await self._ask(StatNames([(bucket, chosen.key)], versions=[chosen.version]))
            return
        request = OpenObjects([(bucket, chosen.key)], versions=[chosen.version], inline_bytes=1 << 20)
        reply = await driver_of(self._lake).run(send(request))
        assert isinstance(reply.message, OpenResults)
        content = reply.body.joined()
        reply.body.release()
        (result,) = reply.message.results
        if result.failure is not None:
            raise result.failure.as_error()
        assert result.opened is not None
        expected = self._contents.by_blob[BlobId(result.opened.stat.blob)]
        self._expect(content in (b"", expected), f"version {chosen}: other content")

    async def copy_version(self) -> None:
        bucket = self._bucket()
        chosen = await self._some_version(bucket)
        if chosen is None:
            return
        await self._pause()
        to_bucket, _, to_key = self._name().partition("/")
        await self._ask(Copy(bucket, chosen.key, to_bucket, to_key, create_bucket=True, version=chosen.version))

    async def _some_version(self, bucket: str) -> VersionEntry | None:
        reply = await driver_of(self._lake).run(send(ListVersions(bucket)))
        assert isinstance(reply.message, ListedVersions)
        self._expect(not reply.message.next_after, "more versions than one page has")
        found = [entry for entry in reply.message.entries if not entry.key.endswith("/")]
        return self._rng.choice(found) if found else None
