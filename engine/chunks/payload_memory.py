"""Memory that a request's payloads are received into.

Payloads of 65,536 bytes and more are received into pooled, page-aligned buffers, and are hashed and written from there
without another copy; smaller ones share one bytearray.  Several payloads share a buffer, each with room for the vector
and padding behind it, so one request of at most 16 MiB takes at most `BUFFERS_PER_REQUEST_MAX`.

Rules kept here:
- Small payloads of all requests take at most SMALL_MEMORY_BYTES; a request that finds no room waits in turn.
- A request takes memory for its small payloads first, then its buffers, and releases all at once.  One request at a
  time takes its buffers, never more than the pool has.  So a request that holds some of its buffers waits only for
  requests that hold all they need, and neither memory can deadlock.
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
"""Most buffers of one request.  Two consecutive ones hold more than one buffer's worth, or the second would not have
been begun: so 16 MiB and the room behind payloads, 17 MiB at most, fill fewer than 2 x 17 / 4 + 1."""


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


class _Taken:
    """The memory that one request has; `release` returns it, once."""

    __slots__ = ("_buffers", "_room", "_small_bytes")

    def __init__(self, buffers: list[PooledBuffer], room: _Room, small_bytes: int) -> None:
        self._buffers = buffers
        self._room = room
        self._small_bytes = small_bytes

    def release(self) -> None:
        """Return the memory; it is not used from now on."""
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
        """Return memory for payloads of these kinds and lengths.  InvalidArgument, RequestTooLarge; waits for the pool.

        When cancelled, keeps nothing.
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
    """Raise InvalidArgument or RequestTooLarge unless each length is 0 to 4 MiB and the sum fits one body."""
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
    """Return the number of buffers that the large payloads fill, one after the other."""
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
    """Yield page-aligned memory for each large payload in order, as `_buffer_count` counts."""
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
