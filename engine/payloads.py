"""Memory that payload is received into, and the payloads of a request.

Payloads of 65,536 bytes and more land in pooled, page-aligned buffers, from which they are hashed and written
without another copy; smaller ones share one bytearray.  The buffers of one request are taken together, one
request at a time: whoever holds some never waits for more, so the pool cannot lock up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from engine.buffers import BufferPool, PooledBuffer
from engine.chunks import Payload, is_small
from lakefs.errors import InvalidArgument, RequestTooLarge
from lakefs.ids import ChunkKind
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, CHUNK_BYTES
from lakefs.service import Body


@dataclass
class ReceivedBody(Body):
    """A body whose parts are payloads to store; `release` gives pooled buffers back, once."""

    payloads: list[Payload] = field(default_factory=list)


class PayloadMemory:
    """Gives requests their memory."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._turn = trio.Lock()

    async def take(self, kinds: Sequence[int], lengths: Sequence[int]) -> ReceivedBody:
        """Memory for payloads of these kinds and lengths.  InvalidArgument, RequestTooLarge; waits for the pool.

        On cancellation nothing is kept.
        """
        check_lengths(lengths)
        if len(kinds) != len(lengths):
            raise InvalidArgument(f"{len(kinds)} kinds for {len(lengths)} payloads")
        small = memoryview(bytearray(sum(length for length in lengths if is_small(length))))
        payloads: list[Payload] = []
        buffers: list[PooledBuffer] = []
        try:
            async with self._turn:
                for kind, length in zip(kinds, lengths, strict=True):
                    if is_small(length):
                        payloads.append(Payload(_kind(kind), length, small=small[:length]))
                        small = small[length:]
                    else:
                        buffers.append(await self._pool.acquire())
                        payloads.append(Payload(_kind(kind), length, buffer=buffers[-1]))
        except BaseException:
            _release(buffers)
            raise
        parts = [_memory(payload) for payload in payloads]
        return ReceivedBody(parts, lambda: _release(buffers), payloads)


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


def _memory(payload: Payload) -> memoryview:
    if payload.buffer is not None:
        return payload.buffer.view[: payload.length]
    assert payload.small is not None
    return payload.small


def _release(buffers: list[PooledBuffer]) -> None:
    while buffers:
        buffers.pop().release()
