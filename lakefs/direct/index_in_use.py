"""The shared index that a client reads chunks by: that of its engine, requested when a read needed a request anyway.

Blocking and trio clients both use this; they differ only in the way they send the request.
"""

from __future__ import annotations

from typing import Protocol

from lakefs.direct.chunk_reads import DirectReads, SharedIndex
from lakefs.direct.read_notes import ReadNotes
from lakefs.lake.lake_steps import LakeSteps
from lakefs.wire.messages import NoteReads, Request

_NEVER = -1


class Connected(Protocol):
    """The part of a client that `SharedIndexUser` uses."""

    steps: LakeSteps

    @property
    def epoch(self) -> int:
        """Count of connections so far."""

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter, if that needs no wait; return True if it was sent."""

    def is_held(self, epoch: int) -> bool:
        """Return True if the connection of that epoch is still open, so that the engine keeps its leases."""


class SharedIndexUser:
    """The index of one connection, and the direct reads by it."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self.forget()

    def forget(self) -> None:
        """Drop the index and the notes, as in a child that was forked: they are the parent's."""
        self._reads: DirectReads | None = None
        self._index_epoch = _NEVER
        self.notes = ReadNotes()
        """Notes of chunks that were read by the index."""

    def direct_reads(self) -> DirectReads | None:
        """Return reads that need no round trip; None when the engine of this connection shares no index."""
        return self._reads if self._index_epoch == self._client.epoch else None

    def use_shared_index(self, index: SharedIndex | None, epoch: int) -> None:
        """Use the index that the engine of connection `epoch` shares, if any, while that connection is current."""
        steps = self._client.steps
        self._reads = (
            None
            if index is None
            else DirectReads(index, steps.descriptors, steps.check, lambda: self._client.is_held(epoch))
        )
        self._index_epoch = epoch

    def tell_notes(self) -> None:
        """Send the notes of direct reads to the engine; they are dropped if the connection is busy.  Never waits."""
        self._client.tell(NoteReads(self.notes.take()))

    @property
    def is_due(self) -> bool:
        """True if the index is to be requested: once on each connection, and after the engine has replaced it."""
        if not self._client.steps.carries_descriptors:
            return False
        return self._index_epoch != self._client.epoch or (self._reads is not None and not self._reads.index.is_current)
