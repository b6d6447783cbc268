"""Gc and fsck of any kind of engine, as the contract needs them: a lake frees by three cycles."""

from __future__ import annotations

from typing import Any, Final

from lakefs.findings import Finding
from lakefs.lake.lake_steps import LakeSteps
from lakefs.steps.steps import Steps
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import Engine
from tests.store_rig import gc

CYCLES_OF_LAKES: Final = 3
"""Garbage may have been touched in the generation of the first cycle, so the third frees it."""
_OF_MEMBERS_AWAY: Final = {Finding.MEMBER_UNCHECKED.code, Finding.STRIPE_SHORT.code}


async def collected(engine: Engine, client: EngineClient) -> dict[str, int]:
    """Collect until all garbage is gone; return the counts of live and freed chunks, and of expired uploads."""
    if engine.chunk_count is None:
        return await gc(client)
    before = await engine.chunk_count()
    expired = sum([(await gc(client))["expired_uploads"] for _ in range(CYCLES_OF_LAKES)])
    after = await engine.chunk_count()
    return {"live_chunks": after, "freed_chunks": before - after, "expired_uploads": expired}


def notes_of(report: dict[str, Any]) -> int:
    """Return the notes of fsck, without those that are about members away."""
    codes = [finding["code"] for finding in report["findings"] if finding["severity"] == "note"]
    assert len(codes) == report["notes"]
    return sum(code not in _OF_MEMBERS_AWAY for code in codes)


def collected_by(steps: LakeSteps) -> Steps[int]:
    """Collect until all garbage is gone; return the count of freed chunks, of a lake that of cycles which freed."""
    freed = 0
    for _ in range(CYCLES_OF_LAKES):
        report = yield from steps.gc()
        if "freed_shards" not in report:  # one engine
            return int(report["freed_chunks"])
        freed += bool(report["freed_shards"])
    return freed
