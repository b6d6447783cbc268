"""Stamps of one engine: counters in shared memory, turned when records of names change (`lakefs.stamps.stamps`).

    begin        in the engine's thread, before anything is served
    turn         in the step in which the mutations of a decision become visible (`engine.metadata.group_commit`)
    of           in the step in which an answer was read (`engine.tables.recorded_view`); the answer takes the set along
    end          at the stop, before the lock of the store's folder is released

Rules kept here:
- Records become visible through `Committer._join`, which turns their stamps.  There are two other ways: recovery
  replays the journal before there are stamps; and a rebuilt index replaces a damaged one, which turns all stamps,
  because a damaged index may have hidden records.
- Repeated answers are those of a living engine that has the store: the memory has a mutex that the engine's thread
  holds, and that the kernel marks when the thread has ended in any way (`lakefs/stamps/stamps.h`).
- An engine that cannot have the memory serves without stamps, and logs why.
- Slots are chosen by `hash`, which differs from process to process: only this engine knows which slot a record has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from engine.memory.sealed_memory import SealedMemory
from engine.tables.recorded_view import STAMPED
from lakefs.errors import EngineBusy, LakeError, UnsupportedVersion
from lakefs.limits import STAMP_COUNT
from lakefs.stamps import stamps as shared_stamps
from lakefs.stamps.stamps import StampMemory, memory_bytes

_log: Final = structlog.get_logger(__name__)


class Stamps:
    """The stamps of one engine, used in its thread only.  The constructor blocks for a few milliseconds."""

    def __init__(self) -> None:
        """Allocate the memory.  EngineBusy: memory is short; UnsupportedVersion: the native module is not built."""
        if not shared_stamps.IS_BUILT:
            raise UnsupportedVersion("the native module lakefs.stamps._stamps is not built")
        self._memory = SealedMemory("lake-stamps", memory_bytes(STAMP_COUNT))
        self._stamps = StampMemory(self._memory.view, STAMPED)
        self.of: Final = self._stamps.of
        """Return the set of stamps of a list of records; b"" for none, or too many."""
        self.turn: Final = self._stamps.turn
        """Turn the stamps of the records that mutations change; 0.2 us for the mutations of a put."""
        self.turn_all: Final = self._stamps.turn_all
        """Turn every stamp, so that no answer given before is repeated."""

    def begin(self) -> None:
        """Let stamps stand from now on.  EngineBusy if the machine has no robust mutex; the memory is released then."""
        try:
            self._stamps.begin()
        except OSError as error:
            self._memory.close()
            raise EngineBusy(f"stamps need a robust mutex, which this machine does not have: {error}") from error

    def end(self) -> None:
        """Let no stamp stand from now on, and release the memory; clients may have it mapped."""
        self._stamps.end()
        self._memory.close()

    @property
    def descriptor(self) -> int:
        """A read-only descriptor of the memory, to send to clients; `end` closes it."""
        return self._memory.descriptor


@contextmanager
def open_stamps() -> Iterator[Stamps | None]:
    """Yield new stamps, which end with the block; None, and a warning in the log, if there are none to be had."""
    try:
        stamps = Stamps()
        stamps.begin()
    except LakeError as error:
        _log.warning("names have no stamps: clients ask for every answer", reason=error.message)
        yield None
        return
    try:
        yield stamps
    finally:
        stamps.end()
