"""Payloads being stored: their stages (in memory, hashed, written), and the memory that they are received into.

Payloads of 65,536 bytes and more are received into pooled, page-aligned buffers, and are hashed and written from there
without another copy; smaller ones share one bytearray, and those that
follow each other are received as one part.  A large payload that a face in this process has in a buffer of its own
pool is stored from there.  Several payloads share a buffer, each with room for the vector
and padding behind it, so one request of at most 16 MiB takes at most `BUFFERS_PER_REQUEST_MAX`.

Rules kept here:
- Small payloads of all requests take at most SMALL_MEMORY_BYTES; a request that finds no room waits in turn.
- A request takes memory for its small payloads first, then its buffers, and releases all at once.  One request at a
  time takes its buffers, never more than the pool has.  So a request that holds some of its buffers waits only for
  requests that hold all they need, and neither memory can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from engine.format.extents import Place, large_extent_bytes
from lakefs.errors import InvalidArgument, RequestTooLarge
from lakefs.host.buffers import BufferPool, PooledBuffer, PooledPayload
from lakefs.ids import ChunkId, ChunkKind
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, CHUNK_BYTES, SMALL_MEMORY_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.wire.engine_port import Body

BUFFERS_PER_REQUEST_MAX = 9
"""Most buffers of one request.  Two consecutive ones hold more than one buffer's worth, or the second would not have
been begun: so 16 MiB and the room behind payloads, 17 MiB at most, fill fewer than 2 x 17 / 4 + 1."""

Fill = Callable[[memoryview, int], bytes | None]
"""`fill(memory, begin)` blocks and copies the payload's bytes from `begin` into the engine's memory.  It may return the
checksums of the granules copied, as `checksums.vector_of` would."""


class Payload(msgspec.Struct):
    """Bytes to store, in memory of the engine's own: `area` (65,536 bytes and more) or `small`.

    An area is page-aligned and has room for the vector and padding behind the payload (`large_extent_bytes`).

    `fill`, if given, copies the bytes in; threads call it, before hashing, once for each piece of the payload.
    """

    kind: ChunkKind
    length: int
    area: memoryview | None = None
    small: memoryview | None = None
    fill: Fill | None = None


class Hashed(msgspec.Struct, frozen=True):
    """A payload with the id and record checksum that the engine computed."""

    payload: Payload
    chunk: ChunkId
    crc: int


class Written(msgspec.Struct, frozen=True):
    """A payload that is synced, or small and placed, and not yet recorded; in flight until settled."""

    hashed: Hashed
    place: Place


def is_small(length: int) -> bool:
    """Return True if a payload of this length is packed into a small segment."""
    return length < SMALL_PAYLOAD_BYTES


@dataclass
class ReceivedBody(Body):
    """A body whose parts are payloads to store; `release` returns the pooled buffers, once."""

    payloads: list[Payload] = field(default_factory=list)


class _Room:
    """A budget of bytes that requests take in turn."""

    def __init__(self, total_bytes: int) -> None:
        assert total_bytes >= BODY_BYTES_MAX, "one request must find room"
        self._total = self._free = total_bytes
        self._turn = trio.Lock()
        self._more: trio.Event | None = None

    async def take(self, count: int) -> None:
        """Take `count` bytes, BODY_BYTES_MAX at most; waits until they are free.  When cancelled, takes nothing."""
        if not count or (count <= self._free and not self._turn.locked()):
            self._free -= count
            return
        async with self._turn:
            while count > self._free:
                self._more = trio.Event()
                await self._more.wait()
            self._free -= count

    def give_back(self, count: int) -> None:
        """Return `count` bytes."""
        self._free += count
        assert self._free <= self._total, "bytes are returned once"
        if self._more is not None:
            self._more.set()
            self._more = None


class PayloadMemory:
    """Gives requests their memory."""

    def __init__(self, pool: BufferPool, small_memory_bytes: int = SMALL_MEMORY_BYTES) -> None:
        assert pool.capacity >= BUFFERS_PER_REQUEST_MAX, "one request must find room"
        self._pool = pool
        self._turn = trio.Lock()
        self._small = _Room(small_memory_bytes)

    async def take(
        self, kinds: Sequence[int], lengths: Sequence[int], pooled: PooledPayload | None = None
    ) -> ReceivedBody:
        """Return memory for payloads of these kinds and lengths.  InvalidArgument, RequestTooLarge; waits for the pool.

        `pooled`: the payload, in a buffer of another pool of this process; if it is a large one, it is stored from
        there.  When cancelled, keeps nothing.
        """
        check_lengths(lengths)
        if len(kinds) != len(lengths):
            raise InvalidArgument(f"{len(kinds)} kinds for {len(lengths)} payloads")
        checked = [_kind(kind) for kind in kinds]
        large = [length for length in lengths if not is_small(length)]
        if pooled is not None and large == list(lengths):
            (length,) = large
            return ReceivedBody(pooled, payloads=[Payload(checked[0], length, area=pooled.area)])
        small_bytes = sum(lengths) - sum(large)
        buffers: list[PooledBuffer] = []

        def release() -> None:
            """Return the memory, once; it is not used from now on."""
            nonlocal small_bytes
            while buffers:
                buffers.pop().release()
            self._small.give_back(small_bytes)
            small_bytes = 0

        await self._small.take(small_bytes)
        try:
            small = memoryview(bytearray(small_bytes))
            areas = iter(await self._take_areas(large, buffers) if large else ())
        except BaseException:
            release()
            raise
        payloads: list[Payload] = []
        parts: list[memoryview] = []
        begin = end = 0  # the small payloads that lie behind the last part
        for kind, length in zip(checked, lengths, strict=True):
            if is_small(length):
                payloads.append(Payload(kind, length, small=small[end : end + length]))
                end += length
            else:
                area = next(areas)
                parts += (small[begin:end], area[:length])
                begin = end
                payloads.append(Payload(kind, length, area=area))
        return ReceivedBody([part for part in (*parts, small[begin:]) if part], release, payloads)

    async def _take_areas(self, lengths: Sequence[int], buffers: list[PooledBuffer]) -> list[memoryview]:
        """Return page-aligned memory for large payloads, one behind the other in buffers, which join `buffers`."""
        areas: list[memoryview] = []
        room = memoryview(b"")
        async with self._turn:
            for length in lengths:
                extent = large_extent_bytes(length)
                if extent > len(room):
                    assert len(buffers) < BUFFERS_PER_REQUEST_MAX
                    buffers.append(await self._pool.acquire())
                    room = buffers[-1].view
                areas.append(room[:extent])
                room = room[extent:]
        return areas


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise InvalidArgument or RequestTooLarge unless each length is 0 to 4 MiB and the sum fits one body."""
    if len(lengths) > BATCH_MAX:
        raise RequestTooLarge(f"{len(lengths)} payloads in one request; the limit is {BATCH_MAX}")
    if lengths and not 0 <= min(lengths) <= max(lengths) <= CHUNK_BYTES:
        raise InvalidArgument(f"a payload has at most {CHUNK_BYTES} bytes")
    if sum(lengths) > BODY_BYTES_MAX:
        raise RequestTooLarge(f"{sum(lengths)} bytes in one request; the limit is {BODY_BYTES_MAX}")


def check_body(lengths: Sequence[int], body_bytes: int) -> None:
    """Raise InvalidArgument unless the body has all of the payloads."""
    if sum(lengths) != body_bytes:
        raise InvalidArgument(f"lengths add up to {sum(lengths)}, the body has {body_bytes} bytes")


_KINDS: Final = {int(kind): kind for kind in ChunkKind}


def _kind(kind: int) -> ChunkKind:
    known = _KINDS.get(kind)
    if known is None:
        raise InvalidArgument(f"{kind} is not a kind of chunk")
    return known
