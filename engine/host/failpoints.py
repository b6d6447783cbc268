"""Failpoints: named steps of the store at which a test may end, or stop, the process.

A process started with `LAKEFS_FAILPOINT=NAME:COUNT[:SIGNAL]` sends itself that signal (KILL by default) the COUNT-th
time it reaches the step NAME.  Without the variable `reached` does nothing, and no other code of this module runs: no
state, no lock, no read of the environment after the start.

Rules kept here:
- A step is named once in `POINTS` and called at one place; `tests/unit/engine/host/test_failpoints.py` holds both.
- `reached` raises nothing, so a step may be anywhere: between a write and its sync, under a lock, in a thread.
- STOP stops all threads; the test may change the disk under the process before CONT.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
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
    "journal.synced",  # the commit has happened, no answer was sent
    "journal-file.written",
    "journal-file.synced",
    "journal-file.renamed",
    "journal-file.durable",
)
"""Steps that a put may reach."""

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
"""Steps of every start, except for the stale file."""

REBUILD_POINTS: Final = (
    "recovery.rebuilt",  # a new index exists beside the old one's place
    "index.put-aside",
    "index.put-in-place",
    "recovery.index-replaced",
)
"""Steps of a start that finds its index damaged."""

FIRST_START_POINTS: Final = (
    "store.folders-made",
    "reserve.allocated",
    "token.synced",
    "token.renamed",
    "token.durable",
)
"""Steps of the first start of a store, with the native protocol on TCP."""

POINTS: Final = (*WRITE_POINTS, *UPKEEP_POINTS, *START_POINTS, *REBUILD_POINTS, *FIRST_START_POINTS)

REPAIR_POINTS: Final = (
    "repair.set-aside",
    "repair.superblock-restored",
    "repair.tail-applied",  # the index has all that the journal has
    "repair.saved",  # the checkpoint too
    "repair.journal-begun",
    "repair.index-rebuilt",
)
"""Steps of `lake fsck --repair`, which no engine reaches."""

MEMBER_POINTS: Final = ("shard-gc.freed",)  # the free is durable, no page is punched
"""Steps of a member of a lake."""

LAKE_POINTS: Final = (
    "lake-gc.joined",  # names bind nothing any more on what members may free
    "lake-gc.marked",  # members that are left have all marks, none has swept
)
"""Steps of the names of a lake."""

ALL_POINTS: Final = (*POINTS, *REPAIR_POINTS, *MEMBER_POINTS, *LAKE_POINTS)


_nothing: Final[Callable[[str], object]] = bool
"""No failpoint is set.  A built-in call, as every put reaches some steps."""


def armed(setting: str) -> Callable[[str], object]:
    """Make the `reached` for a setting `NAME:COUNT[:SIGNAL]`.  ConfigError when it cannot be parsed."""
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


reached: Final[Callable[[str], object]] = armed(os.environ[VARIABLE]) if VARIABLE in os.environ else _nothing
"""Called when the process reaches the step of that name."""
