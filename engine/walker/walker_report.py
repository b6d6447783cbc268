"""Counts of a walk, and what it left undone: for status, JSON-able.

A stripe is *left* when the walk could not make it whole, or could not see that it is: `left` counts them by reason.
Healed is what a walk says that left none, and that every member it asked has answered.  A stripe with too few shards
cannot be made whole; what is left of it is at home all the same, where gc may free it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

NAMED_MAX: Final = 32
"""Chunks that a report names: enough to begin looking."""


class Left(StrEnum):
    """Reasons why a stripe was left as it is."""

    AWAY = "a member is away"
    FULL = "a home is full"
    REFUSED = "a home does not take shards"
    TOO_FEW = "fewer shards than make the chunk: damage, or what a writer or gc has left"
    DAMAGED = "no choice of the shards makes the chunk"
    NO_CHUNK = "shards that no chunk has, by their numbers or lengths"
    STRAY_KEPT = "a shard elsewhere was touched while it was moved, or nobody knows which of its copies is right"
    CHANGING = "it changed as often as it was looked at"


class WalkReport(msgspec.Struct):
    """Sums of one walk, or of many.  Bytes are of shards."""

    partitions: int = 0
    chunks: int = 0
    checked: int = 0
    """Chunks that were read and compared with their ids."""
    rebuilt: int = 0
    """Shards that were decoded from others, and stored."""
    moved: int = 0
    """Shards that were copied home."""
    dropped: int = 0
    """Copies elsewhere that were dropped."""
    replaced: int = 0
    """Shards that were not those of their chunks, dropped and stored anew."""
    damaged_elsewhere: int = 0
    """Damaged shards elsewhere that stayed: of chunks that are not whole, or because they were touched."""
    bytes_read: int = 0
    bytes_written: int = 0
    left: dict[str, int] = msgspec.field(default_factory=dict)
    """Stripes that were left, by the value of `Left`."""
    named: list[str] = msgspec.field(default_factory=list)
    """The first chunks that were left."""
    unanswered: set[str] = msgspec.field(default_factory=set)
    """Members that were asked and did not answer, in hex."""

    @property
    def is_healed(self) -> bool:
        """True if every stripe that was walked is whole now, all shards at home, and nobody was silent."""
        return not self.left and not self.unanswered

    @property
    def is_home(self) -> bool:
        """True if every shard is at its home, and nobody was silent: some stripes may have too few.

        Damaged shards are not counted: what is left of them elsewhere, no table leads to.
        """
        return not self.unanswered and self.left.keys() <= {Left.TOO_FEW.value}

    def leave(self, chunk: str, reason: Left) -> None:
        """Count a stripe that is left."""
        self.left[reason.value] = self.left.get(reason.value, 0) + 1
        if len(self.named) < NAMED_MAX:
            self.named.append(chunk)

    def add(self, other: WalkReport) -> None:
        """Add the sums of another walk."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.left.items():
            self.left[reason] = self.left.get(reason, 0) + count
        self.named = (self.named + other.named)[:NAMED_MAX]
        self.unanswered |= other.unanswered

    def as_json(self) -> dict[str, Any]:
        """Return the report for people and scripts."""
        fields = msgspec.structs.asdict(self)
        return {**fields, "unanswered": sorted(self.unanswered), "healed": self.is_healed}


_COUNTS: Final = tuple(field.name for field in msgspec.structs.fields(WalkReport) if field.type is int)
