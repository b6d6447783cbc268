"""The port `GroupLog`: makes the groups of a store durable, one after the other; and the journal as its implementation.

    append       --  the group is durable                       an answer may say so
    wait_kept    --  the group is in the journal on this disk   the index may hold it

With the journal as the log both are one.  Where names have several replicas, the log is the coordinator's
(`engine.group_log.leader_log`), and the journal of each replica repeats it.

Rules kept here:
- Group n+1 is appended only when group n is durable: a log has no gap.
- An append that failed is the last one.  If its group is in the log, only the next opening finds out.
- The journal on the disk never has a group that the log has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from engine.journal.writer import Journal
from lakefs.errors import LakeError
from lakefs.ids import Sequence
from lakefs.ports import Offload


@dataclass(frozen=True)
class ClosedGroup:
    """A group that takes no more decisions.  `parts`: its packed records, to be joined; `body_bytes`: their length."""

    sequence: Sequence
    parts: list[bytes]
    body_bytes: int
    record_count: int

    def body(self) -> bytes:
        """Return the packed records."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class PayloadBatch(Protocol):
    """Payload to be written and synced before the group behind it."""

    def write(self) -> None:
        """Write and sync; blocks."""
        ...

    def ended(self) -> None:
        """Called on the loop once `write` has returned or raised."""
        ...


class PayloadSource(Protocol):
    """The owner of payload that is placed and not yet written."""

    urge: Callable[[], None]
    """Called by the source to have placed payload written soon; does not wait."""

    def take(self) -> PayloadBatch | None:
        """Take all payload placed until now; None when there is none."""
        ...

    def stop(self, error: LakeError) -> None:
        """Called when no group will be appended any more."""
        ...


class GroupLog(Protocol):
    """The log of one store's groups.  One task appends; used on the loop."""

    @property
    def kept(self) -> Sequence:
        """The last group that is in the journal on this disk, synced."""
        ...

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        """Write payload first, then append the group; durable on return.

        After an error it is unknown if the group is in the log, and every later append fails.  Cancelled, it is
        unknown, too.  StoreFull, StoreReadOnly, DiskFailed; of a log elsewhere: CoordinatorLost.
        """
        ...

    async def wait_kept(self, sequence: Sequence) -> None:
        """Return when the journal on this disk has a durable group, synced; without a checkpoint when it has.

        Returns too when it never will, as `kept` says; the committer has failed then, or will in a moment.
        """
        ...


class JournalLog:
    """The journal as the log: written and synced in a thread, the payload before it in the same call."""

    def __init__(self, journal: Journal, offload: Offload, kept: Sequence) -> None:
        """`kept`: the group that the journal continues behind.  `offload` should always have a thread free."""
        self.kept = kept
        self._journal = journal
        self._offload = offload

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        """See the port.  Not interrupted by cancellation."""
        with trio.CancelScope(shield=True):
            await self._offload.run(self._append_blocking, group, payload)
        if group is not None:
            self.kept = group.sequence

    async def wait_kept(self, sequence: Sequence) -> None:
        """See the port: what is durable is kept."""

    def _append_blocking(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        if payload is not None:
            payload.write()
        if group is not None:
            self._journal.append_blocking(group.sequence, group.body(), group.record_count)
