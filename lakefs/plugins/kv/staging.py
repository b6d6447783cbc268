"""Loads of what is not in memory, through memory of the plug-in's own: the host's memory is never lent to be written.

    in memory      the client copies each value to its target, and waits for nothing
    not in memory  the engine writes values to the staging memory; what was checked there is copied to the targets

A load may be given up while the engine, or the kernel for it, still writes: an engine that was stopped goes on when it
wakes, and a read of a disk that hangs ends when the disk does.  The host uses its memory for other blocks by then.  So
what is given up is the staging memory, as a whole, and nothing that the host has.

Rules kept here:
- When the connection is lost, or closed because a job took too long, the memory is abandoned: the next load makes
  another.  After other errors nothing is under way.
- Abandoned memory counts until the kernel says that nobody writes to it any more: at most ABANDONED_MAX are.  Then
  loads fail at once.

Used by one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from lakefs.client.blocking.spaces import Space
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, SessionLost
from lakefs.get.pools import Pool
from lakefs.host.new_memory import can_be_sealed, new_memory
from lakefs.limits import KEYED_VALUE_BYTES_MAX, MIB

STAGING_BYTES: Final = 64 * MIB
"""Most bytes loaded by one call, unless one value has more."""
ABANDONED_MAX: Final = 2


class Staging:
    """The staging memory of one reading thread, made at the first load that needs it."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._abandoned: list[int] = []
        """Descriptors of abandoned memory."""

    def load(self, space: Space, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        """Read values into their targets; return their lengths, 0 for a miss.  After a miss a target holds anything.

        EngineBusy while too much abandoned memory is still written to; LocalFileError without memory; errors of `load`.
        """
        found = space.try_get_many_into(keys, targets)
        if found is not None:
            return found
        views = [target.cast("B") for target in targets]
        lengths: list[int] = []
        for some in _batches(views):
            lengths += self._load(space, keys[some], views[some])
        return lengths

    def close(self) -> None:
        """Give the memory back.  Idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        while self._abandoned:
            os.close(self._abandoned.pop())

    def _load(self, space: Space, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        rooms = [target.nbytes for target in targets]
        offsets = [sum(rooms[:index]) for index in range(len(rooms))]
        pool = self._pool_of(sum(rooms))
        try:
            lengths = space.load(keys, pool, offsets, rooms)
            for target, offset, length in zip(targets, offsets, lengths, strict=True):
                _copy(pool, offset, target[:length])
        except LakeError as error:
            if isinstance(error, EngineUnreachable | SessionLost):
                self._abandon(pool)
            raise
        except BaseException:
            self._abandon(pool)
            raise
        return lengths

    def _pool_of(self, size_bytes: int) -> Pool:
        pool = self._pool
        if pool is not None and pool.size_bytes >= size_bytes:
            return pool
        if pool is not None:
            self._abandon(pool)  # once at most; it is lent until its connection ends
        self._abandoned = [descriptor for descriptor in self._abandoned if not _is_left(descriptor)]
        if len(self._abandoned) > ABANDONED_MAX:
            raise EngineBusy("loads that were given up are still under way in the engine")
        descriptor = new_memory(STAGING_BYTES if size_bytes <= STAGING_BYTES else KEYED_VALUE_BYTES_MAX)
        try:
            self._pool = Pool(descriptor=descriptor)
        finally:
            os.close(descriptor)
        return self._pool

    def _abandon(self, pool: Pool) -> None:
        self._abandoned.append(os.dup(pool.descriptor))
        pool.close()
        self._pool = None


def _batches(targets: Sequence[memoryview]) -> Iterator[slice]:
    """Yield runs of targets of at most STAGING_BYTES together, or of one."""
    begin = size = 0
    for index, target in enumerate(targets):
        if index > begin and size + target.nbytes > STAGING_BYTES:
            yield slice(begin, index)
            begin, size = index, 0
        size += target.nbytes
    if begin < len(targets):
        yield slice(begin, len(targets))


def _copy(pool: Pool, offset: int, target: memoryview) -> None:
    """Copy from the memory to a target, by the kernel: other threads of the host run meanwhile."""
    done = 0
    while done < len(target):
        done += os.preadv(pool.descriptor, [target[done:]], offset + done)


def _is_left(descriptor: int) -> bool:
    """Return True if nobody writes to the memory any more, and close it."""
    if not can_be_sealed(descriptor):
        return False
    os.close(descriptor)
    return True
