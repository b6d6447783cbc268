"""Named steps of the store at which a test may end, or stop, the process.

A process that was started with `LAKEFS_FAILPOINT=NAME:COUNT[:SIGNAL]` sends itself that signal (KILL by default) the
COUNT-th time it comes to the step NAME.  Without the variable `reached` is a function that does nothing, and nothing
else of this module runs: no state, no lock, no look at the environment after the start.

Rules kept here:
- A step is named once in `POINTS` and called at one place; `tests/unit/engine/host/test_failpoints.py` holds both.
- `reached` raises nothing, so a step may lie anywhere: between a write and its sync, under a lock, in a thread.
- STOP stops all threads; whoever stopped the process may change the disk under it before CONT.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Final

from lakefs.errors import ConfigError

VARIABLE: Final = "LAKEFS_FAILPOINT"

WRITE_POINTS: Final = (
    "segment.header-synced",  # the file and its header are durable, its name is not
    "segment.durable",
    "segment.extended",  # room taken, nothing written there
    "large.written",
    "large.synced",  # payload durable, nothing refers to it
    "small.zeroed",
    "small.written",
    "small.synced",
    "segment.cut",  # the tail is off, and that is not synced
    "segment.full",  # a full small segment, before its tail is cut
    "journal.extended",
    "journal.written",
    "journal.synced",  # the commit has happened, nobody was told
    "journal-file.written",
    "journal-file.synced",
    "journal-file.renamed",
    "journal-file.durable",
)
"""Steps that every put may come to."""

UPKEEP_POINTS: Final = (
    "index.before-commit",
    "index.committed",
    "checkpoint.written",
    "checkpoint.synced",
    "checkpoint.renamed",
    "checkpoint.durable",
    "checkpoint.one-removed",
    "gc.marked",
    "gc.freed",  # the free is durable, no page is punched
    "gc.punched",
    "gc.swept",
    "gc.segment-punched",
    "gc.segment-unlinked",
    "gc.segment-removed",
    "segment.page-punched",
    "compaction.sealed",
    "compaction.copied",  # payload has a second place, no record names it
    "compaction.moved",  # records name the new places, durably; the old ones are not punched
    "compaction.punched",
    "compaction.segment-removed",
    "scrub.page-checked",
    "scrub.saved",
)
"""Steps of index, checkpoint, garbage collection, compaction and scrub."""

START_POINTS: Final = (
    "superblock.synced",
    "superblock.renamed",
    "superblock.durable",
    "recovery.index-opened",
    "recovery.stale-removed",  # a journal file that nothing durable was written to
    "recovery.journal-begun",
    "recovery.replayed",
)
"""Steps of every start, but for the stale file."""

REBUILD_POINTS: Final = (
    "recovery.rebuilt",  # a new index stands beside the old one's place
    "index.put-aside",
    "index.put-in-place",
    "recovery.index-replaced",
)
"""Steps of a start that finds its index damaged."""

FIRST_START_POINTS: Final = ("store.folders-made", "reserve.allocated", "token.synced", "token.renamed")
"""Steps of the first start of a store, with the native protocol on TCP."""

POINTS: Final = (
    *WRITE_POINTS,
    *UPKEEP_POINTS,
    *START_POINTS,
    *REBUILD_POINTS,
    *FIRST_START_POINTS,
)

REPAIR_POINTS: Final = (
    "repair.set-aside",
    "repair.superblock-restored",
    "repair.tail-applied",  # the index has all that the journal has
    "repair.saved",  # the checkpoint too
    "repair.journal-begun",
    "repair.index-rebuilt",
)
"""Steps of `lake fsck --repair`, which no engine comes to."""

ALL_POINTS: Final = (*POINTS, *REPAIR_POINTS)


def _nothing(point: str) -> None:
    """No test is under way."""


def armed(setting: str) -> Callable[[str], None]:
    """What `reached` is under `NAME:COUNT[:SIGNAL]`.  ConfigError when that cannot be read."""
    wanted, _, rest = setting.partition(":")
    count, _, name = rest.partition(":")
    number = getattr(signal, f"SIG{name or 'KILL'}", None)
    if wanted not in ALL_POINTS or not count.isdecimal() or number is None:
        raise ConfigError(f"{VARIABLE}={setting!r}: give NAME:COUNT or NAME:COUNT:STOP, NAME one of {POINTS}")
    left = int(count)
    lock = threading.Lock()

    def reached(point: str) -> None:
        nonlocal left
        if point != wanted:
            return
        with lock:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)

    return reached


def _chosen(environ: Mapping[str, str]) -> Callable[[str], None]:
    setting = environ.get(VARIABLE)
    return _nothing if setting is None else armed(setting)


reached: Final[Callable[[str], None]] = _chosen(os.environ)
"""The step of this name has been reached."""
