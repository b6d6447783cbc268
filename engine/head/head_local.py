"""Requests of clients on a head's machine about keys: what they look keys up in, segments, and notes of their use.

Rules kept here:
- Descriptors are for trusted clients on this machine only (`engine.requests.local_clients.require_local`).
- Notes of keys reach their homes, which evict by them.  They are advice: a home that is away gets none.
- Notes also bound how long a client finds values of a removed space at a home that the remover could not reach: a home
  is given the lake's spaces, HEAD_SPACES_FRESH_S old at most, before it is sent a note.
"""

from __future__ import annotations

from contextlib import suppress

from engine.chunks.manifests import checked_chunks
from engine.head.head_clients import HeadClient
from engine.head.head_tier import HeadTier
from engine.head.key_homes import KeyHomes
from engine.host.tasks import run_all
from engine.keyed.values import key_problem
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys
from engine.requests.local_clients import SEGMENTS_PER_REQUEST_MAX, require_local
from lakefs.errors import OperationalError, RequestTooLarge
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class HeadLocal:
    """Handlers of OpenKeyHomes, OpenSegments and NoteReads."""

    def __init__(self, homes: KeyHomes, tier: HeadTier) -> None:
        self._homes = homes
        self._tier = tier

    @handles(m.OpenKeyHomes)
    async def open_key_homes(self, client: HeadClient) -> Reply:
        require_local(client, "key homes are shared on the Unix socket only; use KeyedMatch instead")
        memory = await self._homes.shared()
        return Reply(m.KeyHomesOpened([index.number for index in memory.indexes]), descriptors=memory.descriptors)

    @handles(m.OpenSegments)
    async def open_segments(self, client: HeadClient, request: m.OpenSegments) -> Reply:
        require_local(client, "descriptors are given on the Unix socket only; ask for the bytes instead")
        if len(request.segments) > SEGMENTS_PER_REQUEST_MAX:
            raise RequestTooLarge(f"at most {SEGMENTS_PER_REQUEST_MAX} segments in one request")
        found, descriptors = await self._homes.local.segments(request.segments)
        return Reply(m.SegmentsOpened(found), descriptors=descriptors)

    @handles(m.NoteReads)
    async def note_reads(self, client: HeadClient, request: m.NoteReads) -> Reply:
        self._tier.note_reads(checked_chunks(request.chunks))
        check_keys(request.keys)
        if request.keys:
            await self._note_keys(client, request)
        return Reply(m.Done())

    async def _note_keys(self, client: HeadClient, request: m.NoteReads) -> None:
        await self._homes.check(client, request.space)
        good = [index for index, key in enumerate(request.keys) if key_problem(key) is None]
        by_home = self._homes.by_home(request.space, request.keys, good)

        async def note_at(home: MemberId) -> None:
            note = m.NoteReads([], request.space, [request.keys[index] for index in by_home[home]])
            with suppress(OperationalError):
                (await self._homes.ask(client, home, note)).body.release()

        await run_all(note_at, list(by_home))
