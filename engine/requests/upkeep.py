"""Requests for upkeep: gc and compaction, checks, scrub."""

from __future__ import annotations

import json
from dataclasses import asdict

from engine.requests.handlers import handles
from engine.store.store import Store
from lakefs.errors import InvalidArgument
from lakefs.limits import COMPACT_SHARE, COMPACT_SHARE_MOST, SCRUB_STEP_S_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class UpkeepRequests:
    """Handlers of requests for upkeep."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @handles(m.RunGc)
    async def _run_gc(self, request: m.RunGc) -> Reply:
        report = await self._store.collect(COMPACT_SHARE_MOST if request.compact else COMPACT_SHARE)
        return Reply(m.ReportReply(json.dumps(asdict(report))))

    @handles(m.RunFsck)
    async def _run_fsck(self, request: m.RunFsck) -> Reply:
        return Reply(m.ReportReply(json.dumps(await self._store.check(full=request.full))))

    @handles(m.RunScrub)
    async def _run_scrub(self, request: m.RunScrub) -> Reply:
        scrubber = self._store.scrubber
        check_scrub(request)
        done = False
        if request.for_s:
            rate = None if request.rate_bytes_per_s < 0 else request.rate_bytes_per_s
            done = await scrubber.advance(request.for_s, rate_bytes_per_s=rate, restart=request.restart)
        report = {"done": done, **scrubber.status()}
        if request.damaged:
            report["damaged"] = await self._store.damaged()
        return Reply(m.ReportReply(json.dumps(report)))


def check_scrub(request: m.RunScrub) -> None:
    """Raise InvalidArgument for a time or rate that no scrub has."""
    if not 0 <= request.for_s <= SCRUB_STEP_S_MAX or request.rate_bytes_per_s < -1:
        raise InvalidArgument(f"a scrub goes on for 0 to {SCRUB_STEP_S_MAX:.0f} seconds, at a rate of -1 or more")
