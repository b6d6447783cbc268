"""The shared index by which a client reads chunks: its engine's, asked for when a read needed a request anyhow.

The drivers of both clients keep it alike; only how they ask differs.
"""

from __future__ import annotations

from typing import Protocol

from lakefs.direct.chunk_reads import DirectReads, SharedIndex
from lakefs.direct.read_notes import ReadNotes
from lakefs.lake.lake_steps import LakeSteps
from lakefs.wire.messages import NoteReads, Request

_NEVER = -1


class Connected(Protocol):
    """A driver, as far as it is used here."""

    steps: LakeSteps

    @property
    def epoch(self) -> int:
        """Counts connections."""

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter, when that needs no wait."""

    def is_held(self, epoch: int) -> bool:
        """Whether the connection of that epoch is still there, and what it holds of the engine."""


class SharedIndexUser:
    """The index of one connection, and the reads by it."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self.forget()

    def forget(self) -> None:
        """Drop the index and the notes, as in a child that was forked: they are the parent's."""
        self._hot: DirectReads | None = None
        self._index_epoch = _NEVER
        self.notes = ReadNotes()
        """Of chunks that were read by it."""

    def direct_reads(self) -> DirectReads | None:
        """Reads that need no round trip; None when the engine of this connection shares no index."""
        return self._hot if self._index_epoch == self._client.epoch else None

    def use_shared_index(self, index: SharedIndex | None, epoch: int) -> None:
        """Read chunks by an index that the engine of that connection shares, if any, while it is this one's."""
        steps = self._client.steps
        self._hot = (
            None
            if index is None
            else DirectReads(index, steps.descriptors, steps.check, lambda: self._client.is_held(epoch))
        )
        self._index_epoch = epoch

    def tell_notes(self) -> None:
        """Tell the engine what was read without it; dropped when the connection is busy.  Nothing is waited for."""
        self._client.tell(NoteReads(self.notes.take()))

    @property
    def is_due(self) -> bool:
        """Whether the engine is to be asked for its index: once on a connection, and when it has replaced it."""
        if not self._client.steps.carries_descriptors:
            return False
        return self._index_epoch != self._client.epoch or (
            self._hot is not None and not self._hot.index.is_current
        )
