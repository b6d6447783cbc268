"""Put of many small objects as steps, in few requests and journal groups: from buffers, and from shared memory.

Rules kept here:
- Each name is atomic by itself; all are tried, and the first failure is raised at the end.
- Names and lengths are checked before any request is sent.
- At most two requests are under way: the engine receives or copies, and decides, one while it syncs the other.  Only
  one is if two would hold too few short objects each: a group of the journal costs the engine as much as 30 of them.
- By RDMA one is: the client has one memory that the engine READs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from lakefs.errors import InvalidArgument, LakeError, SessionLost
from lakefs.host.plain_bytes import bytes_to_put
from lakefs.host.writable_memory import ReadableBuffer
from lakefs.ids import Buffer
from lakefs.limits import (
    BODY_BYTES_MAX,
    CHUNK_BYTES,
    FRAME_BYTES,
    PUT_MANY_COUNT,
    PUT_MANY_SHORT_BYTES,
    PUT_MANY_WINDOW,
)
from lakefs.names import Name, parse_new_name
from lakefs.put.batches import batches, by_memory, view_of
from lakefs.put.lent import forget_number, lend, send_slots, take_back
from lakefs.put.remote import put_remotely
from lakefs.put.shared_memory import SharedMemory, Slot
from lakefs.put.upload import Transfer, result_of
from lakefs.steps.steps import Pipeline, Send, Steps, send
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    NO_CONDITION,
    NameChange,
    NameResults,
    ObjectAttributes,
    ObjectStat,
    PutObjects,
    PutSlots,
)


class _Object(NamedTuple):
    """One object to put; `place` is its index in the answer."""

    place: int
    name: Name
    data: Buffer | Slot
    length: int


class _Put:
    """A put of many objects under way, with the results so far."""

    def __init__(self, transfer: Transfer, count: int, attributes: ObjectAttributes, create_bucket: bool) -> None:
        self.transfer = transfer
        self.stats: list[ObjectStat | None] = [None] * count
        self.failures: list[LakeError] = []
        self._attributes = attributes
        self._create_bucket = create_bucket

    def changes(self, batch: Sequence[_Object]) -> list[NameChange]:
        return [NameChange(*item.name, b"", self._attributes, NO_CONDITION, self._create_bucket) for item in batch]

    def note(self, batch: Sequence[_Object], reply: Reply) -> None:
        """Note the answer to a request: stats and failures."""
        assert isinstance(reply.message, NameResults)
        for item, result in zip(batch, reply.message.results, strict=True):
            try:
                self.stats[item.place] = result_of(result)
            except LakeError as error:
                self.failures.append(error)


def put_many(
    transfer: Transfer,
    objects: Sequence[tuple[str, ReadableBuffer | Slot]],
    attributes: ObjectAttributes,
    *,
    create_bucket: bool,
    in_flight: int,
) -> Steps[list[ObjectStat]]:
    """Store objects of at most 4 MiB, at most `in_flight` under way; return stats in order.  Durable on return.

    InvalidName, InvalidArgument, and the errors of puts.
    """
    parsed = [_parsed(place, name, data) for place, (name, data) in enumerate(objects)]
    put = _Put(transfer, len(parsed), attributes, create_bucket)
    try:
        yield from _put_all(put, parsed, in_flight)
    except LakeError:
        raise  # nothing is in flight, or its connection has ended
    except BaseException:
        for memory, _ in by_memory(parsed):
            if memory is not None:
                yield from take_back(transfer, memory)
        raise
    if put.failures:
        raise put.failures[0]
    return [stat for stat in put.stats if stat is not None]


def _put_all(put: _Put, objects: Sequence[_Object], in_flight: int) -> Steps[None]:
    """Put all, at most so many under way; nothing is in flight when this returns or raises a LakeError."""
    at_once = max(1, in_flight // PUT_MANY_WINDOW)
    if all(item.length <= PUT_MANY_SHORT_BYTES for item in objects):
        at_once = max(at_once, min(in_flight, PUT_MANY_COUNT))
    is_single = at_once * PUT_MANY_WINDOW > in_flight
    pipeline = Pipeline(PUT_MANY_WINDOW)
    try:
        for memory, group in by_memory(objects):
            yield from _submit_group(pipeline, put, memory, group, at_once, is_single)
        yield from pipeline.drain()
    except LakeError:
        yield from pipeline.settle()
        raise


def _submit_group(
    pipeline: Pipeline, put: _Put, memory: SharedMemory | None, group: Sequence[_Object], at_once: int, is_single: bool
) -> Steps[None]:
    """Submit the requests for objects of one memory, or of none; `is_single`: one after the other."""
    number = None if memory is None else (yield from lend(put.transfer, memory))
    if memory is None or number is None:
        for batch in batches(group, FRAME_BYTES, at_once):
            if is_single:
                yield from pipeline.drain()
            payloads = [view_of(item.data) for item in batch]
            reply = yield from put_remotely(put.transfer.fabric, payloads, partial(put.changes, batch))
            if reply is not None:
                put.note(batch, reply)
                continue
            yield from pipeline.submit(_bodies(put, batch), _noting(put, batch))
    else:
        for batch in batches(group, BODY_BYTES_MAX, at_once):
            if is_single:
                yield from pipeline.drain()
            yield from _submit_slots(pipeline, put, batch, memory, number)


def _parsed(place: int, name: str, data: ReadableBuffer | Slot) -> _Object:
    parsed = parse_new_name(name)
    taken = data if isinstance(data, Slot) else bytes_to_put(data, name)
    length = taken.length if isinstance(taken, Slot) else taken.nbytes
    if length > CHUNK_BYTES:
        raise InvalidArgument(f"{name} is longer than {CHUNK_BYTES} bytes; put it by itself", subject=name)
    return _Object(place, parsed, taken, length)


def _noting(put: _Put, batch: Sequence[_Object]) -> Callable[[Reply], None]:
    return lambda reply: put.note(batch, reply)


def _bodies(put: _Put, batch: Sequence[_Object]) -> Send:
    """Return the request that carries the objects' bytes in its body."""
    payloads = [view_of(item.data) for item in batch]
    return Send(PutObjects([item.length for item in batch], put.changes(batch)), body=payloads)


def _submit_slots(
    pipeline: Pipeline, put: _Put, batch: list[_Object], memory: SharedMemory, number: int
) -> Steps[None]:
    """Submit a request for objects that the engine copies; it is sent again if the memory's connection was lost."""
    slots = [item.data for item in batch if isinstance(item.data, Slot)]
    offsets, lengths = [slot.offset for slot in slots], [slot.length for slot in slots]

    def request_for(known: int) -> PutSlots:
        return PutSlots(known, offsets, lengths, put.changes(batch))

    def failed(error: Exception) -> Steps[None] | None:
        if not isinstance(error, SessionLost):
            raise error
        return again()

    def again() -> Steps[None]:
        forget_number(put.transfer.lent, memory, number)
        reply = yield from send_slots(put.transfer, memory, request_for)
        if reply is None:
            effect = _bodies(put, batch)
            reply = yield from send(effect.request, effect.body)
        put.note(batch, reply)

    yield from pipeline.submit(Send(request_for(number)), _noting(put, batch), failed)
