"""Spaces of keyed blobs for the trio client: `space = await lake.space("llama-70b/tp2", quota="200G")`.

The methods are those of `lakefs.lake.spaces.SpaceSteps`, awaited.  Keys are found through the engine's keyed index
without a request; so are values read that are in memory, in the event loop, at most `AT_ONCE_BYTES` in one call.  The
engine is asked for all others, and for all values if the client checks by BLAKE3.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import trio

from lakefs.client.facade import declare
from lakefs.direct.chunk_reads import NOT_READ
from lakefs.direct.keyed_reads import NAMELESS
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.get.fetch import need_segments
from lakefs.get.keyed import Matched, find_present, match_of, slot_rooms
from lakefs.get.opened import AT_ONCE_BYTES
from lakefs.get.pools import Pool
from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer, SegmentId
from lakefs.lake.spaces import SpaceSteps, value_memories
from lakefs.names import check_value_keys
from lakefs.put.keyed import KeyedResult
from lakefs.put.shared_memory import Slot
from lakefs.wire.messages import SpaceStat

if TYPE_CHECKING:
    from lakefs.client.trio.driver import TrioDriver
    from lakefs.steps.steps import Steps

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(
    steps: Callable[Concatenate[SpaceSteps, P], Steps[R]],
) -> Callable[Concatenate[TrioSpace, P], Coroutine[Any, Any, R]]:
    """Make an async method that runs the steps and returns their result."""

    async def call(self: TrioSpace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return await driver.run(steps(SpaceSteps(driver.steps, self.number), *args, **kwargs))

    return declare(call, steps)


class TrioSpace:
    """A space of keyed blobs, from `TrioLake.space`.  Safe for use by many tasks at once."""

    def __init__(self, driver: TrioDriver, stat: SpaceStat) -> None:
        self._driver = driver
        self._index = driver.shares.keys
        self.name = stat.name
        self.number = stat.number
        """The engine's number for it, which is never used for another space."""

    remove = _awaited(SpaceSteps.remove)
    pin = _awaited(SpaceSteps.pin)
    unpin = _awaited(SpaceSteps.unpin)

    async def put_many(
        self, keys: Sequence[bytes], values: Sequence[Buffer | Slot], *, depths: Sequence[int] = ()
    ) -> KeyedResult:
        """Store values under keys; durable on return.  See `SpaceSteps.put_many`."""
        self._index.tell(self.number)
        return await self._driver.run(SpaceSteps(self._driver.steps, self.number).put_many(keys, values, depths=depths))

    async def match(self, keys: Sequence[bytes]) -> Matched:
        """Return which keys have a value.  See `SpaceSteps.match`."""
        checked = check_value_keys(keys)
        reads = self._index.at_hand()
        known = [None] * len(checked) if reads is None else reads.match(self.number, checked)
        if None not in known:
            present = cast("list[bool]", known)
            self._index.note(self.number, checked if all(present) else list(compress(checked, present)))
            await trio.lowlevel.checkpoint()
            return match_of(present)
        asked = [key for key, flag in zip(checked, known, strict=True) if flag is None]
        found = iter(await self._driver.run(find_present(self.number, asked)))
        with suppress(EngineUnreachable):  # the answer stands if the engine has gone since
            await self._renew()
        return match_of([next(found) if flag is None else flag for flag in known])

    async def load(
        self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
    ) -> list[int]:
        """Load values to offsets of a pool; return their lengths in bytes, in order; 0 for a miss.

        See `SpaceSteps.load`.
        """
        pool.check_own()
        checked = check_value_keys(keys)
        rooms = slot_rooms(pool, len(checked), offsets, rooms)
        targets = [pool.slot(offset, room) for offset, room in zip(offsets, rooms, strict=True)]
        lengths = await self._read(checked, targets)
        left = [at for at, length in enumerate(lengths) if length == NOT_READ]
        if left:
            asked = [checked[at] for at in left], pool, [offsets[at] for at in left], [rooms[at] for at in left]
            await self._fill(lengths, left, SpaceSteps(self._driver.steps, self.number).load(*asked))
        return lengths

    async def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Read values, each into a buffer, array or tensor at least as long; return their lengths; 0 for a miss.

        See `SpaceSteps.get_many_into`.
        """
        checked, targets = value_memories(keys, buffers)
        lengths = await self._read(checked, targets)
        left = [at for at, length in enumerate(lengths) if length == NOT_READ]
        if left:
            asked = [checked[at] for at in left], [targets[at] for at in left]
            await self._fill(lengths, left, SpaceSteps(self._driver.steps, self.number).get_many_into(*asked))
        return lengths

    async def _read(self, keys: list[bytes], targets: Sequence[memoryview]) -> list[int]:
        """Read values without a request; return the lengths, NOT_READ for keys to ask for.

        Prepares what the next call needs: a current index, and descriptors of the segments in which values lie.
        """
        index = self._index.at_hand()
        if index is None or not index.has_ids:
            await self._renew()
            return [NOT_READ] * len(keys)
        plan = index.plan(self.number, keys, [len(target) for target in targets])
        lengths, room = plan.lengths, AT_ONCE_BYTES
        missed: set[SegmentId] = set()
        for at, place in zip(plan.indexes, plan.places, strict=True):
            if place[3] <= room:
                room -= place[3]
                lengths[at] = index.reads.read_found(NAMELESS, place, targets[at][: place[3]])
                if lengths[at] == NOT_READ:
                    missed.add(SegmentId(place[1]))
        if not index.confirm():
            lengths = [NOT_READ] * len(keys)
        self._index.note(self.number, [key for key, length in zip(keys, lengths, strict=True) if length > 0])
        if NOT_READ in lengths:
            await self._renew()
            await self._open_segments(missed)
        await trio.lowlevel.checkpoint()
        return lengths

    async def _open_segments(self, wanted: set[SegmentId]) -> None:
        """Get descriptors of segments that were not at hand, once for each connection."""
        shares = self._driver.shares
        new = shares.not_asked(wanted)
        if new:
            with suppress(LakeError):  # without them the engine reads these values
                await self._driver.run(need_segments(shares.descriptors, new))

    async def _fill(self, lengths: list[int], left: Sequence[int], steps: Steps[list[int]]) -> None:
        """Ask the engine for what is left."""
        for at, length in zip(left, await self._driver.run(steps), strict=True):
            lengths[at] = length

    async def _renew(self) -> None:
        """Request the engine's index if that is due."""
        if self._index.is_due:
            await self._driver.run(self._index.renewal())
