"""Results of gc cycles with the compaction behind them: of one cycle, and of all cycles of a process."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.upkeep.compaction import CompactionReport
from engine.upkeep.gc import GcReport


@dataclass
class CollectReport(GcReport):
    """The result of a cycle of gc and the compaction behind it."""

    compaction: CompactionReport = field(default_factory=CompactionReport)


@dataclass
class CollectTotals:
    """Sums over all cycles of this process; they only grow."""

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
