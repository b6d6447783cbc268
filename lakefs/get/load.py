"""Loads into a pool as steps: the engine writes chunks to slots of a client's memory, and the client checks them.

Where memory can neither be lent nor reached by RDMA (to an engine that has no room for more of it, or that does not
support it) the bytes are streamed into the slots.

Rules kept here:
- A chunk is checked in its slot, as the client's `check` says, while the next chunks are being moved.
- A chunk that fails its check is loaded once more, then streamed: the engine then reads past its page cache and notes
  damage.  If it fails even then, ChunkDamaged is raised.
- After a load has failed or was cancelled, nothing more is written to the pool: requests in flight are waited for, or
  the lending is ended (`lakefs.get.pool_lending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from lakefs.content.verify import Check, damaged, granule_crcs, matches_id
from lakefs.errors import ChunkNotFound, CorruptionError, InvalidArgument, LakeError, StaleGrant
from lakefs.get.objects import close_leases, open_objects
from lakefs.get.opened import Access, Opened
from lakefs.get.pool_lending import LentPool, into_lent_pool
from lakefs.get.pools import Pool
from lakefs.ids import EMPTY_CHUNK, ChunkId, id_text
from lakefs.limits import CHECK_BYTES, CHUNK_BYTES, KIB, LOAD_WINDOW
from lakefs.names import parse_object_name
from lakefs.steps.steps import Pipeline, Send, Steps, Work, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import LoadSlots, ReadChunks, ReadChunksReply, SlotsLoaded

BATCHES: Final = 2
"""Requests for one load whose bytes are checked: chunks of the first are checked while the second is served."""
BATCH_MIN: Final = 8
BATCH_MAX: Final = 256
CHECKED_AT_ONCE_BYTES: Final = 512 * KIB
"""Most bytes that are checked between two steps, in the driver's own thread: 70 us."""


class Slot(NamedTuple):
    """A chunk to load: the slot's offset, its room in bytes, and the chunk's name in errors."""

    chunk: ChunkId
    offset: int
    room: int
    name: str


def load_many(
    access: Access, pool: Pool, wanted: Sequence[ChunkId | str], offsets: Sequence[int], rooms: Sequence[int]
) -> Steps[list[int]]:
    """Load chunks by id, and objects by name, to the offsets; return their lengths.  See `ReadSteps.load_many`."""
    pool.check_own()
    if len(wanted) != len(offsets) or len(rooms) not in (0, len(wanted)):
        raise InvalidArgument("what is loaded, offsets and rooms go together")
    # Without a room a slot ends with the pool.
    rooms = rooms or [max(0, pool.size_bytes - offset) for offset in offsets]
    leases: list[int] = []
    try:
        opened = yield from _open(access, [item for item in wanted if isinstance(item, str)], leases)
        slots: list[Slot] = []
        owners: list[int] = []
        for index, (item, offset, room) in enumerate(zip(wanted, offsets, rooms, strict=True)):
            found = (
                _slots_of(pool, opened[item], offset, room) if isinstance(item, str) else [Slot(item, offset, room, "")]
            )
            slots += found
            owners += [index] * len(found)
        loaded = yield from load_slots(access, pool, slots)
    finally:
        yield from close_leases(leases)
    lengths = [0] * len(wanted)
    for owner, length in zip(owners, loaded, strict=True):
        lengths[owner] += length
    return lengths


def load_slots(access: Access, pool: Pool, slots: Sequence[Slot]) -> Steps[list[int]]:
    """Load chunks; return their lengths, in order.  Raises the first failure; the slots may then hold anything."""
    following = _Following(slots)
    return (
        yield from into_lent_pool(
            access,
            pool,
            [(slot.offset, min(slot.room, CHUNK_BYTES)) for slot in slots],
            lambda lent: _Loading(access, pool, slots, following, lent).run(),
            lambda: _stream_all(access, pool, slots, following),
        )
    )


class _Following:
    """The slots of one load, by their offsets.  An engine sees those of a request, and of a stream none."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.order: Final = sorted(range(len(slots)), key=lambda index: slots[index].offset)
        self._slots = slots
        self._next: dict[int, int] = {}
        """Offset of the slot behind each; the empty chunk takes no room."""
        behind: int | None = None
        for index in reversed(self.order):
            if slots[index].chunk == EMPTY_CHUNK:
                continue
            if behind is not None:
                self._next[index] = behind
            behind = slots[index].offset

    def check(self, index: int, length: int) -> None:
        """Raise InvalidArgument if a chunk of this length reaches into the slot behind it."""
        slot = self._slots[index]
        behind = self._next.get(index)
        if behind is not None and slot.offset + length > behind:
            raise _named(
                slot, InvalidArgument(f"its slot ends at {slot.offset + length} and overlaps that at {behind}")
            )


class _Loading:
    """One load: its requests in flight and their results."""

    def __init__(
        self, access: Access, pool: Pool, slots: Sequence[Slot], following: _Following, lent: LentPool
    ) -> None:
        self._access = access
        self._pool = pool
        self._slots = slots
        self._following = following
        self._lent = lent
        self._lengths = [0] * len(slots)
        self._failed: list[int] = []
        """Indexes of slots whose bytes did not match, or whose chunk was being moved to another place."""

    def run(self) -> Steps[list[int]]:
        pipeline = Pipeline(LOAD_WINDOW)
        try:
            for indexes in self._requests():
                yield from pipeline.submit(Send(self._request(indexes)), self._check_of(indexes, pipeline))
            yield from pipeline.drain()
        except LakeError:
            yield from pipeline.settle()
            raise
        for index in self._failed:
            yield from self._load_again(index)
        return self._lengths

    def _requests(self) -> Iterator[range]:
        """Yield the slots of each request.

        Over a network a request more costs more than what its chunks' check beside the others saves: there a request
        is as long as the buffer through which the engine moves it, and shorter loads are one request.
        """
        count = len(self._slots)
        if self._lent.fabric is None:
            size = count if self._access.check is Check.NONE else -(-count // BATCHES)
            size = min(max(size, BATCH_MIN), BATCH_MAX)
            yield from (range(first, min(first + size, count)) for first in range(0, count, size))
            return
        first = total = 0
        for index, length in enumerate(_likely_lengths(self._slots)):
            if index > first and (total + length > CHECK_BYTES or index == first + BATCH_MAX):
                yield range(first, index)
                first, total = index, 0
            total += length
        if count:
            yield range(first, count)

    def _request(self, indexes: Sequence[int]) -> LoadSlots:
        slots = [self._slots[index] for index in indexes]
        return LoadSlots(
            self._lent.number,
            [slot.chunk for slot in slots],
            [slot.offset for slot in slots],
            [slot.room for slot in slots],
            self._access.check is Check.CRC32C,
            self._lent.fabric,
        )

    def _check_of(self, indexes: Sequence[int], pipeline: Pipeline) -> Callable[[Reply], Steps[None]]:
        def check(reply: Reply) -> Steps[None]:
            loaded = reply.message
            assert isinstance(loaded, SlotsLoaded)
            arrived = self._arrived(indexes, loaded)
            if self._lent.fabric is not None and self._access.fabric is not None:
                self._access.fabric.note_moved(sum(map(bool, loaded.lengths)), sum(loaded.lengths))
            if self._access.check is Check.NONE:
                return
            if sum(len(view) for _, view, _ in arrived) <= CHECKED_AT_ONCE_BYTES:
                self._failed.extend(_mismatches(self._slots, arrived))
                return
            for group in _groups(arrived):
                yield from pipeline.submit(Work(_mismatches, (self._slots, group)), self._failed.extend)

        return check

    def _arrived(self, indexes: Sequence[int], loaded: SlotsLoaded) -> list[_Arrived]:
        """Return the slots to check.  Raises a slot's failure, except one that another try may mend (StaleGrant)."""
        arrived: list[_Arrived] = []
        crcs = loaded.crcs or [b""] * len(indexes)
        for index, length, crc in zip(indexes, loaded.lengths, crcs, strict=True):
            slot = self._slots[index]
            self._lengths[index] = length
            self._following.check(index, length)
            arrived.append((index, self._pool.slot(slot.offset, min(length, slot.room)), crc))
        if not loaded.failures:
            return arrived
        for index, failure in zip(indexes, loaded.failures, strict=True):
            if failure is not None:
                error = _named(self._slots[index], failure.as_error())
                if not isinstance(error, StaleGrant):
                    raise error
                self._failed.append(index)
        failed = set(self._failed)
        return [item for item in arrived if item[0] not in failed]

    def _load_again(self, index: int) -> Steps[None]:
        """Load a slot once more, then stream it; the stream's answer is final."""
        slot = self._slots[index]
        length = yield from self._loaded_again(index, slot)
        if length is None:
            length = yield from stream_slot(self._access, self._pool, slot)
        self._lengths[index] = length

    def _loaded_again(self, index: int, slot: Slot) -> Steps[int | None]:
        """Load a slot once more; return the payload's length if it is right now, else None."""
        reply = yield from send(self._request([index]))
        loaded = reply.message
        assert isinstance(loaded, SlotsLoaded)
        if loaded.failures:
            return None
        view = self._pool.slot(slot.offset, min(loaded.lengths[0], slot.room))
        crcs = loaded.crcs[0] if self._access.check is Check.CRC32C else b""
        mismatches = yield from work(_mismatches, [slot], [(0, view, crcs)])
        return None if mismatches else loaded.lengths[0]


_Arrived = tuple[int, memoryview, bytes]
"""Index of the slot, its bytes, and the checksums of their granules (empty: the chunk's id is compared)."""


def _likely_lengths(slots: Sequence[Slot]) -> list[int]:
    """Return the length of each slot's chunk as its room and the next slot's offset tell it; 0 if neither does."""
    lengths = [0] * len(slots)
    behind: int | None = None
    for index in sorted(range(len(slots)), key=lambda index: slots[index].offset, reverse=True):
        _, offset, room, _ = slots[index]
        length = room if behind is None else min(room, behind - offset)
        lengths[index] = length if length <= CHUNK_BYTES else 0
        behind = offset
    return lengths


def _mismatches(slots: Sequence[Slot], arrived: Sequence[_Arrived]) -> list[int]:
    """Return the indexes of slots whose bytes are not their chunk's."""
    return [
        index
        for index, view, crcs in arrived
        if not (granule_crcs(view) == crcs if crcs else matches_id(slots[index].chunk, view))
    ]


def _groups(arrived: Sequence[_Arrived]) -> list[list[_Arrived]]:
    """Group slots; one thread checks a group."""
    groups: list[list[_Arrived]] = [[]]
    size = 0
    for item in arrived:
        if size >= CHECK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += len(item[1])
    return groups


def _open(access: Access, names: Sequence[str], leases: list[int]) -> Steps[dict[str, Opened]]:
    """Open objects for the load; their leases are added to `leases` before any error is raised."""
    if not names:
        return {}
    answers = yield from open_objects(access, [parse_object_name(name) for name in names], inline_bytes=0)
    leases.extend(opened.lease for opened in answers if isinstance(opened, Opened))
    found: dict[str, Opened] = {}
    for name, opened in zip(names, answers, strict=True):
        if isinstance(opened, LakeError):
            raise opened
        found[name] = opened
    return found


def _slots_of(pool: Pool, opened: Opened, offset: int, room: int) -> list[Slot]:
    """Return adjacent slots for an object's chunks, in order.  InvalidArgument when the object does not fit."""
    size = opened.stat.size_bytes
    if size > room:
        raise InvalidArgument(f"{opened.name} has {size} bytes, the slot for it only {room}")
    pool.slot(offset, size)
    name = str(opened.name)
    return [Slot(piece.chunk, offset + piece.offset, piece.length, name) for piece in opened.pieces]


def _stream_all(access: Access, pool: Pool, slots: Sequence[Slot], following: _Following) -> Steps[list[int]]:
    """Stream all chunks into their slots, for a pool that is not lent.

    In the order of the slots: one that is too long is found before the next, which it may have damaged, is checked.
    """
    lengths = [0] * len(slots)
    pipeline = Pipeline(LOAD_WINDOW)
    for index in following.order:
        slot = slots[index]
        target = _room_of(pool, slot)

        def done(reply: Reply, index: int = index, target: memoryview = target) -> Steps[None]:
            assert isinstance(reply.message, ReadChunksReply)
            try:
                following.check(index, sum(piece.length for piece in reply.message.pieces))
            except InvalidArgument:
                reply.body.release()
                raise
            lengths[index] = yield from _check_stream(access, slots[index], reply, target)

        yield from pipeline.submit(_stream_of(slot, target), done)
    yield from pipeline.drain()
    return lengths


def stream_slot(access: Access, pool: Pool, slot: Slot) -> Steps[int]:
    """Stream a chunk into its slot and check it; return its length.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
    target = _room_of(pool, slot)
    effect = _stream_of(slot, target)
    reply = yield from send(effect.request, into=effect.into)
    return (yield from _check_stream(access, slot, reply, target))


def _stream_of(slot: Slot, target: memoryview) -> Send:
    # The empty chunk is not stored anywhere: the request asks for no chunk.
    chunks = [bytes(slot.chunk)] if slot.chunk != EMPTY_CHUNK else []
    return Send(ReadChunks(chunks, [0] * len(chunks), [0] * len(chunks)), into=[target])


def _room_of(pool: Pool, slot: Slot) -> memoryview:
    return pool.slot(slot.offset, max(0, min(slot.room, pool.size_bytes - slot.offset)))


def _check_stream(access: Access, slot: Slot, reply: Reply, target: memoryview) -> Steps[int]:
    assert isinstance(reply.message, ReadChunksReply)
    if slot.chunk == EMPTY_CHUNK:
        return 0
    (piece,) = reply.message.pieces
    if piece.failure is not None:
        reply.body.release()
        raise _named(slot, piece.failure.as_error())
    length = piece.length
    if piece.offset or length > len(target):
        reply.body.release()
        raise InvalidArgument(f"{_called(slot)} has {length} bytes, its slot {len(target)}")
    if access.check is not Check.NONE and (yield from work(_mismatches, [slot], [(0, target[:length], b"")])):
        raise damaged(slot.chunk, _called(slot))
    return length


def _named(slot: Slot, error: LakeError) -> LakeError:
    """Return the engine's failure with the slot's name in it."""
    if isinstance(error, CorruptionError):
        return damaged(slot.chunk, _called(slot), error.message)
    if isinstance(error, ChunkNotFound):
        return ChunkNotFound(f"{_called(slot)}: {error.message}", subject=_called(slot))
    return error


def _called(slot: Slot) -> str:
    return slot.name or id_text(slot.chunk)
