"""The part of a simulated workload that makes multipart uploads: begin, put and replace parts, complete, abort, leave.

Another life finds and ends what one life leaves unfinished.  Parts are one chunk each; whole contents are registered
before they are asked for.
"""

from __future__ import annotations

import hashlib
import random

import trio

from lakefs.client.trio.lake import TrioLake
from lakefs.errors import LakeError, UploadNotFound, UserError
from lakefs.lake.multipart import ListedPart, UploadName
from tests.sim.world.contents import Contents


def etag_of_part(payload: bytes) -> bytes:
    """Return a part's ETag: its MD5."""
    return hashlib.md5(payload, usedforsecurity=False).digest()


class UploadWorkload:
    """The part of a workload that is about uploads; `_lake` is its connection now."""

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

    async def upload(self) -> None:
        """Make a whole upload, or a part of one."""
        upload = await self._lake.create_upload(self._name())
        payloads = dict(enumerate(self._contents.some_parts(), self._rng.randint(1, 3)))
        order = list(payloads)
        self._rng.shuffle(order)
        for number in order:
            if self._rng.random() < 0.2:
                await self._put_part(upload, number, self._contents.take_small())
            await self._put_part(upload, number, payloads[number])
        choice = self._rng.random()
        if choice < 0.15:
            await self._lake.abort_upload(upload)
        elif choice < 0.8:
            await self._complete(upload, payloads)

    async def finish_upload(self) -> None:
        """End an upload that somebody left: complete it from the parts that it has, or abort it."""
        bucket = self._bucket()
        found = [entry async for entry in self._lake.uploads(f"{bucket}/")]
        if not found:
            return
        chosen = self._rng.choice(found)
        self._expect(bool(chosen.key), f"an upload to no key: {chosen}")
        upload = UploadName(bucket, chosen.key, chosen.upload)
        parts = [part async for part in self._lake.parts(upload)]
        payloads = {part.number: self._contents.by_part_etag[part.etag] for part in parts}
        await self._pause()
        if payloads and self._rng.random() < 0.7:
            await self._complete(upload, payloads)
        else:
            await self._lake.abort_upload(upload)

    async def _put_part(self, upload: UploadName, number: int, payload: bytes) -> None:
        self._contents.register_chunk(payload)
        self._contents.by_part_etag[etag_of_part(payload)] = payload
        part = await self._lake.put_part(upload, number, payload)
        self._expect(part.etag == etag_of_part(payload), f"part {number} of {upload}")
        await self._pause()

    async def _complete(self, upload: UploadName, payloads: dict[int, bytes]) -> None:
        """Complete an upload, at times twice at once, or once more afterwards."""
        listed = [ListedPart(number, etag_of_part(payload)) for number, payload in sorted(payloads.items())]
        blob, etag = self._contents.register_parts([payload for _, payload in sorted(payloads.items())])
        errors: list[LakeError] = []

        async def complete() -> None:
            try:
                stat = await self._lake.complete_upload(upload, listed)
            except LakeError as error:
                errors.append(error)
            else:
                self._expect((stat.blob, stat.etag) == (blob, etag), f"completion of {upload}: {stat}")

        if self._rng.random() < 0.3:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(complete)
                nursery.start_soon(complete)
        else:
            await complete()
        if not errors and self._rng.random() < 0.3:
            await self._pause()
            await complete()
        for error in errors:
            if not isinstance(error, UserError):
                raise error
        if any(not isinstance(error, UploadNotFound) for error in errors):
            raise errors[0]
