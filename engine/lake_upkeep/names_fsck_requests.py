"""The check of another names shard by requests: their handlers where it is led, and the side that asks.

Rules kept here:
- The named chunks of one check are kept at a time, for the connection that asked for it: 128 MiB (NAMED_CHUNKS_MAX).
"""

from __future__ import annotations

import json
from array import array
from typing import Final

from engine.lake_gc.shard_links import ConnectShard, ShardLink, linked
from engine.lake_upkeep.member_answers import report_in
from engine.lake_upkeep.named_chunks import NamedChunks
from engine.lake_upkeep.names_fsck import NamesChecked, ShardFsck
from engine.requests.dispatch import Group
from engine.requests.handlers import handles
from engine.sessions.references import Client
from lakefs.errors import SessionLost
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

NAMED_PAGE: Final = 1 << 17
"""Named chunks of one answer, 8 bytes each: 1 MiB, sorted in 20 ms."""


def fsck_group(fsck: ShardFsck) -> Group:
    """Return the handlers of checks of one shard, for `NamesService`."""
    requests = NamesFsckRequests(fsck)
    return Group([requests], ends=[requests.disconnected])


class NamesFsckRequests:
    """Handlers of CheckNames and ReadNamedChunks."""

    def __init__(self, fsck: ShardFsck) -> None:
        self._fsck = fsck
        self._kept: tuple[Client, NamedChunks] | None = None

    @handles(m.CheckNames)
    async def check(self, client: Client, request: m.CheckNames) -> Reply:
        self._kept = None
        checked = await self._fsck.run(full=request.full)
        self._kept = client, checked.named
        return Reply(m.ReportReply(json.dumps(checked.report)))

    @handles(m.ReadNamedChunks)
    async def read(self, client: Client, request: m.ReadNamedChunks) -> Reply:
        if self._kept is None or self._kept[0] is not client:
            raise SessionLost("no check is kept for this connection; check the names anew")
        named = self._kept[1]
        page = named.page(request.after, NAMED_PAGE)
        more = len(page) == NAMED_PAGE
        return Reply(m.NamedChunksPage(more, named.is_complete), Body([memoryview(page.tobytes())]))

    async def disconnected(self, client: Client) -> None:
        """Forget what is kept for a connection."""
        if self._kept is not None and self._kept[0] is client:
            self._kept = None


async def check_by_requests(connect: ConnectShard, shard: NamesShard, full: bool) -> NamesChecked:
    """Have the leader of a shard check it.  Errors of the connection, and of the check."""
    async with linked(shard, connect) as link:
        report = report_in(await link.ask(m.CheckNames(full), m.ReportReply))
        named, after, more = NamedChunks(), -1, True
        while more:
            page, more = await _page(link, named, after)
            if page:
                after = page[-1]
        return NamesChecked(report, named)


async def _page(link: ShardLink, named: NamedChunks, after: int) -> tuple[array[int], bool]:
    """Read some named chunks; returns them, and True if there are more."""
    reply = await link.call(m.ReadNamedChunks(after))
    assert isinstance(reply.message, m.NamedChunksPage), reply.message
    page = array("Q")
    try:
        page.frombytes(reply.body.joined())
    finally:
        reply.body.release()
    named.add_numbers(page)
    if not reply.message.complete:
        named.leave_incomplete()
        return page, False
    return page, reply.message.more
