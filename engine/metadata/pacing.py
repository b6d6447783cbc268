"""How fast upkeep goes: at full speed while nobody writes, and with rests while somebody does.

Upkeep on the loop is cut in steps of well under a millisecond.  A request crosses the loop several times, so it meets
a step at each crossing when upkeep never rests; when it rests for three times as long as it has worked, seldom one.
What a step waited for counts as work: its writes and syncs keep those of others waiting, too.
"""

from __future__ import annotations

from typing import Final

import trio

from engine.metadata.metadata_store import Metadata
from lakefs.ids import Sequence

REST_AFTER_LOOKING: Final = 3.0
"""Seconds of rest for each second of walking records."""
REST_AFTER_WRITING: Final = 2.0
"""The same of copying payload."""
REST_S_MAX: Final = 1.0
QUIET_S: Final = 0.25
"""Without a change of names for so long, nobody writes."""


class Writers:
    """When names were last changed, by whomever."""

    def __init__(self, metadata: Metadata) -> None:
        self.changed_at = -QUIET_S
        metadata.on_joined(self._joined)

    def _joined(self, sequence: Sequence, notes: list[object]) -> None:
        """Upkeep itself notes nothing."""
        self.changed_at = trio.current_time()


class Pacing:
    """Of one piece of upkeep, from its beginning on."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self._worked_since = trio.current_time()

    @property
    def somebody_writes(self) -> bool:
        """Whether names were changed a moment ago."""
        return trio.current_time() - self._writers.changed_at < QUIET_S

    async def rest(self, times: float = REST_AFTER_LOOKING) -> None:
        """Between two steps; always a checkpoint."""
        worked_s = trio.current_time() - self._worked_since
        await trio.sleep(min(times * worked_s, REST_S_MAX) if self.somebody_writes else 0.0)
        self._worked_since = trio.current_time()
