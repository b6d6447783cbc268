"""Offers shards to members: one request a member for many chunks, and the lengths of what is present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.stripes.request_parts import request_parts
from lakefs.cluster.table import Table
from lakefs.errors import InvalidArgument, LakeError, StaleEpoch
from lakefs.ids import ChunkId, GcGeneration, MemberId
from lakefs.wire import messages as m

Name = tuple[ChunkId, int]
Place = tuple[MemberId, ChunkId, int]
"""A shard at a member."""


class Lengths(NamedTuple):
    """Bytes of a shard, and of its chunk."""

    shard: int
    chunk: int


async def offered(
    members: Members, table: Table, generation: GcGeneration, places: Iterable[Place]
) -> Mapping[Place, Lengths]:
    """Return lengths of the shards that are present, durable and touched, and of their chunks as the members say them.

    A shard that is not present has the length 0; of members that fail there is nothing.  StaleEpoch.
    """
    found: dict[Place, Lengths] = {}
    by_member: dict[MemberId, list[Name]] = {}
    for member, chunk, shard in places:
        if members.is_up(member):
            by_member.setdefault(member, []).append((chunk, shard))

    async def offer(send: tuple[MemberId, Sequence[Name]]) -> None:
        member, names = send
        request = m.OfferShards(
            table.ring_epoch, generation, [chunk for chunk, _ in names], [shard for _, shard in names]
        )
        try:
            reply = await members.call(member, request)
        except (StaleEpoch, InvalidArgument):
            raise
        except LakeError:
            return
        reply.body.release()
        offered = reply.message
        assert isinstance(offered, m.ShardsOffered)
        if not len(names) == len(offered.lengths) == len(offered.chunk_lengths):
            return
        for (chunk, shard), *lengths in zip(names, offered.lengths, offered.chunk_lengths, strict=True):
            found[member, chunk, shard] = Lengths(*lengths)

    await run_all(
        offer, [(member, part) for member, names in by_member.items() for part in request_parts(names, lambda _: 0)]
    )
    return found
