"""Counts the shards of chunks that no name refers to, from the members' lists."""

from __future__ import annotations

from collections.abc import Iterable

from engine.host.tasks import run_all
from engine.lake_upkeep.named_chunks import NamedChunks
from engine.members.ports import Members
from lakefs.errors import LakeError
from lakefs.ids import GcGeneration, MemberId
from lakefs.wire import messages as m


async def count_garbage(
    members: Members, asked: Iterable[MemberId], named: NamedChunks, generation: GcGeneration
) -> tuple[int, int]:
    """Return the number and bytes of the shards that the next cycle of gc may free; members that fail are left out.

    What was touched in `generation` or the one before is content of sessions, or will be garbage later.
    """
    count = size = 0

    async def of_member(member: MemberId) -> None:
        nonlocal count, size
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
            after = page.next_after
            if not after:
                return

    async def left_out(member: MemberId) -> None:
        try:
            await of_member(member)
        except LakeError:
            return

    await run_all(left_out, [*asked])
    return count, size
