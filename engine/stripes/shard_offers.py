"""Offers shards to members: one request a member for many chunks, and the lengths of the shards that are present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.host.tasks import run_all
from engine.members.ports import Members
from lakefs.cluster.table import Table
from lakefs.errors import InvalidArgument, LakeError, StaleEpoch
from lakefs.ids import ChunkId, GcGeneration, MemberId
from lakefs.limits import BATCH_MAX
from lakefs.wire import messages as m

Name = tuple[ChunkId, int]
Place = tuple[MemberId, ChunkId, int]
"""A shard at a member."""


async def offered(
    members: Members, table: Table, generation: GcGeneration, places: Iterable[Place]
) -> Mapping[Place, int]:
    """Return the lengths of the shards that are present, durable and touched; members that fail have none.

    StaleEpoch.
    """
    lengths: dict[Place, int] = {}
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
        assert isinstance(reply.message, m.ShardsOffered)
        for (chunk, shard), length in zip(names, reply.message.lengths, strict=True):
            if length:
                lengths[member, chunk, shard] = length

    await run_all(
        offer,
        [
            (member, names[begin : begin + BATCH_MAX])
            for member, names in by_member.items()
            for begin in range(0, len(names), BATCH_MAX)
        ],
    )
    return lengths
