"""The shared index of the engine that a client is connected to, and the direct reads through it.

`SharedIndexUser.renewal` requests the index and maps it: once on each connection, and again after the engine has
replaced it.  Clients run it after a read that needed a request anyway.

Rules kept here:
- An index is used on the connection that it was requested on, and on no other.
- A client that gets no index (over TCP, or the engine shares none) sends requests: that is no error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from lakefs.direct.chunk_reads import DirectReads
from lakefs.direct.read_notes import ReadNotes
from lakefs.errors import CorruptionError, EngineBusy, EngineUnreachable, PermissionDenied, UnsupportedVersion
from lakefs.grants import batch_plan as plain_reads
from lakefs.host.descriptors import close_all
from lakefs.lake.lake_steps import LakeSteps
from lakefs.shared_index import table as shared_table
from lakefs.shared_index.table import SharedIndexReader
from lakefs.steps.steps import Steps, send
from lakefs.wire.messages import NoteReads, OpenSharedIndex, Request

R = TypeVar("R", bound=SharedIndexReader)
_ATTEMPTS: Final = 2
_NEVER: Final = -1


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

    def use_shared_index(self, index: SharedIndexReader | None, epoch: int) -> None:
        """Use the index that the engine of connection `epoch` shares, if any, while that connection is current."""
        steps = self._client.steps
        self._reads = (
            None
            if index is None
            else DirectReads(index, steps.descriptors, steps.check, lambda: self._client.is_held(epoch))
        )
        self._index_epoch = epoch

    def renewal(self) -> Steps[None]:
        """Request the engine's index and use it; to be run by itself, when `is_due`."""
        epoch = self._client.epoch
        index = yield from open_shared_index()
        if self._client.epoch == epoch:  # else it may be a lost engine's: the next read asks
            self.use_shared_index(index, epoch)

    def tell_notes(self) -> None:
        """Send the notes of direct reads to the engine; they are dropped if the connection is busy.  Never waits."""
        self._client.tell(NoteReads(self.notes.take()))

    @property
    def is_due(self) -> bool:
        """True if the index is to be requested: once on each connection, and after the engine has replaced it."""
        if not self._client.steps.carries_descriptors:
            return False
        return self._index_epoch != self._client.epoch or (self._reads is not None and not self._reads.index.is_current)


def open_shared_index() -> Steps[SharedIndexReader | None]:
    """Return the engine's shared index, mapped read-only; None if this client gets none and has to send requests.

    Call it again on another connection, and when `SharedIndexReader.is_current` has become False.  Reads work without
    the index, so it is None also when the engine cannot be reached, or has no room for the request.
    """
    if not (shared_table.IS_BUILT and plain_reads.IS_BUILT):
        return None
    try:
        return (yield from opened_index(OpenSharedIndex(), SharedIndexReader))
    except EngineUnreachable:
        return None


def opened_index(request: Request, reader: Callable[[int], R]) -> Steps[R | None]:
    """Return the table that the engine shares for a request, mapped read-only; None if this client gets none.

    EngineUnreachable: the caller would only wait for the engine once more.
    """
    for _ in range(_ATTEMPTS):
        try:
            reply = yield from send(request)
        except (UnsupportedVersion, PermissionDenied, EngineBusy):
            return None
        try:
            return reader(reply.descriptors[0])
        except PermissionDenied:  # its memory could be shrunk
            return None
        except CorruptionError:  # a later version; or the index was replaced while its descriptor was sent
            continue
        finally:
            close_all(reply.descriptors)
    return None
