"""Memory that payload is received into, and the payloads of a request.

Payloads of 65,536 bytes and more land in pooled, page-aligned buffers, from which they are hashed and written
without another copy; smaller ones share one bytearray.  Several payloads share a buffer, each with room for what is
written behind it, so one request of at most 16 MiB takes at most `BUFFERS_PER_REQUEST_MAX`.

Rules kept here:
- Small payloads of all requests take at most SMALL_MEMORY_BYTES; who finds no room waits in turn.
- A request takes memory for its small payloads first, then its buffers, and gives back all or nothing.  The buffers of
  one request are taken together, one request at a time, and never more than the pool has: whoever holds some waits
  only for requests that hold all that they need, so neither memory can lock up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import trio

from engine.chunks.payload import Payload, is_small
from engine.format.extents import large_extent_bytes
from lakefs.errors import InvalidArgument, RequestTooLarge
from lakefs.host.buffers import BUFFER_BYTES, BufferPool, PooledBuffer
from lakefs.ids import ChunkKind
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, CHUNK_BYTES, SMALL_MEMORY_BYTES
from lakefs.wire.engine_port import Body

BUFFERS_PER_REQUEST_MAX = 9
"""Two buffers one behind the other hold more than one buffer's worth, or the second had not been begun: so 16 MiB and
the room behind them, 17 MiB at most, fill fewer than 2 x 17 / 4 + 1."""


@dataclass
class ReceivedBody(Body):
    """A body whose parts are payloads to store; `release` gives pooled buffers back, once."""

    payloads: list[Payload] = field(default_factory=list)


class _Room:
    """Bytes that requests may take, in turn."""

    def __init__(self, total_bytes: int) -> None:
        assert total_bytes >= BODY_BYTES_MAX, "one request must find room"
        self._free = total_bytes
        self._turn = trio.Lock()
        self._more: trio.Event | None = None

    async def take(self, count: int) -> None:
        """Take so many bytes, BODY_BYTES_MAX at most; waits while others have them.  Cancelled: nothing is taken."""
        if not count or (count <= self._free and not self._turn.locked()):
            self._free -= count
            return
        async with self._turn:
            while count > self._free:
                self._more = trio.Event()
                await self._more.wait()
            self._free -= count

    def give_back(self, count: int) -> None:
        """So many bytes are free again."""
        self._free += count
        if self._more is not None:
            self._more.set()
            self._more = None


class _Taken:
    """What one request has; `release` gives it back, once."""

    __slots__ = ("_buffers", "_room", "_small_bytes")

    def __init__(self, buffers: list[PooledBuffer], room: _Room, small_bytes: int) -> None:
        self._buffers = buffers
        self._room = room
        self._small_bytes = small_bytes

    def release(self) -> None:
        """Nothing of it is used any more."""
        _release(self._buffers)
        if self._small_bytes:
            self._room.give_back(self._small_bytes)
            self._small_bytes = 0


class PayloadMemory:
    """Gives requests their memory."""

    def __init__(self, pool: BufferPool, small_memory_bytes: int = SMALL_MEMORY_BYTES) -> None:
        assert pool.capacity >= BUFFERS_PER_REQUEST_MAX, "one request must find room"
        self._pool = pool
        self._turn = trio.Lock()
        self._small = _Room(small_memory_bytes)

    async def take(self, kinds: Sequence[int], lengths: Sequence[int]) -> ReceivedBody:
        """Memory for payloads of these kinds and lengths.  InvalidArgument, RequestTooLarge; waits for the pool.

        On cancellation nothing is kept.
        """
        check_lengths(lengths)
        if len(kinds) != len(lengths):
            raise InvalidArgument(f"{len(kinds)} kinds for {len(lengths)} payloads")
        checked = [_kind(kind) for kind in kinds]
        small_bytes = sum(length for length in lengths if is_small(length))
        await self._small.take(small_bytes)
        try:
            small = memoryview(bytearray(small_bytes))
            buffers = await self._acquire(_buffer_count(lengths))
        except BaseException:
            self._small.give_back(small_bytes)
            raise
        large = _areas(buffers, lengths)
        payloads: list[Payload] = []
        for kind, length in zip(checked, lengths, strict=True):
            if is_small(length):
                payloads.append(Payload(kind, length, small=small[:length]))
                small = small[length:]
            else:
                payloads.append(Payload(kind, length, area=next(large)))
        parts = [_memory(payload) for payload in payloads]
        return ReceivedBody(parts, _Taken(buffers, self._small, small_bytes).release, payloads)

    async def _acquire(self, count: int) -> list[PooledBuffer]:
        buffers: list[PooledBuffer] = []
        if not count:
            return buffers
        try:
            async with self._turn:
                while len(buffers) < count:
                    buffers.append(await self._pool.acquire())
        except BaseException:
            _release(buffers)
            raise
        return buffers


def check_lengths(lengths: Sequence[int]) -> None:
    """InvalidArgument or RequestTooLarge unless each length is 1 B to 4 MiB and the sum fits one body."""
    if len(lengths) > BATCH_MAX:
        raise RequestTooLarge(f"{len(lengths)} payloads in one request; the limit is {BATCH_MAX}")
    if any(not 0 <= length <= CHUNK_BYTES for length in lengths):
        raise InvalidArgument(f"a payload has at most {CHUNK_BYTES} bytes")
    if sum(lengths) > BODY_BYTES_MAX:
        raise RequestTooLarge(f"{sum(lengths)} bytes in one request; the limit is {BODY_BYTES_MAX}")


def _kind(kind: int) -> ChunkKind:
    try:
        return ChunkKind(kind)
    except ValueError as error:
        raise InvalidArgument(f"{kind} is not a kind of chunk") from error


def _buffer_count(lengths: Sequence[int]) -> int:
    """Buffers that the payloads fill one after the other."""
    count = 0
    position = BUFFER_BYTES
    for length in lengths:
        if not is_small(length):
            position += large_extent_bytes(length)
            if position > BUFFER_BYTES:
                count += 1
                position = large_extent_bytes(length)
    assert count <= BUFFERS_PER_REQUEST_MAX
    return count


def _areas(buffers: Sequence[PooledBuffer], lengths: Sequence[int]) -> Iterator[memoryview]:
    """Page-aligned memory for each large payload in order, as `_buffer_count` counts."""
    following = iter(buffers)
    room = memoryview(b"")
    for length in lengths:
        if not is_small(length):
            extent = large_extent_bytes(length)
            if extent > len(room):
                room = next(following).view
            yield room[:extent]
            room = room[extent:]


def _memory(payload: Payload) -> memoryview:
    if payload.area is not None:
        return payload.area[: payload.length]
    assert payload.small is not None
    return payload.small


def _release(buffers: list[PooledBuffer]) -> None:
    while buffers:
        buffers.pop().release()
