"""KeyedCommit at a head: values whose chunks a session stored, as stripes, are stored whole at the homes of their keys.

    present       which keys have a value is asked first
    at a home     a session of the head's own is begun; chunks that the home lacks are read from their stripes and
                  stored in it, a body's worth at a time; then the values are committed, and the session ends

Rules kept here:
- A session of a client holds stripes and nothing at homes.  That at the home ends with the commit, also when this is
  cancelled; or with the head's connection to the home.
- Each key has an outcome of its own, as in a put (`engine.head.head_keyed_puts`).
- A chunk that the client's session was not answered is offered to the members, as before a name is bound.
- Homes are served one after the other, so a commit takes memory for one body at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from engine.head.head_binds import HeadBinds
from engine.head.head_clients import HeadClient, HeadSession
from engine.head.head_keyed import KeyMatches
from engine.head.head_keyed_puts import fail_all, fail_bad_keys, fail_bad_values, note_outcomes, rounds, settle_present
from engine.head.key_homes import KeyHomes
from engine.members.ports import Got, Members, Stripes, Wanted
from engine.requests.handlers import handles
from engine.requests.keyed_batch import KeyedBatch
from lakefs.errors import (
    ChunkNotFound,
    EngineUnreachable,
    InvalidArgument,
    LakeError,
    OperationalError,
    SessionLost,
    StaleEpoch,
)
from lakefs.ids import Buffer, ChunkId, ChunkKind, MemberId, RingEpoch, id_text, is_well_formed, kind_of
from lakefs.limits import BODY_BYTES_MAX, MEMBER_ANSWER_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

M = TypeVar("M", bound=m.Message)


@dataclass
class _Commit:
    """A commit under way: its values' parts, as the session holds them."""

    client: HeadClient
    session: HeadSession
    batch: KeyedBatch
    chunks: Sequence[bytes]


class HeadKeyedCommits:
    """Handler of KeyedCommit."""

    def __init__(
        self, homes: KeyHomes, matches: KeyMatches, members: Members, stripes: Stripes, binds: HeadBinds
    ) -> None:
        self._homes = homes
        self._matches = matches
        self._members = members
        self._stripes = stripes
        self._binds = binds

    @handles(m.KeyedCommit)
    async def keyed_commit(self, client: HeadClient, request: m.KeyedCommit) -> Reply:
        session = self._binds.session_of(client, request.session)
        batch = KeyedBatch(request, len(request.chunks))
        await self._homes.check(client, request.space)
        fail_bad_keys(batch)
        commit = _Commit(client, session, batch, request.chunks)
        await self._hold(commit)
        fail_bad_values(batch)
        await settle_present(client, batch, self._matches)
        for epoch, by_home in rounds(self._homes, batch):
            for home, indexes in by_home.items():  # one after the other: each moves up to a body's worth at a time
                if session.is_over:
                    raise SessionLost("the put session ended before its commit; store the chunks again")
                try:
                    await self._commit_at(commit, epoch, home, indexes)
                except StaleEpoch:  # their home is another one now
                    continue
                except OperationalError as error:
                    fail_all(batch, indexes, error)
        if request.end_session and not any(outcome == m.KEYED_FAILED for outcome in batch.outcomes):
            self._binds.references.end_session(session.identifier)
        return batch.reply()

    async def _hold(self, commit: _Commit) -> None:
        """Hold the parts of the wanted values, and fail those that are no chunks, or are not stored."""
        batch, chunks = commit.batch, self._binds.chunks
        names: list[ChunkId] = []
        for index in batch.wanted:
            own = [commit.chunks[part] for part in batch.parts(index)]
            if all(is_well_formed(name) and kind_of(ChunkId(name)) is ChunkKind.DATA for name in own):
                names += map(ChunkId, own)
            else:
                batch.fail(index, InvalidArgument("a part is a chunk of data; its id has 33 bytes"))
        batch.drop_settled()
        await chunks.prepare(commit.session, names)
        for index in batch.wanted:
            for part in batch.parts(index):
                length = chunks.held_bytes(commit.session, ChunkId(commit.chunks[part]))
                if length is None:
                    batch.fail(index, _not_stored(ChunkId(commit.chunks[part])))
                    break
                batch.lengths[part] = length
        batch.drop_settled()

    async def _commit_at(self, commit: _Commit, epoch: RingEpoch, home: MemberId, indexes: Sequence[int]) -> None:
        """Store the values of these keys at their home.  StaleEpoch."""
        batch = commit.batch
        parts = [part for index in indexes for part in batch.parts(index)]
        lengths = {ChunkId(commit.chunks[part]): batch.lengths[part] for part in parts}
        session = await self._begin(home)
        try:
            lost = await self._store_missing(home, session, lengths)
            for index in indexes:
                if own := lost.intersection(ChunkId(commit.chunks[part]) for part in batch.parts(index)):
                    batch.fail(index, _not_stored(own.pop()))
            batch.drop_settled()
            left = [index for index in indexes if index in set(batch.wanted)]
            request = m.KeyedCommit(
                session,
                batch.number,
                [batch.keys[index] for index in left],
                [len(batch.parts(index)) for index in left],
                [commit.chunks[part] for index in left for part in batch.parts(index)],
                [batch.depths[index] for index in left],
                resize=batch.resize,
                epoch=epoch,
            )
            note_outcomes(batch, left, await self._homes.ask(commit.client, home, request))
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(MEMBER_ANSWER_S):
                await self._end(home, session)

    async def _begin(self, home: MemberId) -> bytes:
        """Begin a session at a home; it is not lost when the request is cancelled."""
        with trio.CancelScope(shield=True), trio.move_on_after(MEMBER_ANSWER_S):
            return (await self._call(home, m.SessionOpen(), m.SessionOpened)).session
        raise EngineUnreachable(f"it did not answer within {MEMBER_ANSWER_S:g} s", subject=home.hex())

    async def _store_missing(self, home: MemberId, session: bytes, lengths: dict[ChunkId, int]) -> set[ChunkId]:
        """Store chunks at a home unless it has them; returns those that cannot be read any more."""
        names = list(lengths)
        offered = await self._call(home, m.Offer(session, list(names)), m.Offered)
        missing = [chunk for chunk, present in zip(names, offered.present, strict=True) if not present]
        lost: set[ChunkId] = set()
        while missing:
            batch, room = list[ChunkId](), BODY_BYTES_MAX
            while missing and lengths[missing[0]] <= room:
                room -= lengths[missing[0]]
                batch.append(missing.pop(0))
            found = await self._stripes.read([Wanted(chunk, lengths[chunk]) for chunk in batch])
            got = [answer.payload for answer in found if isinstance(answer, Got)]
            lost.update(chunk for chunk, answer in zip(batch, found, strict=True) if not isinstance(answer, Got))
            if got:
                sizes = [len(payload) for payload in got]
                store = m.StoreChunks(session, [ChunkKind.DATA] * len(got), sizes)
                await self._call(home, store, m.Stored, got)
        return lost

    async def _call(self, home: MemberId, request: m.Request, answer: type[M], body: Sequence[Buffer] = ()) -> M:
        reply = await self._members.call(home, request, body)
        reply.body.release()
        assert isinstance(reply.message, answer), f"{type(request).__name__} is answered by {answer.__name__}"
        return reply.message

    async def _end(self, home: MemberId, session: bytes) -> None:
        try:
            await self._call(home, m.SessionEnd(session), m.Done)
        except LakeError:
            return  # it ends with the connection


def _not_stored(chunk: ChunkId) -> ChunkNotFound:
    text = id_text(chunk)
    return ChunkNotFound(f"chunk {text} is not in the store; store it again", subject=text)
