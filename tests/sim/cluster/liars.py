"""Members that lie to heads: other bytes, with checksums that fit them; another length of a chunk; or both."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import msgspec

from lakefs.content.verify import granule_crcs
from lakefs.ids import Buffer
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from tests.sim.cluster.clients import SimClient


class Lie(Enum):
    """Ways to lie."""

    NONE = auto()
    BYTES = auto()
    LENGTH = auto()
    LONGER = auto()
    """A byte more, and a length of the chunk that fits it."""


class MayLie(Protocol):
    """A member that may lie."""

    lies: Lie


class LyingClient:
    """A connection to a member that lies as it says."""

    draining = False

    def __init__(self, client: SimClient, member: MayLie) -> None:
        self._client = client
        self._member = member

    async def wait_ended(self) -> None:
        """See `MemberClient`."""
        await self._client.wait_ended()

    async def call(self, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()) -> Reply:
        """See `MemberClient`."""
        if self._member.lies is Lie.NONE:
            return await self._client.call(request, body, into=into)
        reply = await self._client.call(request, body)
        message = reply.message
        if self._member.lies is Lie.BYTES and isinstance(message, m.ReadChunksReply):
            return _with_other_bytes(message, reply.body)
        if self._member.lies is Lie.LONGER and isinstance(message, m.ReadChunksReply):
            return _with_more_bytes(message, reply.body)
        if isinstance(message, m.ReadChunksReply | m.ShardsOffered) and self._member.lies is Lie.LENGTH:
            said = [length and length + 1 for length in message.chunk_lengths]
            return Reply(msgspec.structs.replace(message, chunk_lengths=said), reply.body)
        return reply


def _with_other_bytes(message: m.ReadChunksReply, body: Body) -> Reply:
    payload = bytearray(body.joined())
    pieces, at = [], 0
    for piece in message.pieces:
        part = payload[at : at + piece.length]
        for place in range(0, len(part), 500):
            part[place] ^= 0x55
        payload[at : at + piece.length] = part
        pieces.append(msgspec.structs.replace(piece, crcs=granule_crcs(part)))
        at += piece.length
    return Reply(msgspec.structs.replace(message, pieces=pieces), Body([payload] if payload else []))


def _with_more_bytes(message: m.ReadChunksReply, body: Body) -> Reply:
    payload, sent = memoryview(body.joined()), bytearray()
    pieces, lengths, at = [], [], 0
    for index, piece in enumerate(message.pieces):
        part = bytearray(payload[at : at + piece.length])
        at += piece.length
        length = message.chunk_lengths[index] if message.chunk_lengths else len(part)  # none of whole chunks
        is_all = len(part) == length
        if is_all:
            part.append(0x55)
            piece = msgspec.structs.replace(piece, length=len(part), crcs=granule_crcs(part))
        pieces.append(piece)
        lengths.append(length + is_all)
        sent += part
    said = msgspec.structs.replace(message, pieces=pieces, chunk_lengths=lengths if message.chunk_lengths else [])
    return Reply(said, Body([sent] if sent else []))
