"""Gathers chunks that many puts store at once: one portion for all that wait, as a group commit does.

    a call --fewer than PORTIONS under way--> a portion of its own
           --else--> waiting --one ends, or GATHER_S is over--> one portion with the others that wait

A request costs its member some milliseconds of CPU and two syncs, whatever it brings; a portion asks each member once.
A put that is alone waits for nobody.

Rules kept here:
- A portion has chunks of one gc generation, each named once, of at most PORTION_BYTES of shards or of one call; calls
  that wait are taken in their order.
- A portion that fails is repeated for each of its calls by itself: none gets an error for chunks of another.
- A member that is slow holds up calls that wait for GATHER_S at most.
- The memory of chunks is the caller's again when `store` returns or raises.  So a call that is cancelled while its
  chunks are on their way with others waits for the outcome; before that it withdraws them.

Used on the loop.  No task of its own: the first call of a portion stores it for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import trio

from engine.members.ports import NewChunk
from engine.stripes.stripe_shards import PORTION_BYTES
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, GcGeneration
from lakefs.limits import BATCH_MAX

PORTIONS: Final = 1
"""Portions under way.  With two, each was half as large, and a put of 64 MiB took 12 requests of a member, not 8."""
GATHER_S: Final = 0.25
"""A disk takes less to sync; a person notices more."""
Store = Callable[[GcGeneration, Sequence[NewChunk]], Awaitable[Mapping[ChunkId, bool]]]
"""Stores chunks, each named once; returns for each if it was new."""


class _Call:
    """One call, and what became of its chunks."""

    __slots__ = ("chunks", "error", "fresh", "generation", "portion", "size", "woken")

    def __init__(self, code: ErasureCode, generation: GcGeneration, chunks: Mapping[ChunkId, NewChunk]) -> None:
        self.generation = generation
        self.chunks = chunks
        self.size = sum([code.stored_bytes(len(new.payload)) for new in chunks.values()])
        self.portion: Sequence[_Call] = ()
        """The calls of the portion that this one has to store; empty while others do that, or all wait."""
        self.fresh: Mapping[ChunkId, bool] | None = None
        self.error: BaseException | None = None
        self.woken = trio.Event()


class GatheredStores:
    """Stores the chunks of calls, gathered."""

    def __init__(self, code: ErasureCode, store: Store, portions: int = PORTIONS) -> None:
        self._code = code
        self._store = store
        self._portions = portions
        self._under_way = 0
        self._waiting: deque[_Call] = deque()

    async def store(self, generation: GcGeneration, chunks: Mapping[ChunkId, NewChunk]) -> Mapping[ChunkId, bool]:
        """Store chunks; return for each if it was new.  Errors are those of `Store`."""
        call = _Call(self._code, generation, chunks)
        if self._under_way < self._portions:
            self._begin([call])
        else:
            self._waiting.append(call)
            await self._wait(call)
        if call.portion:
            await self._store_all(call.portion)
        if isinstance(call.error, LakeError) and len(call.portion) != 1:
            return await self._store(generation, [*chunks.values()])
        if call.error is not None:
            raise call.error
        assert call.fresh is not None, "its portion was stored"
        return call.fresh

    async def _wait(self, call: _Call) -> None:
        """Wait until the call is done, or has to store a portion."""
        try:
            with trio.move_on_after(GATHER_S):
                await call.woken.wait()
            if call in self._waiting:
                self._begin(self._taken(call))
            if not call.portion:
                await call.woken.wait()
        except trio.Cancelled:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call.portion:  # nothing of it has been sent
                self._under_way -= 1
                self._go_on(call.portion[1:])
            else:
                with trio.CancelScope(shield=True):
                    await call.woken.wait()
            raise

    def _begin(self, calls: Sequence[_Call]) -> None:
        """Have the first of these calls store all."""
        self._under_way += 1
        calls[0].portion = calls
        calls[0].woken.set()

    async def _store_all(self, calls: Sequence[_Call]) -> None:
        """Store the chunks of all calls, and give them the outcome."""
        try:
            with trio.CancelScope(shield=len(calls) > 1):
                fresh = await self._store(calls[0].generation, [new for call in calls for new in call.chunks.values()])
            for call in calls:
                call.fresh = {chunk: fresh[chunk] for chunk in call.chunks}
        except LakeError as error:
            for call in calls:
                call.error = type(error)(error.message, subject=error.subject)
        except BaseException as error:
            for call in calls[1:]:
                call.error = error  # they must not wait for ever
            raise
        finally:
            self._under_way -= 1
            for call in calls:
                call.woken.set()
            self._go_on()

    def _go_on(self, calls: Sequence[_Call] = ()) -> None:
        """Begin the next portion: of these calls, or of those that wait."""
        if not calls and self._waiting and self._under_way < self._portions:
            calls = self._taken(self._waiting[0])
        if calls:
            self._begin(calls)

    def _taken(self, first: _Call) -> list[_Call]:
        """Take a call and others that go with it: as many as fit, and name no chunk twice."""
        calls = [first]
        self._waiting.remove(first)
        names = set(first.chunks)
        room = PORTION_BYTES - first.size
        while self._waiting:
            call = self._waiting[0]
            if call.generation != first.generation or call.size > room or len(names) + len(call.chunks) > BATCH_MAX:
                break
            if not names.isdisjoint(call.chunks):
                break
            calls.append(self._waiting.popleft())
            names.update(call.chunks)
            room -= call.size
        return calls
