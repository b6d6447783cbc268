"""Values read at their homes: one KeyedRead to each, all at once, without a task for each.

    begin    requests go to all homes that are connected, and were given the lake's spaces; others are asked by tasks
    receive  answers arrive in memory that is used again (`LoadMemory`), or in new memory
    check    in the thread that copies a part to where it is wanted (`Sent.checked`)

Rules kept here:
- A home that is away, or cannot answer now, has no answer: its keys are misses.
- Memory of an answer is kept until the load has ended.  That of one which arrives later is given back when it has
  arrived, or its connection was lost: so a request is never given up.
- Bytes that were sent are nobody's until they are checked: whole chunks by their BLAKE3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import trio

from engine.head.head_clients import HeadClient
from engine.head.head_tier import InSlab
from engine.head.key_homes import KeyHomes
from engine.head.keyed_chunks import checked_piece
from engine.head.load_memory import LoadMemory
from engine.host.tasks import run_all
from engine.members.lent_area import LentArea
from engine.members.ports import Got, Wanted
from lakefs.errors import LakeError, OperationalError, SpaceNotFound
from lakefs.host.buffers import PooledBuffer
from lakefs.ids import ChunkId, MemberId
from lakefs.limits import BODY_BYTES_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


class Sent(NamedTuple):
    """A part of a value as its home sent it, not checked.  `at`: its offset in `area`; None: it is in other memory."""

    wanted: Wanted
    piece: m.ReadPiece
    payload: memoryview
    area: LentArea | None
    at: int

    def checked(self) -> InSlab | Got | None:
        """Return the whole part; None if it is not what was asked for.  Blocks."""
        got = checked_piece(self.wanted, self.piece, self.payload)
        if got is None or self.area is None:
            return got
        return InSlab(got.payload, got.crcs, self.area.descriptor, self.at)


def sent_parts(found: m.KeyedFound, body: Body, memory: LoadMemory) -> Iterator[tuple[ChunkId, Sent]]:
    """Iterate over the parts that a home sent; none if they are not those that its answer names."""
    payload = memoryview(body.parts[0] if len(body.parts) == 1 else body.joined())
    if len(found.pieces) > len(found.chunks) or sum(piece.length for piece in found.pieces) != len(payload):
        return
    area, begin = memory.place_of(payload)
    at = 0
    for chunk, length, piece in zip(found.chunks, found.lengths, found.pieces, strict=False):  # the first have pieces
        wanted = Wanted(ChunkId(chunk), length)
        yield wanted.chunk, Sent(wanted, piece, payload[at : at + piece.length], area, begin + at)
        at += piece.length


class HomeReads:
    """Reads of a head at the homes of keys."""

    def __init__(self, homes: KeyHomes, memory: LoadMemory) -> None:
        self._homes = homes
        self.memory = memory

    async def read(
        self,
        client: HeadClient,
        space: int,
        keys: Mapping[MemberId, Sequence[bytes]],
        bytes_max: int,
        releases: ExitStack,
    ) -> dict[MemberId, Reply]:
        """Ask each home for its keys; return the answers of those that gave one.  SpaceNotFound.

        All together have at most BODY_BYTES_MAX bytes, and each at most `bytes_max`.  They are the caller's until
        `releases` is closed.
        """
        each_max = min(bytes_max, BODY_BYTES_MAX // max(1, len(keys)))
        requests = {home: m.KeyedRead(space, list(mine), each_max) for home, mine in keys.items()}
        reading = _Reading(self._homes, self.memory, client, requests)
        releases.callback(reading.end)
        await reading.run()
        return reading.replies


class _Reading:
    """The requests of one load."""

    def __init__(
        self, homes: KeyHomes, memory: LoadMemory, client: HeadClient, requests: Mapping[MemberId, m.KeyedRead]
    ) -> None:
        self.replies: dict[MemberId, Reply] = {}
        self._homes = homes
        self._memory = memory
        self._client = client
        self._requests = requests
        self._errors: dict[MemberId, LakeError] = {}
        self._under_way = 0
        self._all_came = trio.Event()
        self._held: list[Callable[[], None]] = []
        self._is_over = False

    async def run(self) -> None:
        """Ask all homes, and wait for their answers."""
        await run_all(self._ask, [home for home in self._requests if not self._begin(home)])
        if self._under_way:
            await self._all_came.wait()
        errors, self._errors = self._errors, {}
        await run_all(self._ask, [home for home, error in errors.items() if isinstance(error, SpaceNotFound)])
        for error in errors.values():
            if not isinstance(error, OperationalError | SpaceNotFound):
                raise error

    def end(self) -> None:
        """Give the answers' memory back, and that of later ones when they have come."""
        self._is_over = True
        held, self._held = self._held, []
        for release in held:
            release()

    async def _ask(self, home: MemberId) -> None:
        """Ask a home by a call, which may have to connect first."""
        try:
            reply = self.replies[home] = await self._homes.ask(self._client, home, self._requests[home])
        except OperationalError:
            return
        self._held.append(reply.body.release)

    def _begin(self, home: MemberId) -> bool:
        """Send a request, if that can be done now."""
        buffer = self._memory.try_take()
        into = [] if buffer is None else [buffer.view]
        if self._homes.begin(home, self._requests[home], into, partial(self._answered, home, buffer)):
            self._under_way += 1
            return True
        if buffer is not None:
            buffer.release()
        return False

    def _answered(self, home: MemberId, buffer: PooledBuffer | None, result: Reply | LakeError) -> None:
        if buffer is not None:
            self._held.append(buffer.release)
        if isinstance(result, Reply):
            self.replies[home] = result
            self._held.append(result.body.release)
        else:
            self._errors[home] = result
        if self._is_over:
            self.end()
        self._under_way -= 1
        if not self._under_way:
            self._all_came.set()
