"""A store opened in this process, without an engine, to see what is left: garbage, damage, leaked room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.store.opening import open_store
from engine.upkeep.gc import GcReport
from lakefs.host.offload import ThreadOffload

PAGE = 4096


@dataclass(frozen=True)
class Inspection:
    """The findings of a gc cycle and of a full check, and the room that segments take after them."""

    gc: GcReport
    fsck: dict[str, Any]
    segment_count: int
    allocated_bytes: int

    @property
    def leaked_bytes(self) -> int:
        """Room taken beyond what lives.

        A live chunk may share a page at either end with what is freed, and each segment has a page of header.
        """
        return self.allocated_bytes - (
            self.gc.live_bytes + 2 * PAGE * self.gc.live_chunks + 2 * PAGE * self.segment_count
        )


def inspect(data: Path) -> Inspection:
    """Open, collect without grace, check every byte, stop."""

    async def look() -> Inspection:
        async with (
            ThreadOffload(2, "quiet") as offload,
            open_store(LocalDisk(data), SystemClock(), offload, grace_s=0.0, verify_index=False) as store,
        ):
            report = await store.collector.run()
            return Inspection(
                report,
                await store.check(full=True),
                len(store.segments.register.kinds),
                await store.segments.room.allocated_bytes(),
            )

    return trio.run(look)
