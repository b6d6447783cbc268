"""The keys of one request that changes values: checked, put each by itself, and answered each by itself.

A key that occurs again in one request is answered like its first occurrence: as present if that one has a value now,
else with the same failure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

from engine.chunks.payload import Payload, PayloadMemory, ReceivedBody, check_body
from engine.format.keyed import KeyedValue, SpaceRecord
from engine.keyed.keyed_blobs import KeyedBlobs
from engine.keyed.spaces import Usage, charge, find_space
from engine.keyed.values import key_problem, value_problem
from engine.requests.answers import failure_of
from engine.tables.views import Transaction, View
from lakefs.errors import EngineBusy, InvalidArgument, LakeError, RequestTooLarge
from lakefs.ids import ChunkId, ChunkKind
from lakefs.limits import BATCH_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

KEYED_PARTS_PER_STEP: Final = 8192
"""Parts of the values that one step of the loop reads for a request about keys: about two milliseconds."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise RequestTooLarge for more keys than a request may have."""
    if len(keys) > BATCH_MAX:
        raise RequestTooLarge(f"{len(keys)} keys in one request; the limit is {BATCH_MAX}")


def divided(keys: Sequence[bytes]) -> tuple[dict[int, LakeError], list[int]]:
    """Return the errors of keys that no value has, by index, and the indexes of the others."""
    problems = {index: problem for index, key in enumerate(keys) if (problem := key_problem(key)) is not None}
    return problems, [index for index in range(len(keys)) if index not in problems]


def failures_of(problems: Mapping[int, LakeError], count: int) -> list[m.Failure | None]:
    """Return the failures of so many keys, as answers have them: none at all if no key failed."""
    if not problems:
        return []
    return [failure_of(problems[index]) if index in problems else None for index in range(count)]


class KeyedBatch:
    """Keys, their values' parts, and their outcomes so far."""

    def __init__(self, request: m.KeyedPut | m.KeyedCommit, part_count: int) -> None:
        """Raises RequestTooLarge, and InvalidArgument when the lists do not fit each other."""
        check_keys(request.keys)
        keys, counts = request.keys, request.counts
        if len(counts) != len(keys) or len(request.depths) not in (0, len(keys)):
            raise InvalidArgument("keys and counts go together, and depths with them when there are any")
        if part_count > BATCH_MAX:
            raise RequestTooLarge(f"{part_count} parts in one request; the limit is {BATCH_MAX}")
        if any(count < 0 for count in counts) or sum(counts) != part_count:
            raise InvalidArgument(f"the counts of parts do not add up to {part_count}")
        self.number = request.space
        self.keys = keys
        self.depths = request.depths or [0] * len(keys)
        self.resize = request.resize
        ends = [0, *accumulate(counts)]
        self._parts = [range(begin, end) for begin, end in pairwise(ends)]
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        self._repeats = {index: first[key] for index, key in enumerate(keys) if first[key] != index}
        self.wanted = [index for index in range(len(keys)) if index not in self._repeats]
        """Indices of keys without an outcome, ascending; each key once."""
        self.outcomes = [m.KEYED_FAILED] * len(keys)
        self._failures: dict[int, m.Failure] = {}
        self.lengths = [0] * part_count
        """Bytes of each part."""

    def parts(self, index: int) -> range:
        """Return the indices of a key's parts."""
        return self._parts[index]

    def lengths_of(self, index: int) -> list[int]:
        """Return the bytes of each part of a key's value."""
        return [self.lengths[part] for part in self._parts[index]]

    def size_of(self, index: int) -> int:
        """Return the bytes of a key's value."""
        return sum(self.lengths_of(index))

    def charge_of(self, index: int) -> int:
        """Return what a key's value counts against its space's quota."""
        return charge(self.size_of(index), len(self.parts(index)))

    def fail(self, index: int, error: LakeError) -> None:
        """Give the key a failure."""
        self.outcomes[index] = m.KEYED_FAILED
        self._failures[index] = failure_of(error)

    def note(self, index: int, outcome: int, failure: m.Failure | None) -> None:
        """Give the key an outcome that another engine answered."""
        self.outcomes[index] = outcome
        if failure is not None:
            self._failures[index] = failure

    def drop_settled(self) -> None:
        """Leave in `wanted` only keys without an outcome."""
        self.wanted = [
            index for index in self.wanted if index not in self._failures and self.outcomes[index] == m.KEYED_FAILED
        ]

    def look(self, keyed: KeyedBlobs, begin: int, view: View) -> int | None:
        """Settle the wanted keys from index `begin` on that fail by themselves or are present, as many as one step may.

        Returns the index to go on from, None after the last.  SpaceNotFound.
        """
        space, values = find_space(view, self.number), keyed.values()
        parts = 0
        for index in self.wanted[bisect_left(self.wanted, begin) :]:
            if parts >= KEYED_PARTS_PER_STEP:
                return index
            lengths = self.lengths_of(index)
            problem = key_problem(self.keys[index])
            problem = problem or value_problem(lengths, self.depths[index], space.quota_bytes)
            if problem is not None:
                self.fail(index, problem)
                continue
            present = values.find(view, self.number, self.keys[index])
            if present is not None:
                parts += len(present.chunks)
                is_other = present.size_bytes != sum(lengths)
                if not (is_other and self.resize):
                    self.outcomes[index] = m.KEYED_PRESENT
                keyed.counts.differed += is_other
        self.drop_settled()
        return None

    def admit(self, keyed: KeyedBlobs, space: SpaceRecord) -> int:
        """Fail the keys for which their space has no room; returns the charge of the others."""
        room, admitted = keyed.room(self.number, space), 0
        for index in self.wanted:
            charged = self.charge_of(index)
            if room is not None and admitted + charged > room:
                self.fail(index, EngineBusy(f"space {space.name!r} is full, of {space.quota_bytes} bytes; try later"))
            else:
                admitted += charged
        self.drop_settled()
        return admitted

    def bind(
        self, txn: Transaction, keyed: KeyedBlobs, chunks: Sequence[ChunkId | None], decided: Callable[[], None]
    ) -> dict[int, KeyedValue]:
        """Put the wanted keys, unless a chunk of theirs is None; returns the present values of those that had one.

        Calls `decided` when the space's usage has them.  SpaceNotFound.
        """
        space, values = find_space(txn, self.number), keyed.values()
        usage = Usage(txn, self.number, space)
        found: dict[int, KeyedValue] = {}
        for index in self.wanted:
            own = [chunk for part in self.parts(index) if (chunk := chunks[part]) is not None]
            if len(own) < len(self.parts(index)):
                continue
            value = values.new_value(space, self.depths[index], own, self.lengths_of(index))
            present = values.put(txn, usage, self.number, self.keys[index], value, resize=self.resize)
            if present is not None:
                found[index] = present
        usage.save()
        decided()
        return found

    def settle(self, keyed: KeyedBlobs, chunks: Sequence[ChunkId | None], found: dict[int, KeyedValue]) -> None:
        """Record the outcomes of a `bind` that was committed."""
        for index in self.wanted:
            own = tuple(chunks[part] for part in self.parts(index))
            if index in found:
                self.outcomes[index] = m.KEYED_PRESENT
                other = found[index]
                same_cut = list(other.lengths) == self.lengths_of(index)
                keyed.counts.differed += own != other.chunks if same_cut else other.size_bytes != self.size_of(index)
            elif None not in own:
                self.outcomes[index] = m.KEYED_STORED
                keyed.counts.stored += 1
                keyed.counts.stored_bytes += self.size_of(index)

    def reply(self, keyed: KeyedBlobs | None = None) -> Reply:
        """Return the reply: an outcome for each key.  `keyed` counts them."""
        for index, first in self._repeats.items():
            if first in self._failures:
                self._failures[index] = self._failures[first]
            else:
                self.outcomes[index] = m.KEYED_PRESENT
        if keyed is not None:
            keyed.counts.present += self.outcomes.count(m.KEYED_PRESENT)
            keyed.counts.failed += len(self._failures)
        assert all(
            (outcome == m.KEYED_FAILED) == (index in self._failures) for index, outcome in enumerate(self.outcomes)
        ), "each key has an outcome, or the reason why not"
        failures: list[m.Failure | None] = []
        if self._failures:
            failures = [self._failures.get(index) for index in range(len(self.keys))]
        return Reply(m.KeyedOutcomes(self.outcomes, failures))


# --- values of a KeyedPut ----------------------------------------------------------------------------


async def receive_parts(memory: PayloadMemory, request: m.KeyedPut, body_bytes: int) -> ReceivedBody:
    """Allocate memory for the parts of a request that brings them in its body.  InvalidArgument, EngineBusy."""
    if not body_bytes:
        return ReceivedBody()
    check_body(request.lengths, body_bytes)
    if request.offsets:
        raise InvalidArgument("the parts are slots of lent memory, or in the body, and not both")
    return await memory.take([ChunkKind.DATA] * len(request.lengths), request.lengths)


def batch_of_put(request: m.KeyedPut) -> KeyedBatch:
    """Return the keys of a request with the lengths of their parts.  InvalidArgument, RequestTooLarge."""
    batch = KeyedBatch(request, len(request.lengths))
    batch.lengths = request.lengths
    if request.offsets and len(request.offsets) != len(request.lengths):
        raise InvalidArgument(f"{len(request.offsets)} offsets for {len(request.lengths)} parts")
    return batch


def parts_in_body(request: m.KeyedPut, body: Body) -> Sequence[Payload]:
    """Return the parts that came in the request's body.  InvalidArgument if it has another number of them."""
    payloads = body.payloads if isinstance(body, ReceivedBody) else []
    if len(payloads) != len(request.lengths):
        raise InvalidArgument(f"{len(request.lengths)} parts, and neither slots nor a body for them")
    return payloads
