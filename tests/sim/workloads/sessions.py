"""The part of a simulated workload that uses put sessions: offer, store, commit, leave, and lie."""

from __future__ import annotations

import random

from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.content.manifest import CutKind, build
from lakefs.errors import LakeError
from lakefs.ids import BlobId, ChunkKind, data_chunk_id
from lakefs.names import parse_object_name
from lakefs.steps.steps import send
from lakefs.wire.messages import (
    Commit,
    NameChange,
    NameResults,
    ObjectAttributes,
    Offer,
    Offered,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    StoreChunks,
)
from tests.sim.world.contents import Contents


class SessionWorkload:
    """The part of a workload that is about sessions; `_lake` is its connection now."""

    _lake: TrioLake
    _rng: random.Random
    _contents: Contents

    def _name(self) -> str:
        raise NotImplementedError

    def _coin(self) -> bool:
        raise NotImplementedError

    def _expect(self, good: bool, what: str) -> None:
        raise NotImplementedError

    def _judge(self, error: LakeError, what: str, *, storing: bool) -> None:
        raise NotImplementedError

    async def _pause(self) -> None:
        raise NotImplementedError

    async def compose(self) -> None:
        """Store a blob of many small chunks, each offered first, some of them in use elsewhere."""
        parts, tree = self._contents.compose()
        session = await self._open_session()
        try:
            await self._bring(session, [(ChunkKind.DATA, part) for part in parts])
            await self._bring(session, [(ChunkKind.MANIFEST, payload) for _, payload in tree.manifests])
            await self._commit(session, tree.blob)
        finally:
            await self._end_session(session)

    async def adopt(self) -> None:
        """Bind a name to a content that the store may still have, by its id alone."""
        content = self._contents.take()
        self._contents.register_chunk(content)
        if not content or len(content) > 200_000:
            return
        session = await self._open_session()
        try:
            await self._bring(session, [(ChunkKind.DATA, content)])
            await self._commit(session, BlobId(data_chunk_id(content)))
        finally:
            await self._end_session(session)

    async def abandon(self) -> None:
        """Begin a session that stores, and leave it alone."""
        session = await self._open_session()
        await self._bring(session, [(ChunkKind.DATA, self._contents.take_small()) for _ in range(3)])

    async def lie(self) -> None:
        """Name a blob that nobody stored, or a manifest of chunks that do not exist."""
        missing = [self._rng.randbytes(40) for _ in range(2)]
        tree = build(CutKind.PARTS, [(data_chunk_id(content), 40) for content in missing])
        session = await self._open_session()
        blob = BlobId(data_chunk_id(missing[0]))
        if self._coin():
            await self._bring(session, [(ChunkKind.MANIFEST, payload) for _, payload in tree.manifests])
            blob = tree.blob
        name = parse_object_name(self._name())
        change = NameChange(name.bucket, name.key, blob, ObjectAttributes(), create_bucket=True)
        reply = await driver_of(self._lake).run(send(Commit(session, [change], end_session=True)))
        assert isinstance(reply.message, NameResults)
        self._expect(reply.message.results[0].failure is not None, f"{name} is bound to what nobody stored")

    async def _bring(self, session: bytes, payloads: list[tuple[ChunkKind, bytes]]) -> None:
        """Offer chunks (or not), and store those that are missing."""
        kinds = [int(kind) for kind, _ in payloads]
        missing = list(range(len(payloads)))
        driver = driver_of(self._lake)
        if self._rng.random() < 0.8 and kinds[0] == ChunkKind.DATA:
            ids = [bytes(data_chunk_id(payload)) for _, payload in payloads]
            reply = await driver.run(send(Offer(session, ids)))
            assert isinstance(reply.message, Offered)
            missing = [index for index in missing if not reply.message.present[index]]
            await self._pause()
        if missing:
            bodies = [memoryview(payloads[index][1]) for index in missing]
            request = StoreChunks(session, [kinds[i] for i in missing], [len(body) for body in bodies])
            await driver.run(send(request, body=bodies))
            await self._pause()

    async def _commit(self, session: bytes, blob: BlobId) -> None:
        name = parse_object_name(self._name())
        change = NameChange(name.bucket, name.key, blob, ObjectAttributes(), create_bucket=True)
        end = self._rng.random() < 0.7
        reply = await driver_of(self._lake).run(send(Commit(session, [change], end_session=end)))
        assert isinstance(reply.message, NameResults)
        (result,) = reply.message.results
        what = result.failure.message if result.failure else ""
        self._expect(result.stat is not None and result.stat.blob == blob, f"commit of {name}: {what}")

    async def _open_session(self) -> bytes:
        reply = await driver_of(self._lake).run(send(SessionOpen()))
        assert isinstance(reply.message, SessionOpened)
        return reply.message.session

    async def _end_session(self, session: bytes) -> None:
        try:
            await driver_of(self._lake).run(send(SessionEnd(session)))
        except LakeError as error:
            self._judge(error, "end of a session", storing=False)
