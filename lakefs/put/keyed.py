"""Storing values under keys as steps: from buffers, and from slots of shared memory, which the engine copies.

Rules kept here:
- Each key has an outcome of its own; a failure of one stops no other.
- A value of up to 16 MiB travels with others in one request; a longer one is stored in a session and committed.
- At most two requests are under way.
- After a put has ended, in whatever way, what is written to its slots is bound to no name or key.  If it was cancelled,
  their lending is ended.  If its connection was lost, that was shut down first, and the engine binds what it copied
  only while the connection is open (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from lakefs.errors import ClusterDegraded, EngineBusy, LakeError, RequestTooLarge, SessionLost, SourceChanged, StoreFull
from lakefs.ids import Buffer, ChunkKind
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, CHUNK_BYTES, PUT_MANY_WINDOW, STORE_REQUEST_CHUNKS, STORE_WINDOW
from lakefs.put.batches import batches, by_memory, view_of
from lakefs.put.lent import forget_number, lend, send_slots, take_back
from lakefs.put.shared_memory import SharedMemory, Slot
from lakefs.put.upload import ATTEMPTS, Transfer, forget
from lakefs.steps.steps import Pipeline, Send, Steps, send
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    KEYED_ABSENT,
    KEYED_PRESENT,
    KEYED_REMOVED,
    KEYED_STORED,
    KeyedCommit,
    KeyedOutcomes,
    KeyedPut,
    KeyedRemove,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    StoreChunks,
    Stored,
    StoreSlots,
)

_KEYS_PER_REQUEST: Final = BATCH_MAX // 2
"""Their values have at most twice as many parts, so a request stays under BATCH_MAX of both."""


class Outcome(Enum):
    """The outcome of a put or a removal, for one key."""

    STORED = KEYED_STORED
    """The key has this value from now on; durable."""
    PRESENT = KEYED_PRESENT
    """The key had a value, which stays: values are written once."""
    REMOVED = KEYED_REMOVED
    """The key had a value, which is removed."""
    ABSENT = KEYED_ABSENT
    """The key had no value to remove."""
    FAILED = 0
    """Nothing was changed; the result has the error."""


@dataclass(frozen=True)
class KeyedResult:
    """The outcomes of a batch, in the order of its keys, and the error of each key that failed, by index."""

    outcomes: list[Outcome]
    failures: dict[int, LakeError] = field(default_factory=dict)

    def count(self, outcome: Outcome) -> int:
        """Return how many keys had this outcome."""
        return self.outcomes.count(outcome)

    def note(self, indexes: Sequence[int], reply: Reply) -> None:
        """Note the answer to a request about the keys of these indexes."""
        answer = reply.message
        assert isinstance(answer, KeyedOutcomes)
        for place, (index, code) in enumerate(zip(indexes, answer.outcomes, strict=True)):
            self.outcomes[index] = Outcome(code)
            failure = answer.failures[place] if answer.failures else None
            if failure is not None:
                self.failures[index] = failure.as_error()


class KeyedItem(NamedTuple):
    """A value to put; `place` is its index in the batch."""

    place: int
    key: bytes
    data: Buffer | Slot
    length: int
    depth: int

    @property
    def parts(self) -> list[int]:
        """Lengths of its parts."""
        return [min(CHUNK_BYTES, self.length - at) for at in range(0, self.length, CHUNK_BYTES)]


def put_values(
    transfer: Transfer, space: int, items: Sequence[KeyedItem], result: KeyedResult, *, resize: bool = False
) -> Steps[None]:
    """Store values; their outcomes are noted in `result`.  SpaceNotFound, and errors of the connection.

    `resize`: replace values of another length.
    """
    put = _Put(transfer, space, result, resize)
    try:
        yield from put.run(items)
    except LakeError:
        raise  # nothing is in flight, or its connection has ended
    except BaseException:
        for memory, _ in by_memory(items):
            if memory is not None:
                yield from take_back(transfer, memory)
        raise


def remove_values(space: int, keys: Sequence[bytes]) -> Steps[KeyedResult]:
    """Remove values; durable on return.  SpaceNotFound."""
    result = KeyedResult([Outcome.FAILED] * len(keys))
    for first in range(0, len(keys), BATCH_MAX):
        indexes = range(first, min(first + BATCH_MAX, len(keys)))
        result.note(indexes, (yield from send(KeyedRemove(space, [keys[index] for index in indexes]))))
    return result


class _Put:
    """A put of many values under way."""

    def __init__(self, transfer: Transfer, space: int, result: KeyedResult, resize: bool) -> None:
        self._transfer = transfer
        self._space = space
        self._result = result
        self._resize = resize

    def run(self, items: Sequence[KeyedItem]) -> Steps[None]:
        """Put all; nothing is in flight when this returns or raises a LakeError."""
        pipeline = Pipeline(PUT_MANY_WINDOW)
        try:
            for memory, group in by_memory([item for item in items if item.length <= BODY_BYTES_MAX]):
                number = None if memory is None else (yield from lend(self._transfer, memory))
                for batch in batches(group, BODY_BYTES_MAX, _KEYS_PER_REQUEST):
                    if memory is None or number is None:
                        effect = self._by_body(batch)
                        yield from pipeline.submit(effect, self._noting(batch))
                    else:
                        yield from self._submit_slots(pipeline, batch, memory, number)
            yield from pipeline.drain()
        except LakeError:
            yield from pipeline.settle()
            raise
        for item in items:
            if item.length > BODY_BYTES_MAX:
                yield from self._put_long(item)

    def _noting(self, batch: Sequence[KeyedItem]) -> Callable[[Reply], None]:
        return lambda reply: self._result.note([item.place for item in batch], reply)

    def _request(self, batch: Sequence[KeyedItem], memory: int = 0, offsets: Sequence[int] = ()) -> KeyedPut:
        return KeyedPut(
            self._space,
            [item.key for item in batch],
            [len(item.parts) for item in batch],
            [length for item in batch for length in item.parts],
            [item.depth for item in batch],
            memory,
            list(offsets),
            self._resize,
        )

    def _by_body(self, batch: Sequence[KeyedItem]) -> Send:
        return Send(self._request(batch), body=[view_of(item.data) for item in batch])

    def _submit_slots(
        self, pipeline: Pipeline, batch: list[KeyedItem], memory: SharedMemory, number: int
    ) -> Steps[None]:
        """Submit a request for values that the engine copies; it is sent again if the memory's connection was lost."""
        offsets = [offset for item in batch for offset in _offsets(item)]

        def failed(error: Exception) -> Steps[None] | None:
            if not isinstance(error, SessionLost):
                raise error
            return again()

        def again() -> Steps[None]:
            forget_number(self._transfer.lent, memory, number)
            reply = yield from send_slots(self._transfer, memory, lambda known: self._request(batch, known, offsets))
            if reply is None:
                effect = self._by_body(batch)
                reply = yield from send(effect.request, effect.body)
            self._noting(batch)(reply)

        yield from pipeline.submit(Send(self._request(batch, number, offsets)), self._noting(batch), failed)

    # --- longer than a request ---------------------------------------------------------------------

    def _put_long(self, item: KeyedItem) -> Steps[None]:
        """Store the parts of a long value in a session, and commit them together; a failure of the value is noted."""
        for attempt in range(ATTEMPTS):
            try:
                return (yield from self._put_in_session(item))
            except SessionLost:
                if isinstance(item.data, Slot) and self._transfer.lent is not None:
                    self._transfer.lent.pop(item.data.memory, None)
                if attempt == ATTEMPTS - 1:
                    raise
            except (StoreFull, EngineBusy, ClusterDegraded, RequestTooLarge, SourceChanged) as error:
                self._result.outcomes[item.place] = Outcome.FAILED
                self._result.failures[item.place] = error
                return
        raise AssertionError("the last attempt has returned or raised")

    def _put_in_session(self, item: KeyedItem) -> Steps[None]:
        memory = item.data.memory if isinstance(item.data, Slot) else None
        number = None if memory is None else (yield from lend(self._transfer, memory))
        opened = (yield from send(SessionOpen())).message
        assert isinstance(opened, SessionOpened)
        is_ended = False
        try:
            chunks = yield from self._stored(opened.session, item, number)
            commit = KeyedCommit(
                opened.session,
                self._space,
                [item.key],
                [len(chunks)],
                chunks,
                [item.depth],
                end_session=True,
                resize=self._resize,
            )
            self._noting([item])((yield from send(commit)))
            is_ended = self._result.outcomes[item.place] is not Outcome.FAILED  # the session of a failed key stays
        finally:
            if not is_ended:
                yield from forget(SessionEnd(opened.session))

    def _stored(self, session: bytes, item: KeyedItem, number: int | None) -> Steps[list[bytes]]:
        chunks: list[bytes] = []

        def done(reply: Reply) -> None:
            assert isinstance(reply.message, Stored)
            chunks.extend(reply.message.chunks)

        pipeline = Pipeline(STORE_WINDOW)
        parts, view = item.parts, view_of(item.data)
        try:
            for first in range(0, len(parts), STORE_REQUEST_CHUNKS):
                lengths = parts[first : first + STORE_REQUEST_CHUNKS]
                begin = first * CHUNK_BYTES
                if number is None:
                    request = StoreChunks(session, [int(ChunkKind.DATA)] * len(lengths), lengths)
                    yield from pipeline.submit(Send(request, body=[view[begin : begin + sum(lengths)]]), done)
                else:
                    offsets = _offsets(item)[first : first + STORE_REQUEST_CHUNKS]
                    yield from pipeline.submit(Send(StoreSlots(session, number, offsets, lengths)), done)
            yield from pipeline.drain()
        except LakeError:
            yield from pipeline.settle()
            raise
        return chunks


def _offsets(item: KeyedItem) -> list[int]:
    """Return the offset of each part in the slot's memory."""
    assert isinstance(item.data, Slot)
    return [item.data.offset + at for at in range(0, item.length, CHUNK_BYTES)]
