"""Results of a sync: one outcome for each name that was acted upon, totals, and the observer that is called with
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from lakefs.errors import LakeError


class Done(StrEnum):
    """Result for one name."""

    COPIED = "copied"
    REMOVED = "removed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class SyncOutcome:
    """The end of one name, a path below both sides; in a dry run, what would have been its end.

    `reason`: the reason for it.  `new_bytes`: bytes that the target did not have.
    """

    path: str
    done: Done
    reason: str = ""
    size_bytes: int = 0
    new_bytes: int = 0
    error: LakeError | None = None


@dataclass
class SyncTotals:
    """Counts of names.  `newer`: left because the target's was newer.  `withheld`: the reason why nothing was removed;
    "": there is none."""

    names: dict[Done, int] = field(default_factory=lambda: dict.fromkeys(Done, 0))
    unchanged: int = 0
    newer: int = 0
    size_bytes: int = 0
    new_bytes: int = 0
    withheld: str = ""

    @property
    def is_in_step(self) -> bool:
        """True if the target is what the source is, as far as was asked for."""
        return not (self.names[Done.SKIPPED] or self.names[Done.FAILED] or self.withheld)

    def count(self, outcome: SyncOutcome) -> None:
        """Add one name."""
        self.names[outcome.done] += 1
        if outcome.done is Done.COPIED:
            self.size_bytes += outcome.size_bytes
            self.new_bytes += outcome.new_bytes


def _nothing(outcome: SyncOutcome) -> None:
    """Do nothing; the observer's default."""


@dataclass(frozen=True)
class SyncObserver:
    """Callbacks: `outcome` once for each name acted upon; `planned` with (names, bytes) that are to be copied;
    `progress` with increments (bytes done, of those already present)."""

    outcome: Callable[[SyncOutcome], None] = _nothing
    planned: Callable[[int, int], None] = lambda names, size_bytes: None
    progress: Callable[[int, int], None] = lambda done, present: None
