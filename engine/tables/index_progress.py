"""Progress of work on a whole index: a walk that checks it, or a rebuild.  Written by one thread, read by any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from lakefs.ids import Sequence

LOGGED_EVERY_RECORDS: Final = 1_000_000
"""A rebuild logs its progress after this many records: some seconds to a minute of work, depending on the disk."""
_log: Final = structlog.get_logger(__name__)


class IndexProgress:
    """The work under way, "" when there is none, and its progress as text for people."""

    __slots__ = ("_logged", "_records", "doing", "text")

    def __init__(self) -> None:
        self._set("")

    @contextmanager
    def of(self, doing: str) -> Iterator[None]:
        """Report the work as under way until the block ends."""
        self._set(doing)
        try:
            yield
        finally:
            self._set("")

    def _set(self, doing: str) -> None:
        self.doing, self.text = doing, "begun"
        self._records = self._logged = 0

    def checked(self, records: int, of: int) -> None:
        """Set the number of records that the walk has compared."""
        self.text = f"{records} of {of} records checked"

    def loaded(self, records: int, of: int) -> None:
        """Set the number of the checkpoint's records that are in the new index."""
        self.text = f"{records} of {of} records of the checkpoint restored"
        self._log_now_and_then(records)

    def replayed(self, records: int, sequence: Sequence, upto: Sequence) -> None:
        """Add `records` of the journal's groups up to `sequence`, which are in the new index now."""
        self.text = f"the checkpoint and the journal up to group {sequence} of {upto} restored"
        self._log_now_and_then(self._records + records)

    def _log_now_and_then(self, records: int) -> None:
        self._records = records
        if records - self._logged >= LOGGED_EVERY_RECORDS:
            self._logged = records
            _log.warning("the index is being rebuilt", progress=self.text)
