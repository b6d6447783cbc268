"""Reading keyed blobs as steps: which keys have a value, values into a pool, values into buffers.

    match  ->  the chunks of each value
    load   ->  the engine writes values to slots of a pool; the client checks each part there
    get    ->  match, then read the chunks as any chunk is read

Rules kept here:
- A key that has no value, whose value does not fit, or whose value cannot be read right is a miss: its length is 0, and
  the other keys of the call are not touched.  Values have at least one byte, so 0 is no value's length.
- A part is checked in its place, as the client's `check` says.  A value of which a part fails its check is streamed
  once more: the engine then reads past its page cache and notes damage.  If that fails too, the key is a miss.
- The hash in a chunk's id proves the bytes.  That they belong to the key is the engine's word.
- After a miss the memory for that key may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lakefs.content.verify import Check, granule_crcs, matches_id
from lakefs.errors import (
    ChunkNotFound,
    ClusterDegraded,
    CorruptionError,
    InvalidArgument,
    LakeError,
    RequestTooLarge,
    StaleGrant,
)
from lakefs.get.chunks import get_chunks_into
from lakefs.get.load import BATCH_MAX as LOADS_MAX, BATCH_MIN, BATCHES
from lakefs.get.objects import close_leases
from lakefs.get.opened import Access, Piece, pieces_of
from lakefs.get.pool_lending import LentPool, into_lent_pool
from lakefs.get.pools import Pool
from lakefs.ids import ChunkId
from lakefs.limits import BATCH_MAX, LOAD_WINDOW
from lakefs.steps.steps import Pipeline, Send, Steps, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Failure, KeyedLoad, KeyedLoaded, KeyedMatch, KeyedMatched, ReadChunks, ReadChunksReply

MISS: Final = 0
"""Length of a value that was not read."""
HEAD_BATCH_MIN: Final = 32
"""Keys of a request to the head of a lake, if there are as many: it asks each of their homes once for each request."""
_UNREAD: Final = (ChunkNotFound, ClusterDegraded, CorruptionError, StaleGrant, InvalidArgument)
"""Errors of a read that make a value a miss."""


class Matched(NamedTuple):
    """Which keys of a batch have a value: the length of the leading run of present keys, and one flag a key."""

    prefix: int
    present: list[bool]


@dataclass(frozen=True)
class Pinned:
    """Values that stay readable, whatever becomes of their keys, until `unpin` or the end of the connection."""

    present: list[bool]
    leases: list[int]
    epoch: int
    """Number of the connection that keeps them."""


def match_of(present: list[bool]) -> Matched:
    """Return which keys have a value."""
    return Matched(present.index(False) if False in present else len(present), present)


def find_values(space: int, keys: Sequence[bytes]) -> Steps[list[list[Piece]]]:
    """Return the parts of each key's value, in order; none for a key without value.  SpaceNotFound."""
    values: list[list[Piece]] = [[] for _ in keys]
    left = list(range(len(keys)))
    while left:
        batch, left = left[:BATCH_MAX], left[BATCH_MAX:]
        reply = yield from send(KeyedMatch(space, [keys[index] for index in batch]))
        assert isinstance(reply.message, KeyedMatched)
        for index, pieces in zip(batch, _values_of(reply.message), strict=True):
            values[index] = pieces
        if reply.message.chunks:  # else asking again would have the same answer
            left = _too_many(batch, reply.message.failures) + left
    return values


def find_present(space: int, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> Steps[list[bool]]:
    """Return for each key if it has a value, of that size if `sizes` are given (0: any).  SpaceNotFound."""
    present = [False] * len(keys)
    left = list(range(len(keys)))
    while left:
        batch, left = left[:BATCH_MAX], left[BATCH_MAX:]
        wanted = [] if sizes is None else [sizes[index] for index in batch]
        reply = yield from send(KeyedMatch(space, [keys[index] for index in batch], presence=True, sizes=wanted))
        assert isinstance(reply.message, KeyedMatched)
        for index, flag in zip(batch, reply.message.present(wanted), strict=True):
            present[index] = flag
        if reply.message.chunks:  # of an engine that answers with parts, as many as fit
            left = _too_many(batch, reply.message.failures) + left
    return present


def pin_values(space: int, keys: Sequence[bytes]) -> Steps[Pinned]:
    """Take leases on the values of at most BATCH_MAX keys.  SpaceNotFound, EngineBusy, InvalidArgument."""
    if len(keys) > BATCH_MAX:
        raise InvalidArgument(f"{len(keys)} keys cannot be pinned at once; pin at most {BATCH_MAX}")
    reply = yield from send(KeyedMatch(space, list(keys), lease=True))
    assert isinstance(reply.message, KeyedMatched)
    present = [bool(pieces) for pieces in _values_of(reply.message)]
    return Pinned(present, list(reply.message.leases), reply.epoch)


def unpin_values(access: Access, pinned: Pinned) -> Steps[None]:
    """Give the leases back; does nothing if their connection has ended, and the leases with it."""
    if pinned.leases and access.is_held(pinned.epoch):
        yield from close_leases(pinned.leases)
        pinned.leases.clear()


def get_values_into(
    access: Access, space: int, keys: Sequence[bytes], targets: Sequence[memoryview]
) -> Steps[list[int]]:
    """Read values, each into memory of the caller; return their lengths, `MISS` where nothing was read."""
    values = yield from find_values(space, keys)
    return (yield from read_values_into(access, values, targets))


def read_values_into(
    access: Access, values: Sequence[Sequence[Piece]], targets: Sequence[memoryview]
) -> Steps[list[int]]:
    """Read values that were found, each into memory of the caller; all at once, or, if one fails, one by one."""
    fitting = [index for index, pieces in enumerate(values) if 0 < value_bytes(pieces) <= len(targets[index])]
    lengths = [MISS] * len(values)
    try:
        yield from get_chunks_into(access, *parts_of([(values[index], targets[index]) for index in fitting]))
    except _UNREAD:
        for index in fitting:
            try:
                yield from get_chunks_into(access, *parts_of([(values[index], targets[index])]))
            except _UNREAD:
                continue
            lengths[index] = value_bytes(values[index])
        return lengths
    for index in fitting:
        lengths[index] = value_bytes(values[index])
    return lengths


def parts_of(values: Sequence[tuple[Sequence[Piece], memoryview]]) -> tuple[list[ChunkId], list[memoryview]]:
    """Return the chunks of values, and the memory of each; every value fits its memory."""
    chunks: list[ChunkId] = []
    targets: list[memoryview] = []
    for pieces, target in values:
        for chunk, offset, length in pieces:
            chunks.append(chunk)
            targets.append(target[offset : offset + length])
    return chunks, targets


def value_bytes(pieces: Sequence[Piece]) -> int:
    """Return the length of a value with these parts."""
    return pieces[-1].offset + pieces[-1].length if pieces else 0


# --- into a pool -----------------------------------------------------------------------------------------


def load_values(
    access: Access, pool: Pool, space: int, keys: Sequence[bytes], offsets: Sequence[int], rooms: Sequence[int]
) -> Steps[list[int]]:
    """Load values to offsets of a pool; return their lengths, `MISS` where nothing was loaded.

    Without `rooms` a slot ends where the next one begins, or with the pool.  InvalidArgument (slots outside the pool,
    or that overlap), SpaceNotFound.
    """
    pool.check_own()
    rooms = slot_rooms(pool, len(keys), offsets, rooms)

    def stream() -> Steps[list[int]]:
        slots = [pool.slot(offset, room) for offset, room in zip(offsets, rooms, strict=True)]
        return stream_values(access, space, keys, slots)

    return (
        yield from into_lent_pool(
            access,
            pool,
            list(zip(offsets, rooms, strict=True)),
            lambda lent: _KeyedLoading(access, pool, space, keys, offsets, rooms).run(lent),
            stream,
        )
    )


def slot_rooms(pool: Pool, count: int, offsets: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Return the room of each slot; no two overlap.  InvalidArgument."""
    if len(offsets) != count or len(rooms) not in (0, count):
        raise InvalidArgument(f"{count} keys, {len(offsets)} offsets and {len(rooms)} rooms do not go together")
    found, end = [0] * count, pool.size_bytes
    for index in sorted(range(count), key=offsets.__getitem__, reverse=True):
        begin = offsets[index]
        room = found[index] = rooms[index] if rooms else end - begin
        if begin < 0 or room < 0 or begin + room > end or not (room or rooms):
            pool.slot(begin, room)
            raise InvalidArgument("two slots of a load overlap")
        end = begin
    return found


class _KeyedLoading:
    """One load of values by key: its requests in flight and their results."""

    def __init__(
        self,
        access: Access,
        pool: Pool,
        space: int,
        keys: Sequence[bytes],
        offsets: Sequence[int],
        rooms: Sequence[int],
    ) -> None:
        self._access = access
        self._pool = pool
        self._space = space
        self._keys = keys
        self._offsets = offsets
        self._rooms = rooms
        self._lengths = [MISS] * len(keys)
        self._again: list[int] = []
        """Indexes of keys whose bytes did not match, or whose chunk was being moved."""

    def run(self, lent: LentPool) -> Steps[list[int]]:
        pipeline = Pipeline(LOAD_WINDOW)
        size = len(self._keys)
        if self._access.check is not Check.NONE:
            size = -(-size // BATCHES)
        smallest = HEAD_BATCH_MIN if self._access.offers.key_homes else BATCH_MIN
        size = min(max(size, smallest), LOADS_MAX)
        try:
            for first in range(0, len(self._keys), size):
                indexes = range(first, min(first + size, len(self._keys)))
                yield from pipeline.submit(Send(self._request(lent, indexes)), self._loaded(indexes))
            yield from pipeline.drain()
        except LakeError:
            yield from pipeline.settle()
            raise
        if self._again:
            again = self._again
            slots = [self._pool.slot(self._offsets[index], self._rooms[index]) for index in again]
            streamed = yield from stream_values(
                self._access, self._space, [self._keys[index] for index in again], slots
            )
            for index, length in zip(again, streamed, strict=True):
                self._lengths[index] = length
        return self._lengths

    def _request(self, lent: LentPool, indexes: Sequence[int]) -> KeyedLoad:
        return KeyedLoad(
            lent.number,
            self._space,
            [self._keys[index] for index in indexes],
            [self._offsets[index] for index in indexes],
            [self._rooms[index] for index in indexes],
            self._access.check is Check.CRC32C,
            lent.fabric,
        )

    def _loaded(self, indexes: Sequence[int]) -> Callable[[Reply], Steps[None]]:
        def done(reply: Reply) -> Steps[None]:
            loaded = reply.message
            assert isinstance(loaded, KeyedLoaded)
            self._again += _too_many(indexes, loaded.failures) + _failed_with(indexes, loaded.failures, StaleGrant)
            arrived = self._arrived(indexes, loaded)
            if self._access.check is not Check.NONE and arrived:
                mismatched = set((yield from work(_mismatched, arrived)))
                self._again += sorted(mismatched)

        return done

    def _arrived(self, indexes: Sequence[int], loaded: KeyedLoaded) -> list[_Part]:
        """Return the parts to check, and note the lengths of the values that they belong to."""
        parts: list[_Part] = []
        at = 0
        for index, count in zip(indexes, loaded.counts, strict=True):
            pieces = pieces_of(loaded.chunks[at : at + count], loaded.lengths[at : at + count])
            crcs = loaded.crcs[at : at + count] or [b""] * count
            at += count
            if value_bytes(pieces) > self._rooms[index]:
                continue  # the engine loads no such value: a miss
            self._lengths[index] = value_bytes(pieces)
            for (chunk, offset, length), crc in zip(pieces, crcs, strict=True):
                parts.append((index, chunk, self._pool.slot(self._offsets[index] + offset, length), crc))
        return parts


_Part = tuple[int, bytes, memoryview, bytes]
"""Index of the key, id of the chunk, its bytes, and the checksums of their granules (empty: the id is compared)."""


def _mismatched(parts: Sequence[_Part]) -> list[int]:
    """Return the indexes of keys of which a part has other bytes than its chunk."""
    return [
        index
        for index, chunk, view, crcs in parts
        if not (granule_crcs(view) == crcs if crcs else matches_id(chunk, view))
    ]


# --- through the socket ----------------------------------------------------------------------------------


def stream_values(access: Access, space: int, keys: Sequence[bytes], slots: Sequence[memoryview]) -> Steps[list[int]]:
    """Stream values into memory, part by part, and check them; return their lengths, `MISS` where that failed."""
    values = yield from find_values(space, keys)
    lengths = [value_bytes(pieces) for pieces in values]
    pipeline = Pipeline(LOAD_WINDOW)
    try:
        for index, (pieces, slot) in enumerate(zip(values, slots, strict=True)):
            if lengths[index] > len(slot):
                lengths[index] = MISS
                continue
            for piece in pieces:
                target = slot[piece.offset : piece.offset + piece.length]
                request = ReadChunks([bytes(piece.chunk)], [0], [0])
                yield from pipeline.submit(
                    Send(request, into=[target]), _checking(access, piece, target, lengths, index)
                )
        yield from pipeline.drain()
    except LakeError:
        yield from pipeline.settle()
        raise
    return lengths


def _checking(
    access: Access, piece: Piece, target: memoryview, lengths: list[int], index: int
) -> Callable[[Reply], Steps[None]]:
    def done(reply: Reply) -> Steps[None]:
        assert isinstance(reply.message, ReadChunksReply)
        (answer,) = reply.message.pieces
        if answer.failure is not None or (answer.offset, answer.length) != (0, piece.length):
            reply.body.release()
            lengths[index] = MISS
        elif access.check is not Check.NONE and not (yield from work(matches_id, bytes(piece.chunk), target)):
            lengths[index] = MISS

    return done


# --- answers ---------------------------------------------------------------------------------------------


def _values_of(matched: KeyedMatched) -> list[list[Piece]]:
    values: list[list[Piece]] = []
    at = 0
    for count in matched.counts:
        values.append(pieces_of(matched.chunks[at : at + count], matched.lengths[at : at + count]))
        at += count
    return values


def _too_many(indexes: Sequence[int], failures: Sequence[Failure | None]) -> list[int]:
    """Return the indexes of keys that did not fit in the answer beside those before them."""
    return _failed_with(indexes, failures, RequestTooLarge)


def _failed_with(indexes: Sequence[int], failures: Sequence[Failure | None], kind: type[LakeError]) -> list[int]:
    return [
        index
        for index, failure in zip(indexes, failures, strict=False)
        if failure is not None and isinstance(failure.as_error(), kind)
    ]
