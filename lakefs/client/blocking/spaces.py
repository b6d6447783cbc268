"""Spaces of keyed blobs for the blocking client: `space = lake.space("llama-70b/tp2", quota="200G")`.

The methods are those of `lakefs.lake.spaces.SpaceSteps`.  Keys are found through the engine's keyed index, and values
in memory are read, without a request.  The engine is asked for what is not known or not at hand, and for the chunks of
the values if the client checks by BLAKE3; chunks that are in memory then need no request of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from lakefs.client.blocking.chunks import Chunks, read_directly
from lakefs.client.facade import declare
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.direct.keyed_reads import NAMELESS, KeyedReads, Plan
from lakefs.errors import ChunkNotFound, CorruptionError, EngineUnreachable, InvalidArgument, StaleGrant
from lakefs.get.keyed import (
    MISS,
    Matched,
    find_present,
    find_values,
    match_of,
    parts_of,
    read_values_into,
    slot_rooms,
    value_bytes,
)
from lakefs.get.pools import Pool
from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer
from lakefs.lake.spaces import SpaceSteps, keyed_items, sized_keys, value_memories
from lakefs.names import check_value_keys
from lakefs.put.keyed import KeyedResult, Outcome
from lakefs.put.shared_memory import Slot
from lakefs.wire.messages import SpaceStat

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver
    from lakefs.client.blocking.loads import PoolLoads
    from lakefs.steps.steps import Steps

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(steps: Callable[Concatenate[SpaceSteps, P], Steps[R]]) -> Callable[Concatenate[Space, P], R]:
    """Make a method that runs the steps and returns their result."""

    def call(self: Space, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return driver.run(steps(SpaceSteps(driver.steps, self.number), *args, **kwargs))

    return declare(call, steps)


class Space:
    """A space of keyed blobs, from `Lake.space`.  As safe for threads as its lake, which it does not outlive."""

    def __init__(self, driver: BlockingDriver, chunks: Chunks, loads: PoolLoads, stat: SpaceStat) -> None:
        self._driver = driver
        self._chunks = chunks
        self._loads = loads
        self._index = driver.shares.keys
        self.name = stat.name
        self.number = stat.number
        """The engine's number for it, which is never used for another space."""

    remove = _blocking(SpaceSteps.remove)
    pin = _blocking(SpaceSteps.pin)
    unpin = _blocking(SpaceSteps.unpin)

    def match(self, keys: Sequence[bytes], sizes: Sequence[int] = ()) -> Matched:
        """Return which keys have a value.  See `SpaceSteps.match`."""
        checked, wanted = sized_keys(keys, sizes)
        reads = self._index.at_hand()
        known = [None] * len(checked) if reads is None else reads.match(self.number, checked, wanted)
        if None not in known:
            present = cast("list[bool]", known)
            self._index.note(self.number, checked if all(present) else list(compress(checked, present)))
            return match_of(present)
        asked = [at for at, flag in enumerate(known) if flag is None]
        wanted = wanted and [wanted[at] for at in asked]
        found = iter(self._driver.run(find_present(self.number, [checked[at] for at in asked], wanted)))
        self._renew_behind()
        return match_of([next(found) if flag is None else flag for flag in known])

    def put_many(
        self,
        keys: Sequence[bytes],
        values: Sequence[Buffer | Slot],
        *,
        depths: Sequence[int] = (),
        resize: bool = False,
    ) -> KeyedResult:
        """Store values under keys; durable on return.  See `SpaceSteps.put_many`.

        Keys that the shared index of keys has are PRESENT without a request; their values are durable.  One that is
        damaged is PRESENT too, until a client asks for it.  In a space of which some values expire the engine is asked.
        """
        items = keyed_items(keys, values, depths)
        checked = [item.key for item in items]
        reads = self._index.at_hand()
        sizes = [item.length for item in items] if resize else None
        present = [False] * len(items) if reads is None else reads.lasting(self.number, checked, sizes)
        if any(present):
            self._index.note(self.number, list(compress(checked, present)))
        if items and all(present):
            return KeyedResult([Outcome.PRESENT] * len(items))
        self._index.tell(self.number)
        steps = SpaceSteps(self._driver.steps, self.number)
        result = self._driver.run(steps.put_items(items, present, resize=resize))
        self._renew_behind()
        return result

    def load(self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()) -> list[int]:
        """Load values to offsets of a pool; return their lengths in bytes, in order; 0 for a miss.

        This process copies values that are in the page cache itself, without a request; the engine loads the others.
        See `SpaceSteps.load`.
        """
        pool.check_own()
        checked = check_value_keys(keys)
        rooms = slot_rooms(pool, len(checked), offsets, rooms)

        def read(reads: DirectReads, plan: Plan) -> list[int]:
            buffer = pool.buffer
            targets = [buffer[offsets[at] : offsets[at] + rooms[at]] for at in plan.indexes]
            return self._loads.read(reads, targets, plan.packed)

        lengths, left = self._read(checked, rooms, read)
        if left:
            asked = [checked[at] for at in left], pool, [offsets[at] for at in left], [rooms[at] for at in left]
            loaded = self._driver.run(SpaceSteps(self._driver.steps, self.number).load(*asked))
            for at, length in zip(left, loaded, strict=True):
                lengths[at] = length
        return lengths

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Read values, each into a buffer, array or tensor at least as long; return their lengths; 0 for a miss.

        See `SpaceSteps.get_many_into`.
        """
        checked, targets = value_memories(keys, buffers)

        rooms = [len(target) for target in targets]
        lengths, left = self._read(checked, rooms, lambda reads, plan: self._read_into(reads, plan, targets))
        if left:
            found = self._ask_into([checked[at] for at in left], [targets[at] for at in left])
            for at, length in zip(left, found, strict=True):
                lengths[at] = length
        return lengths

    def try_match(self, keys: Sequence[bytes], sizes: Sequence[int] = ()) -> list[bool] | None:
        """Return for each key if it has a value, if all are known here; else None.  Never waits.

        `sizes` and InvalidArgument as `match`.
        """
        checked, wanted = sized_keys(keys, sizes)
        reads = self._index.at_hand()
        known = [None] if reads is None else reads.match(self.number, checked, wanted)
        if None in known:
            return None
        present = cast("list[bool]", known)
        self._index.note(self.number, list(compress(checked, present)))
        return present

    def try_get_many_into(self, keys: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int] | None:
        """Read values as `get_many_into` does, if all are in memory or known to be absent; else None.

        Waits for no disk, no engine and no other call of this lake.  After None the buffers may hold anything.
        InvalidArgument as `get_many_into`.
        """
        checked, targets = value_memories(keys, buffers)
        index = self._index.at_hand()
        if index is None or not index.has_ids:
            return None
        plan = index.plan(self.number, checked, [len(target) for target in targets])
        if plan.lengths.count(NOT_READ) > len(plan.indexes):  # else read in vain
            return None
        lengths = self._read_planned(index, plan, lambda reads, plan: self._read_into(reads, plan, targets))
        if NOT_READ in lengths:
            return None
        self._index.note(self.number, [key for key, length in zip(checked, lengths, strict=True) if length > 0])
        return lengths

    def _read_into(self, reads: DirectReads, plan: Plan, targets: Sequence[memoryview]) -> list[int]:
        wanted = [targets[at] for at in plan.indexes]
        return read_directly(self._driver, reads, [NAMELESS] * len(wanted), wanted, plan.packed)

    def _read_planned(self, index: KeyedReads, plan: Plan, read: Callable[[DirectReads, Plan], list[int]]) -> list[int]:
        """Return the lengths of values read as planned; NOT_READ for keys to ask for."""
        lengths = plan.lengths
        if len(plan.indexes) == len(lengths) > 0:
            lengths = read(index.reads, plan)
        elif plan.indexes:
            for at, length in zip(plan.indexes, read(index.reads, plan), strict=True):
                lengths[at] = length
        return lengths if index.confirm() else [NOT_READ] * len(lengths)

    def _read(
        self, keys: list[bytes], rooms: Sequence[int], read: Callable[[DirectReads, Plan], list[int]]
    ) -> tuple[list[int], list[int]]:
        """Read values without a request; return the lengths, and the indexes of the keys to ask for.

        Prepares what the next call needs: a current index, and descriptors of the segments in which values lie.
        """
        index = self._index.at_hand()
        if index is None or not index.has_ids:
            self._renew()
            return [NOT_READ] * len(keys), list(range(len(keys)))
        plan = index.plan(self.number, keys, rooms)
        lengths = self._read_planned(index, plan, read)
        if keys and min(lengths) > 0:
            self._index.note(self.number, keys)
            return lengths, []
        self._index.note(self.number, [key for key, length in zip(keys, lengths, strict=True) if length > 0])
        left = [at for at, length in enumerate(lengths) if length == NOT_READ]
        if left:
            self._renew()
            places = zip(plan.indexes, plan.places, strict=True)
            self._loads.prepare([place for at, place in places if lengths[at] == NOT_READ])
        return lengths, left

    def _ask_into(self, keys: list[bytes], targets: list[memoryview]) -> list[int]:
        values = self._driver.run(find_values(self.number, keys))
        lengths = [value_bytes(pieces) for pieces in values]
        lengths = [length if length <= len(target) else MISS for length, target in zip(lengths, targets, strict=True)]
        fitting = [(values[index], targets[index]) for index, length in enumerate(lengths) if length]
        try:
            self._chunks.get_many_into(*parts_of(fitting))
        except (ChunkNotFound, CorruptionError, StaleGrant, InvalidArgument):  # one of them: try each by itself
            return self._driver.run(read_values_into(self._driver.steps.access(None), values, targets))
        return lengths

    def _renew_behind(self) -> None:
        """Do `_renew` behind an answer, which stands if the engine has gone since."""
        with suppress(EngineUnreachable):
            self._renew()

    def _renew(self) -> None:
        """Request the engine's index if that is due."""
        if self._index.is_due:
            self._driver.run(self._index.renewal())
