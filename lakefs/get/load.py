"""Loads into a pool as steps: the engine brings chunks to slots of a client's memory, and the client checks them.

Where memory cannot be lent (over TCP, to an engine that has no room for more of it, or that does not know of it) the
bytes are streamed into the slots.

Rules kept here:
- What arrived is checked where it lies, as the client's `check` says, while the next chunks are being moved.
- What fails its check is loaded once more, then streamed: the engine then looks past its page cache, and notes damage.
  What fails even then is ChunkDamaged.
- A pool is lent when it is first used, and again when the engine does not know its number any more.
- A load that has failed, or was cancelled, writes nothing more to the pool: what is in flight is waited for, or the
  lending is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lakefs.content.verify import Check, damaged, granule_crcs, matches_id
from lakefs.errors import (
    ChunkNotFound,
    CorruptionError,
    EngineBusy,
    InvalidArgument,
    LakeError,
    PermissionDenied,
    SessionLost,
    StaleGrant,
    UnsupportedVersion,
)
from lakefs.get.objects import close_leases, open_objects
from lakefs.get.opened import Access, Opened
from lakefs.get.pools import Pool
from lakefs.ids import EMPTY_CHUNK, ChunkId, id_text
from lakefs.limits import CHECK_BYTES, KIB, LOAD_WINDOW
from lakefs.names import parse_object_name
from lakefs.steps.steps import Pipeline, Send, Start, Steps, Tell, Wait, Work, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    LendMemory,
    LoadSlots,
    MemoryLent,
    ReadChunks,
    ReadChunksReply,
    ReturnMemory,
    SlotsLoaded,
)

ATTEMPTS: Final = 3
BATCHES: Final = 2
"""Requests for one load, when they are checked: what the first brings is checked while the second is served."""
BATCH_MIN: Final = 8
BATCH_MAX: Final = 256
CHECKED_AT_ONCE_BYTES: Final = 512 * KIB
"""Checked between two steps, in the driver's own thread: 70 us."""


class Slot(NamedTuple):
    """A chunk to load: where to, how many bytes there are for it, and what it is called in errors."""

    chunk: ChunkId
    offset: int
    room: int
    name: str


def load_many(
    access: Access,
    pool: Pool,
    wanted: Sequence[ChunkId | str],
    offsets: Sequence[int],
    rooms: Sequence[int],
) -> Steps[list[int]]:
    """Load chunks by id, and objects by name, to the offsets; their lengths in bytes.  See `ReadSteps.load_many`."""
    pool.check_own()
    if len(wanted) != len(offsets) or len(rooms) not in (0, len(wanted)):
        raise InvalidArgument("what is loaded, offsets and rooms go together")
    # Without a room a slot ends with the pool; the engine refuses those that overlap.
    rooms = rooms or [max(0, pool.size_bytes - offset) for offset in offsets]
    leases: list[int] = []
    try:
        opened = yield from _open(access, [item for item in wanted if isinstance(item, str)], leases)
        slots: list[Slot] = []
        owners: list[int] = []
        for index, (item, offset, room) in enumerate(zip(wanted, offsets, rooms, strict=True)):
            found = (
                _slots_of(pool, opened[item], offset, room)
                if isinstance(item, str)
                else [Slot(item, offset, room, "")]
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
    """Load chunks; their lengths, in order.  The first failure is raised; the slots then hold anything."""
    for attempt in range(ATTEMPTS):
        number = yield from _lend(access, pool)
        if number is None:
            return (yield from _stream_all(access, pool, slots))
        try:
            return (yield from _Loading(access, pool, slots, number).run())
        except SessionLost:
            yield from _take_back(pool, number)  # for the lost connection the engine may be at it still
            if attempt == ATTEMPTS - 1:
                raise
        except LakeError:
            raise  # nothing is in flight
        except BaseException:
            yield from _take_back(pool, number)
            raise
    raise AssertionError("the last attempt has returned or raised")


def _take_back(pool: Pool, number: int) -> Steps[None]:
    """End the lending of a load that was cancelled: else what is in flight might write to slots of the next one."""
    pool.forget(number)
    try:
        yield from send(ReturnMemory(number))
    except LakeError:
        return  # it ends with its connection


def return_pool(pool: Pool) -> Steps[None]:
    """End the lending; nothing happens when it is not lent, or is another process's.

    The engine touches the memory no more on return.
    """
    number, pool.number = pool.number, None
    if number is not None and pool.is_own:
        yield from send(ReturnMemory(number))


class _Loading:
    """One load: requests in flight, and what has come of them."""

    def __init__(self, access: Access, pool: Pool, slots: Sequence[Slot], number: int) -> None:
        self._access = access
        self._pool = pool
        self._slots = slots
        self._number = number
        self._lengths = [0] * len(slots)
        self._failed: list[int] = []
        """Slots whose bytes did not match, or whose chunk was on its way to another place."""

    def run(self) -> Steps[list[int]]:
        pipeline = Pipeline(LOAD_WINDOW)
        size = len(self._slots)
        if self._access.check is not Check.NONE:
            size = -(-size // BATCHES)
        size = min(max(size, BATCH_MIN), BATCH_MAX)
        try:
            for first in range(0, len(self._slots), size):
                indexes = range(first, min(first + size, len(self._slots)))
                yield from pipeline.submit(Send(self._request(indexes)), self._check_of(indexes, pipeline))
            yield from pipeline.drain()
        except LakeError:
            yield from pipeline.settle()
            raise
        for index in self._failed:
            yield from self._load_again(index)
        return self._lengths

    def _request(self, indexes: Sequence[int]) -> LoadSlots:
        slots = [self._slots[index] for index in indexes]
        return LoadSlots(
            self._number,
            [slot.chunk for slot in slots],
            [slot.offset for slot in slots],
            [slot.room for slot in slots],
            self._access.check is Check.CRC32C,
        )

    def _check_of(self, indexes: Sequence[int], pipeline: Pipeline) -> Callable[[Reply], Steps[None]]:
        def check(reply: Reply) -> Steps[None]:
            loaded = reply.message
            assert isinstance(loaded, SlotsLoaded)
            arrived = self._arrived(indexes, loaded)
            if self._access.check is Check.NONE:
                return
            if sum(len(view) for _, view, _ in arrived) <= CHECKED_AT_ONCE_BYTES:
                self._failed.extend(_mismatches(self._slots, arrived))
                return
            for group in _groups(arrived):
                yield from pipeline.submit(Work(_mismatches, (self._slots, group)), self._note_mismatches)

        return check

    def _note_mismatches(self, found: list[int]) -> None:
        self._failed.extend(found)

    def _arrived(self, indexes: Sequence[int], loaded: SlotsLoaded) -> list[_Arrived]:
        """What has arrived, to be checked; the failure of a slot is raised, but those that another try may mend."""
        arrived: list[_Arrived] = []
        crcs = loaded.crcs or [b""] * len(indexes)
        for index, length, crc in zip(indexes, loaded.lengths, crcs, strict=True):
            slot = self._slots[index]
            self._lengths[index] = length
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
        """Once more by the engine, then as a stream, whose answer is final."""
        slot = self._slots[index]
        again = _Once(self._access, self._pool, slot, self._number)
        length = yield from again.load()
        if length is None:
            length = yield from stream_slot(self._access, self._pool, slot)
        self._lengths[index] = length


class _Once:
    """One more try at one slot."""

    def __init__(self, access: Access, pool: Pool, slot: Slot, number: int) -> None:
        self._access = access
        self._pool = pool
        self._slot = slot
        self._number = number

    def load(self) -> Steps[int | None]:
        """The length of what arrived and is right; None when that does not help."""
        slot = self._slot
        with_crcs = self._access.check is Check.CRC32C
        request = LoadSlots(self._number, [slot.chunk], [slot.offset], [slot.room], with_crcs)
        reply = yield from send(request)
        loaded = reply.message
        assert isinstance(loaded, SlotsLoaded)
        if loaded.failures:
            return None
        view = self._pool.slot(slot.offset, min(loaded.lengths[0], slot.room))
        crcs = loaded.crcs[0] if with_crcs else b""
        mismatches = yield from work(_mismatches, [slot], [(0, view, crcs)])
        return None if mismatches else loaded.lengths[0]


_Arrived = tuple[int, memoryview, bytes]
"""Index of the slot, its bytes, and the checksums of their granules (empty: the chunk's id is compared)."""


def _mismatches(slots: Sequence[Slot], arrived: Sequence[_Arrived]) -> list[int]:
    """Slots whose bytes are not their chunk's."""
    return [
        index
        for index, view, crcs in arrived
        if not (granule_crcs(view) == crcs if crcs else matches_id(slots[index].chunk, view))
    ]


def _groups(arrived: Sequence[_Arrived]) -> list[list[_Arrived]]:
    """Portions for threads."""
    groups: list[list[_Arrived]] = [[]]
    size = 0
    for item in arrived:
        if size >= CHECK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += len(item[1])
    return groups


def _lend(access: Access, pool: Pool) -> Steps[int | None]:
    """The number by which the engine knows the pool, lent now if it was not; None where it cannot be."""
    if pool.number is not None or pool.is_refused or not access.can_use_descriptors:
        return pool.number
    try:
        reply = yield from send(LendMemory(pool.size_bytes, True), descriptors=[pool.descriptor])
    except EngineBusy:
        return None
    except (PermissionDenied, UnsupportedVersion):
        pool.is_refused = True
        return None
    assert isinstance(reply.message, MemoryLent)
    if not pool.note_lent(reply.message.memory):  # another operation was faster
        yield Tell(ReturnMemory(reply.message.memory))
    return pool.number


def _open(access: Access, names: Sequence[str], leases: list[int]) -> Steps[dict[str, Opened]]:
    """Objects opened for the load; their leases are added to `leases` as soon as they are there."""
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
    """Slots of an object's chunks, one behind the other.  InvalidArgument when it does not fit."""
    size = opened.stat.size_bytes
    if size > room:
        raise InvalidArgument(f"{opened.name} has {size} bytes, the slot for it only {room}")
    pool.slot(offset, size)
    name = str(opened.name)
    return [Slot(piece.chunk, offset + piece.offset, piece.length, name) for piece in opened.pieces]


def _stream_all(access: Access, pool: Pool, slots: Sequence[Slot]) -> Steps[list[int]]:
    """Load by streams, for pools that are not lent."""
    lengths = [0] * len(slots)
    pipeline = Pipeline(LOAD_WINDOW)
    for index, slot in enumerate(slots):
        target = _room_of(pool, slot)

        def done(reply: Reply, index: int = index, target: memoryview = target) -> Steps[None]:
            lengths[index] = yield from _check_stream(access, slots[index], reply, target)

        yield from pipeline.submit(_stream_of(slot, target), done)
    yield from pipeline.drain()
    return lengths


def stream_slot(access: Access, pool: Pool, slot: Slot) -> Steps[int]:
    """Have a chunk sent into its slot, and check it; its length.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
    target = _room_of(pool, slot)
    ticket = yield Start(_stream_of(slot, target))
    reply = yield Wait(ticket)
    return (yield from _check_stream(access, slot, reply, target))


def _stream_of(slot: Slot, target: memoryview) -> Send:
    # The empty chunk is nowhere; nothing is asked for.
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
    """The engine's failure, with the name of what was wanted."""
    if isinstance(error, CorruptionError):
        return damaged(slot.chunk, _called(slot), error.message)
    if isinstance(error, ChunkNotFound):
        return ChunkNotFound(f"{_called(slot)}: {error.message}", subject=_called(slot))
    return error


def _called(slot: Slot) -> str:
    return slot.name or id_text(slot.chunk)
