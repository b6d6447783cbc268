"""Requests that bind names at a head: Commit, puts of small objects, parts and completions of uploads.

    hold      each blob is walked: its chunks are what the session was answered as stored
    bind      names bind them, if they accept the generation and epoch of these answers (`engine.requests.bind`)
    renew     else the chunks are offered in the present generation, and bound once more; the client does not notice

Rules kept here:
- Nothing is bound unless every chunk is stored, and was answered so in what the request to the names says.
- What members do not have any more, of a session that began anew, is SessionLost: the client offers its chunks again.
- Over several names shards, each of which has a generation of its own, names that one shard does not accept are bound
  once more, and no others.
- What was copied from slots is bound only if their client was connected after the copy: else the slots are its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from engine.chunks.hashing import hash_payloads
from engine.chunks.manifests import HeldBlob, HeldBlobs
from engine.chunks.payload import Payload, PayloadMemory, ReceivedBody, check_body
from engine.head.head_chunks import HeadChunks
from engine.head.head_clients import HeadClient, HeadSession
from engine.head.names_routes import not_accepted
from engine.requests.answers import failed
from engine.requests.handlers import handles
from engine.requests.put_objects import with_fresh
from engine.requests.slots import SlotPayloads
from engine.requests.uploads import with_layouts
from engine.sessions.references import References
from lakefs.errors import ChunkNotFound, EngineBusy, InvalidArgument, LakeError, RequestTooLarge, SessionLost, UserError
from lakefs.host.buffers import PooledPayload
from lakefs.ids import ChunkId, ChunkKind, GcGeneration, SessionId, blob_of, is_well_formed
from lakefs.limits import BATCH_MAX, HEAD_BIND_ATTEMPTS
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

T = TypeVar("T")


def _nothing_left(_: m.Message) -> bool:
    return True


class HeadBinds:
    """Binds blobs of sessions, and repeats that in a later generation when names ask for it."""

    def __init__(self, references: References, chunks: HeadChunks, blobs: HeldBlobs[HeadSession]) -> None:
        self.references = references
        self.chunks = chunks
        self.blobs = blobs

    def session_of(self, client: HeadClient, identifier: bytes) -> HeadSession:
        """Return the client's session.  SessionLost."""
        session = self.references.join_session(client, SessionId(identifier))
        assert isinstance(session, HeadSession)
        return session

    async def bind(
        self,
        client: HeadClient,
        session: HeadSession,
        hold: Callable[[], Awaitable[T]],
        request_for: Callable[[T, m.Answered], m.Request | None],
        take: Callable[[m.Message], bool] = _nothing_left,
    ) -> tuple[T, m.Message | None]:
        """Hold blobs and have them bound; return what was held, and the names' answer if there was a request for it.

        `take` gets each answer; it returns False if some of its names were not bound as the answers are too old, which
        the next request is for.  SessionLost if the session ended, or one of its chunks did.
        """
        self.chunks.generation_of(session)
        for _ in range(HEAD_BIND_ATTEMPTS):
            beginning = session.beginnings
            try:
                held = await hold()
            except ChunkNotFound:
                if session.beginnings == beginning and not await self.has_begun_anew(client, session):
                    raise
                continue
            if session.is_over:
                raise SessionLost("the put session ended before its commit; offer the chunks again")
            if session.beginnings != beginning:
                continue  # another request of the session was refused: what is held now was answered later
            answered = session.answered(self.chunks.epoch)
            request = request_for(held, answered)
            if request is None:
                return held, None
            try:
                answer = await client.names.call(request)
            except SessionLost:
                if session.beginnings == beginning and not await self.has_begun_anew(client, session):
                    raise
                continue
            if take(answer) or (session.beginnings == beginning and not await self.has_begun_anew(client, session)):
                return held, answer
        raise _outrun()

    async def has_begun_anew(self, client: HeadClient, session: HeadSession) -> bool:
        """Let a session begin anew if names do not accept its answers any more; False if they do.

        What it was answered may have been freed then.
        """
        beginning, answered = session.beginnings, session.answered(self.chunks.epoch)
        generation = await self.later_generation(client, answered)
        if generation is not None and session.beginnings == beginning:
            session.begin_anew(generation)
        return generation is not None

    async def later_generation(self, client: HeadClient, answered: m.Answered) -> GcGeneration | None:
        """Return a generation that names accept; None if they accept these answers, and refused for another reason."""
        accepted = await client.names.ask(m.AcceptedAnswers(), m.AnswersAccepted)
        if answered.generation >= accepted.generation - 1 and answered.epoch >= accepted.epoch:
            return None
        return self.chunks.learn(GcGeneration(accepted.generation))


class SessionBinds:
    """Handlers of requests that bind what a session holds."""

    def __init__(self, binds: HeadBinds) -> None:
        self._binds = binds
        self._blobs = binds.blobs

    @handles(m.Commit)
    async def commit(self, client: HeadClient, request: m.Commit) -> Reply:
        session = self._binds.session_of(client, request.session)
        if len(request.changes) > BATCH_MAX:
            raise RequestTooLarge(f"{len(request.changes)} names in one commit; the limit is {BATCH_MAX}")

        bound = BoundNames()

        def request_for(blobs: list[HeldBlob | LakeError], answered: m.Answered) -> m.BindBlobs | None:
            asked = bound.ask([index for index, blob in enumerate(blobs) if isinstance(blob, HeldBlob)])
            held = [(request.changes[index], blobs[index]) for index in asked]
            return bind_request(held, answered, durable=request.durable, folders=request.folders) if held else None

        blobs, _ = await self._binds.bind(
            client, session, lambda: self._hold_all(client, session, request.changes), request_for, bound.take
        )
        results = [
            failed(blob) if isinstance(blob, LakeError) and index not in bound.results else bound.results[index]
            for index, blob in enumerate(blobs)
        ]
        if request.end_session and all(result.failure is None for result in results):
            self._binds.references.end_session(session.identifier)
        return Reply(m.NameResults(results))

    async def _hold_all(
        self, client: HeadClient, session: HeadSession, changes: Sequence[m.NameChange]
    ) -> list[HeldBlob | LakeError]:
        """Hold the blob of each change, or return the error that it ends with.

        ChunkNotFound if the session has begun anew: a manifest may have been freed, and is to be offered again.
        """
        tops = [ChunkId(change.blob) for change in changes if is_well_formed(change.blob)]
        await self._binds.chunks.prepare(session, tops)
        blobs: list[HeldBlob | LakeError] = []
        for change in changes:
            try:
                blobs.append(await self._blobs.hold(session, change.blob))
            except (UserError, ChunkNotFound) as error:
                blobs.append(error)
        missing = next((blob for blob in blobs if isinstance(blob, ChunkNotFound)), None)
        if missing is not None and await self._binds.has_begun_anew(client, session):
            raise missing
        return blobs

    # --- uploads -----------------------------------------------------------------------------------

    @handles(m.UploadPut)
    async def upload_put(self, client: HeadClient, request: m.UploadPut) -> Reply:
        session = self._binds.session_of(client, request.session)

        def request_for(held: HeldBlob, answered: m.Answered) -> m.Request:
            return m.BindPart(answered, request, held.size_bytes, held.chunk_count)

        _, stat = await self._binds.bind(client, session, lambda: self._blobs.hold(session, request.blob), request_for)
        if request.end_session:
            self._binds.references.end_session(session.identifier)
        assert isinstance(stat, m.PartStat)
        return Reply(stat)

    @handles(m.UploadComplete)
    async def upload_complete(self, client: HeadClient, request: m.UploadComplete) -> Reply:
        def request_for(held: HeldBlob, answered: m.Answered) -> m.Request:
            return m.BindUpload(answered, request, held.size_bytes, held.chunk_count)

        try:
            session = self._binds.session_of(client, request.session)
            _, answer = await self._binds.bind(
                client, session, lambda: self._blobs.hold(session, request.blob), request_for
            )
        except (SessionLost, ChunkNotFound, UserError) as error:
            return Reply(await self._completed_before(client, request, error))
        if request.end_session:
            self._binds.references.end_session(session.identifier)
        assert isinstance(answer, m.NameResults)
        return Reply(answer)

    async def _completed_before(self, client: HeadClient, request: m.UploadComplete, error: LakeError) -> m.NameResults:
        """Return the answer of an upload that was completed already; raises `error` if it was not."""
        answered = m.Answered(self._binds.chunks.generation, self._binds.chunks.epoch)
        try:
            return await client.names.ask(m.BindUpload(answered, request, 0, 0), m.NameResults)
        except SessionLost:
            raise error from None

    @handles(m.UploadParts)
    async def upload_parts(self, client: HeadClient, request: m.UploadParts) -> Reply:
        if not request.layouts:
            return Reply(await client.names.call(request))
        without = msgspec.structs.replace(request, layouts=False)
        return Reply(await with_layouts(lambda: client.names.ask(without, m.Parts), self._blobs.layout))


class ObjectBinds:
    """Handlers of puts of small objects, which need no session."""

    def __init__(self, binds: HeadBinds, slots: SlotPayloads, memory: PayloadMemory, offload: Offload) -> None:
        self._binds = binds
        self._slots = slots
        self._memory = memory
        self._offload = offload

    async def receive(self, request: m.PutObjects, body_bytes: int, pooled: PooledPayload | None) -> ReceivedBody:
        """Allocate memory for the payloads of a request; see `PayloadMemory.take`."""
        check_body(request.lengths, body_bytes)
        return await self._memory.take([ChunkKind.DATA] * len(request.lengths), request.lengths, pooled)

    @handles(m.PutObjects)
    async def put_objects(self, client: HeadClient, request: m.PutObjects, body: Body) -> Reply:
        assert isinstance(body, ReceivedBody)
        return await self._put(client, body.payloads, request.changes, durable=request.durable, folders=request.folders)

    @handles(m.PutSlots)
    async def put_slots(self, client: HeadClient, request: m.PutSlots) -> Reply:
        async with self._slots.from_request(client, request) as payloads:
            return await self._put(client, payloads, request.changes, durable=request.durable, slots=True)

    async def _put(
        self,
        client: HeadClient,
        payloads: Sequence[Payload],
        changes: Sequence[m.NameChange],
        *,
        durable: bool,
        folders: bool = False,
        slots: bool = False,
    ) -> Reply:
        """Store payloads and bind a name to each.  `slots`: they are copied from slots of the client."""
        if len(changes) != len(payloads):
            raise InvalidArgument(f"{len(changes)} names for {len(payloads)} payloads")
        hashed = await hash_payloads(payloads, self._offload)
        blobs = [HeldBlob(blob_of(item.chunk), item.payload.length, 1) for item in hashed]
        named = [
            (msgspec.structs.replace(change, blob=blob.blob), blob) for change, blob in zip(changes, blobs, strict=True)
        ]
        generation = self._binds.chunks.generation
        fresh: list[bool] = []
        bound = BoundNames()
        for _ in range(HEAD_BIND_ATTEMPTS):
            stored, answered = await self._binds.chunks.store_hashed(hashed, generation)
            fresh = fresh or stored
            if slots:
                client.check_its_memory()
            waiting = [named[index] for index in bound.ask(range(len(named)))]
            refusal: SessionLost | None = None
            try:
                request = bind_request(waiting, answered, durable=durable, folders=folders)
                is_over = bound.take(await client.names.call(request))
            except SessionLost as error:
                is_over, refusal = False, error
            later = None if is_over else await self._binds.later_generation(client, answered)
            if later is not None:
                generation = later
            elif refusal is not None:
                raise refusal
            else:
                return Reply(m.NameResults(with_fresh([bound.results[at] for at in range(len(named))], fresh)))
        raise _outrun()


class BoundNames:
    """The results of changes that are bound by several requests, as names in several shards do not accept all at once.

    `results` are by the changes' indexes.
    """

    def __init__(self) -> None:
        self.results: dict[int, m.NameResult] = {}
        self._asked: list[int] = []
        self._done: set[int] = set()

    def ask(self, indexes: Iterable[int]) -> list[int]:
        """Return those of the changes that are not bound yet: the next answer is theirs."""
        self._asked = [index for index in indexes if index not in self._done]
        return self._asked

    def take(self, answer: m.Message) -> bool:
        """Take the results of an answer; False if some changes were not bound as members' answers were too old."""
        assert isinstance(answer, m.NameResults), "the answer to BindBlobs"
        self.results.update(zip(self._asked, answer.results, strict=True))
        refused = {self._asked[at] for at in not_accepted(answer.results)}
        self._done.update(index for index in self._asked if index not in refused)
        return not refused


def bind_request(
    held: Sequence[tuple[m.NameChange, HeldBlob | LakeError]], answered: m.Answered, *, durable: bool, folders: bool
) -> m.BindBlobs:
    """Return the request that binds names to blobs that are held."""
    changes, sizes, counts = [], [], []
    for change, blob in held:
        assert isinstance(blob, HeldBlob), "only what is held is bound"
        changes.append(change)
        sizes.append(blob.size_bytes)
        counts.append(blob.chunk_count)
    return m.BindBlobs(answered, changes, sizes, counts, durable, folders)


def _outrun() -> EngineBusy:
    return EngineBusy(
        f"gc generations or ring epochs have advanced {HEAD_BIND_ATTEMPTS} times while names were bound; try again"
    )
