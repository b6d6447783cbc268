"""The part of a simulated workload that pins: while chunks are pinned, their places keep their bytes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from engine.format.layouts import SegmentKind
from engine.segments.files import segment_path
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import LakeError
from lakefs.ids import BlobId, SegmentId
from lakefs.steps.steps import send
from lakefs.wire.media import MEDIUM_NONE
from lakefs.wire.messages import Grant, PinChunks, Pinned, UnpinChunks
from tests.sim.world.contents import Contents

if TYPE_CHECKING:
    from tests.sim.workloads.workloads import Weather


class PinWorkload:
    """The part of a workload that is about pins; `_lake` is its connection now."""

    _lake: TrioLake
    _rng: random.Random
    _contents: Contents
    _weather: Weather

    def _name(self) -> str:
        raise NotImplementedError

    def _expect(self, good: bool, what: str) -> None:
        raise NotImplementedError

    def _judge(self, error: LakeError, what: str, *, storing: bool) -> None:
        raise NotImplementedError

    async def _pause(self) -> None:
        raise NotImplementedError

    async def pin(self) -> None:
        """Pin an object, remove its name, have room given back, and look at the places each time."""
        name = self._name()
        async with await self._lake.open(name) as opened:
            content = self._contents.by_blob[BlobId(opened.stat.blob)]
            pieces = opened.pieces
            chunks: list[bytes] = [piece.chunk for piece in pieces]
            reply = await driver_of(self._lake).run(send(PinChunks(chunks)))
        assert isinstance(reply.message, Pinned)
        expected = [
            (grant, content[piece.offset : piece.offset + piece.length])
            for grant, piece in zip(reply.message.grants, pieces, strict=True)
        ]
        try:
            if self._rng.random() < 0.7:
                await self._lake.remove(name)
            for _ in range(self._rng.randint(1, 3)):
                await self._lake.gc(compact=self._rng.random() < 0.5)
                self._look(expected, name)
                await self._pause()
        finally:
            await self._unpin(chunks)

    def _look(self, expected: list[tuple[Grant, bytes]], name: str) -> None:
        """Check what mappings of the places show, as long as nothing but the engine could have changed it."""
        weather = self._weather
        if weather.damaged or weather.disk_failing or weather.cuts or weather.disk.is_dead:
            return
        for grant, payload in expected:
            if grant.medium != MEDIUM_NONE:
                self._expect(self._bytes_at(grant) == payload, f"{name} is pinned, and its place changed")

    def _bytes_at(self, grant: Grant) -> bytes:
        paths = [segment_path(SegmentId(grant.segment), kind) for kind in SegmentKind]
        path = next((path for path in paths if self._weather.disk.exists(path)), None)
        if path is None:
            return b""
        file = self._weather.disk.open(path, read_only=True)
        try:
            buffer = bytearray(grant.stored_bytes)
            file.pread_into(memoryview(buffer), grant.offset)
            return bytes(buffer)
        finally:
            file.close()

    async def _unpin(self, chunks: list[bytes]) -> None:
        try:
            await driver_of(self._lake).run(send(UnpinChunks(chunks)))
        except LakeError as error:
            self._judge(error, "unpin", storing=False)
