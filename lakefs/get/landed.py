"""Reads by RDMA of what is not in the engine's DRAM tier: the engine WRITEs chunks to landings of this client.

It is a load (LoadSlots) into memory of the client's own, in place of a pool: the engine reads the chunks from its disk
into registered buffers.

Rules kept here:
- One landing for each request in flight.  When others of this client use them all, chunks are streamed.
- Bytes are copied out of the landing first and checked then, where no peer reaches them.
- A chunk that the engine could not load, or that fails its check, is streamed, and so is all of a request that failed:
  the stream's answer is final.
- Memory of a request without an answer is given up, and its queue pair with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from lakefs.content.verify import Check, granule_crcs, matches_id
from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from lakefs.get.opened import Access
from lakefs.get.places import Wanted, groups, length_of
from lakefs.limits import CHUNK_BYTES, CLIENT_LANDINGS, MIB
from lakefs.steps.steps import Pipeline, Send, Steps, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import LoadSlots, SlotsLoaded

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric, ClientLink
    from lakefs.fabric.landing import Landing

LAND_FROM_BYTES = 1 * MIB
"""Least bytes that are loaded: for less, the engine's WRITE and the copy cost more than the stream."""
Stream = Callable[[Sequence[Wanted]], Steps[None]]
"""Streams chunks, checks and delivers them."""


def fetch_landed(access: Access, wanted: Sequence[Wanted], stream: Stream) -> Steps[Sequence[Wanted]]:
    """Fetch chunks by way of landings; return those that are left to stream, with their order kept.

    Errors are those of `stream`.
    """
    fabric = access.fabric
    if fabric is None or fabric.link is None or length_of(wanted) < LAND_FROM_BYTES:
        return wanted
    fetching = _Fetching(access, fabric, stream)
    try:
        return (yield from fetching.run(wanted))
    finally:
        fetching.give_up()


class _Fetching:
    """One call: its requests in flight."""

    def __init__(self, access: Access, fabric: ClientFabric, stream: Stream) -> None:
        self._access = access
        self._fabric = fabric
        self._stream = stream
        self._flight: dict[Landing, ClientLink] = {}
        """Landings of requests without an answer so far, and the queue pairs that they are reached over."""

    def run(self, wanted: Sequence[Wanted]) -> Steps[list[Wanted]]:
        left: list[Wanted] = []
        pipeline = Pipeline(CLIENT_LANDINGS)
        try:
            for group in groups(wanted, CHUNK_BYTES):
                yield from pipeline.make_room()
                link = yield from self._fabric.connected()
                landing = None if link is None else (yield from self._fabric.taken_landing())
                if link is None or landing is None:
                    left += group
                    continue
                self._flight[landing] = link
                yield from pipeline.submit(
                    Send(self._request(landing, group)),
                    partial(self._landed, landing, group),
                    partial(self._failed, landing, group),
                )
            yield from pipeline.drain()
        except LakeError:
            yield from pipeline.settle()
            raise
        return left

    def _request(self, landing: Landing, group: Sequence[Wanted]) -> LoadSlots:
        return LoadSlots(
            0,
            [bytes(want.piece.chunk) for want in group],
            _offsets(group),
            [want.piece.length for want in group],
            self._access.check is Check.CRC32C,
            landing.memory,
        )

    def _landed(self, landing: Landing, group: Sequence[Wanted], reply: Reply) -> Steps[None]:
        loaded = reply.message
        assert isinstance(loaded, SlotsLoaded)
        try:
            left = yield from work(_deliver, self._access.check, landing.view, group, loaded)
        except LakeError:
            self._release(landing, is_quiet=True)
            raise
        self._release(landing, is_quiet=True)
        moved = len(group) - len(left), length_of(group) - length_of(left)
        self._fabric.note_moved(*moved)
        self._access.progress(moved[1], 0)
        if left:
            yield from self._stream(left)

    def _failed(self, landing: Landing, group: Sequence[Wanted], error: Exception) -> Steps[None]:
        link = self._flight[landing]
        if not isinstance(error, LakeError) or isinstance(error, EngineUnreachable):
            raise error
        if isinstance(error, SessionLost):
            self._fabric.retire(link, error)
        self._release(landing, is_quiet=not isinstance(error, SessionLost) and self._fabric.is_held(link))
        yield from self._stream(group)

    def _release(self, landing: Landing, *, is_quiet: bool) -> None:
        del self._flight[landing]
        self._fabric.give_back_landing(landing, is_quiet=is_quiet)

    def give_up(self) -> None:
        """Give up the landings of requests that have no answer: cancelled, or without an engine."""
        while self._flight:
            landing, link = self._flight.popitem()
            self._fabric.retire(link, None)
            self._fabric.give_back_landing(landing, is_quiet=False)


def _offsets(group: Sequence[Wanted]) -> list[int]:
    """Return the offsets of chunks in a landing: one behind the other."""
    return [0, *accumulate(want.piece.length for want in group[:-1])]


def _deliver(check: Check, landing: memoryview, group: Sequence[Wanted], loaded: SlotsLoaded) -> list[Wanted]:
    """Copy chunks from the landing, check and deliver them; return those that are not there or not right.  Blocks."""
    left: list[Wanted] = []
    crcs = loaded.crcs or [b""] * len(group)
    failures = loaded.failures or [None] * len(group)
    for want, offset, length, crc, failure in zip(group, _offsets(group), loaded.lengths, crcs, failures, strict=True):
        if failure is not None or length != want.piece.length:
            left.append(want)
            continue
        memory = want.sink.memory_for(want.piece)
        memory[:] = landing[offset : offset + length]
        if check is Check.NONE or (granule_crcs(memory) == crc if crc else matches_id(want.piece.chunk, memory)):
            want.sink.deliver(want.piece, memory)
        else:
            left.append(want)
    return left
