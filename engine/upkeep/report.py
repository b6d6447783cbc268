"""What cycles of gc with the compaction behind them did: one cycle, and all of a process."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.upkeep.compaction import CompactionReport
from engine.upkeep.gc import GcReport


@dataclass
class CollectReport(GcReport):
    """What a cycle of gc and the compaction behind it did."""

    compaction: CompactionReport = field(default_factory=CompactionReport)


@dataclass
class CollectTotals:
    """What all cycles of this process did; grows only."""

    cycles: int = 0
    freed_bytes: int = 0
    moved_bytes: int = 0
    last_ended_ns: int = 0

    def add(self, report: CollectReport, now_ns: int) -> None:
        """Count a cycle that has ended."""
        self.cycles += 1
        self.freed_bytes += report.freed_bytes
        self.moved_bytes += report.compaction.moved_bytes
        self.last_ended_ns = now_ns
