"""The shared index in use: the direct reads through it, and the notes of what was read so.

Clients run `renewal` after a read that needed a request anyway.  Reads work without the index, so an engine that cannot
be reached then is no error.
"""

from __future__ import annotations

from contextlib import suppress

from lakefs.direct.chunk_reads import DirectReads
from lakefs.direct.read_notes import ReadNotes
from lakefs.errors import EngineUnreachable
from lakefs.grants import batch_plan as plain_reads
from lakefs.shared_index import table as shared_table
from lakefs.shared_index.table import SharedIndexReader
from lakefs.shares.share import Share, opened
from lakefs.steps.steps import Steps
from lakefs.wire.messages import NoteReads, OpenSharedIndex


class IndexInUse(Share[DirectReads]):
    """The index of one connection, and the direct reads by it."""

    def forget(self) -> None:
        """Drop the index and the notes."""
        super().forget()
        self.notes = ReadNotes()
        """Notes of chunks that were read by the index."""

    def renewal(self) -> Steps[None]:
        """Request the engine's index and use it; to be run by itself, when `is_due`.  Raises no LakeError."""
        with suppress(EngineUnreachable):
            yield from super().renewal()

    def tell_notes(self) -> None:
        """Send the notes of direct reads to the engine; they are dropped if the connection is busy.  Never waits."""
        self._client.tell(NoteReads(self.notes.take()))

    def reads_by(self, index: SharedIndexReader, epoch: int) -> DirectReads:
        """Return the reads by an index of the connection `epoch`, for `use`."""
        steps = self._client.steps
        return DirectReads(index, steps.descriptors, steps.check, lambda: self._client.is_held(epoch))

    @property
    def _is_offered(self) -> bool:
        return self._client.steps.offers.shared_index

    def _opened(self, epoch: int) -> Steps[DirectReads | None]:
        if not (shared_table.IS_BUILT and plain_reads.IS_BUILT):
            return None
        return self.reads_by((yield from opened(OpenSharedIndex(), SharedIndexReader)), epoch)

    def _is_current(self, found: DirectReads) -> bool:
        return found.index.is_current
