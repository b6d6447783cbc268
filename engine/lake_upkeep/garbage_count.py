"""Counts the shards of chunks that no name refers to, from the members' lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.host.tasks import run_all
from engine.lake_upkeep.named_chunks import NamedChunks
from engine.members.ports import Members
from lakefs.errors import LakeError
from lakefs.ids import GcGeneration, MemberId
from lakefs.wire import messages as m


class Garbage(NamedTuple):
    """Shards of chunks that no name refers to: their number and bytes, and the number of damaged ones beside them."""

    shards: int
    size_bytes: int
    damaged: int


async def count_garbage(
    members: Members, asked: Iterable[MemberId], named: NamedChunks, generation: GcGeneration
) -> Garbage:
    """Return the shards that the next cycle of gc may free; members that fail are left out.

    What was touched in `generation` or the one before is content of sessions, or will be garbage later.  Members do not
    say when a damaged shard was touched, or its length: all are counted.
    """
    count = size = damaged = 0

    async def of_member(member: MemberId) -> None:
        nonlocal count, size, damaged
        after = b""
        while True:
            reply = await members.call(member, m.ListShards(after=after, limit=m.LIST_SHARDS_MAX))
            reply.body.release()
            page = reply.message
            assert isinstance(page, m.ShardsListed), page
            absent = named.absent(page.chunks)
            for is_absent, length, touched in zip(absent, page.lengths, page.touched, strict=True):
                if is_absent and touched < generation - 1:
                    count, size = count + 1, size + length
            damaged += sum(named.absent(page.damaged_chunks))
            after = page.next_after
            if not after:
                return

    async def left_out(member: MemberId) -> None:
        try:
            await of_member(member)
        except LakeError:
            return

    await run_all(left_out, [*asked])
    return Garbage(count, size, damaged)
