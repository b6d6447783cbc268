"""Spaces of keyed blobs, as steps: values that are found by (space, key) and written once.

`SpaceSteps` has the operations on one space, `SpacesSteps` those on spaces.  The clients make their methods from both
(`lakefs.client.blocking.spaces`, `lakefs.client.trio.spaces`).

Keys are refused (InvalidArgument) before any request is sent if one is not bytes, has no byte or more than 64, or is in
a batch twice.  All other failures are of single keys: a read has a miss there, a put an outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import ceil
from typing import Final, Protocol

from lakefs.config.values import parse_duration, parse_size
from lakefs.errors import InvalidArgument
from lakefs.get.keyed import (
    Matched,
    Pinned,
    find_present,
    get_values_into,
    load_values,
    match_of,
    pin_values,
    unpin_values,
)
from lakefs.get.opened import Access
from lakefs.get.pools import Pool
from lakefs.host.plain_bytes import bytes_to_put
from lakefs.host.writable_memory import ReadableBuffer, WritableBuffer, writable_memory
from lakefs.lake.uploads import Progress
from lakefs.limits import KEYED_DEPTH_MAX, KEYED_TTL_S_MAX, KEYED_VALUE_BYTES_MAX, KIB
from lakefs.names import check_text, check_value_keys
from lakefs.put.keyed import KeyedItem, KeyedResult, Outcome, put_values, remove_values
from lakefs.put.shared_memory import Slot
from lakefs.put.upload import Transfer
from lakefs.steps.steps import Steps, send
from lakefs.wire.messages import SpaceList, SpaceOpen, SpaceRemove, Spaces, SpaceStat

_NUMBER_MAX: Final = (1 << 63) - 1
"""The largest number that a message carries."""
ASK_FROM_BYTES: Final = 64 * KIB
"""From so many bytes on that would travel through a socket, a put first asks which of its keys have a value."""


class Settings(Protocol):
    """The part of `LakeSteps` that the operations on a space use."""

    def access(self, progress: Progress | None) -> Access:
        """Return the settings of this client's reads."""

    def transfer(self, progress: Progress | None) -> Transfer:
        """Return the settings of this client's puts."""


class SpacesSteps:
    """Operations on spaces."""

    def open_space(
        self, name: str, *, quota: str | int | None = None, ttl: str | float | None = None, create: bool = True
    ) -> Steps[SpaceStat]:
        """Return a space; make it if it does not exist, unless `create` is false (SpaceNotFound).  Durable on return.

        `quota` (bytes, or text such as "200G") and `ttl` (seconds, rounded up, or text such as "7d"), if given, become
        the space's, also if it exists; 0 means none.  InvalidArgument, InvalidName.
        """
        quota_bytes = _whole(parse_size(quota) if isinstance(quota, str) else quota, _NUMBER_MAX, "quota")
        ttl_s = _whole(parse_duration(ttl) if isinstance(ttl, str) else ttl, KEYED_TTL_S_MAX, "TTL")
        reply = yield from send(SpaceOpen(check_text(name), quota_bytes, ttl_s, create))
        assert isinstance(reply.message, SpaceStat)
        return reply.message

    def spaces(self) -> Steps[list[SpaceStat]]:
        """Return all spaces with their usage, in byte order of their names."""
        reply = yield from send(SpaceList())
        assert isinstance(reply.message, Spaces)
        return reply.message.spaces

    def remove_space(self, name: str) -> Steps[None]:
        """Remove a space with all its values.  SpaceNotFound."""
        yield from send(SpaceRemove(check_text(name)))


def _whole(number: float | None, most: int, what: str) -> int | None:
    """Return a setting as a whole number, rounded up.  InvalidArgument, also for what is no number."""
    if number is not None and not 0 <= number <= most:
        raise InvalidArgument(f"the {what} of a space is 0, for none, to {most}, not {number}")
    return None if number is None else ceil(number)


@dataclass(frozen=True)
class SpaceSteps:
    """Operations on the space of that number, which is never used for another space."""

    lake: Settings
    number: int

    def match(self, keys: Sequence[bytes], sizes: Sequence[int] = ()) -> Steps[Matched]:
        """Return which keys have a value: the length of the present prefix, and a flag for each key.

        `sizes`, if given, has for each key the length that its value has to have (0: any); one of another length is not
        present.
        Neither is one that is known to be damaged or has expired.  SpaceNotFound, InvalidArgument.
        """
        checked, wanted = sized_keys(keys, sizes)
        return match_of((yield from find_present(self.number, checked, wanted)))

    def load(
        self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
    ) -> Steps[list[int]]:
        """Load values to offsets of a pool; return their lengths in bytes, in order; 0 for a miss.

        A miss is a key without value, or whose value does not fit or cannot be read right; the other keys are loaded.
        `rooms`, if given, has for each key the most bytes that its value may take; without it a slot ends where the
        next one begins.  Values are checked in the pool, as the client's `check` says.  After a miss, an error or a
        cancellation the slots may hold anything.  SpaceNotFound, InvalidArgument.
        """
        return load_values(self.lake.access(None), pool, self.number, check_value_keys(keys), offsets, rooms)

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> Steps[list[int]]:
        """Read values, each into a buffer, array or tensor at least as long; return their lengths; 0 for a miss.

        The rules of `load` hold.  No two buffers share memory.
        """
        checked, targets = value_memories(keys, buffers)
        return get_values_into(self.lake.access(None), self.number, checked, targets)

    def put_many(
        self,
        keys: Sequence[bytes],
        values: Sequence[ReadableBuffer | Slot],
        *,
        depths: Sequence[int] = (),
        resize: bool = False,
    ) -> Steps[KeyedResult]:
        """Store values (buffers, or slots of shared memory; 1 byte to 256 MiB) under keys; durable on return.

        A key that has a value keeps it, and is reported as PRESENT; with `resize` only a value of the same length is
        kept, and any other is replaced.  `depths`, if given, has the place of each key in its chain, 0 to 65,535: a
        space over its quota loses deeper ones first.  A failure of one key (StoreFull, EngineBusy, RequestTooLarge,
        SourceChanged) is in the result; the others are stored.  SpaceNotFound; InvalidArgument for a value without a
        byte or too long.
        """
        return self.put_items(keyed_items(keys, values, depths), resize=resize)

    def put_items(
        self, items: Sequence[KeyedItem], present: Sequence[bool] = (), *, resize: bool = False
    ) -> Steps[KeyedResult]:
        """Store checked values.  `present`: for each, if its key is known to have a value, which then stays."""
        result = KeyedResult(
            [Outcome.PRESENT if known else Outcome.FAILED for known in present or [False] * len(items)]
        )
        transfer = self.lake.transfer(None)
        asked = [
            item
            for item in items
            if not (isinstance(item.data, Slot) and transfer.offers.lent_memory)
            and result.outcomes[item.place] is not Outcome.PRESENT
        ]
        if sum(item.length for item in asked) >= ASK_FROM_BYTES:
            sizes = [item.length for item in asked] if resize else None
            stored = yield from find_present(self.number, [item.key for item in asked], sizes)
            for item in compress(asked, stored):
                result.outcomes[item.place] = Outcome.PRESENT
        left = [item for item in items if result.outcomes[item.place] is not Outcome.PRESENT]
        yield from put_values(transfer, self.number, left, result, resize=resize)
        return result

    def remove(self, keys: Sequence[bytes]) -> Steps[list[bool]]:
        """Remove values; return for each key if it had one.  Durable on return.  SpaceNotFound.

        ClusterDegraded: the member of the lake that keeps one of the keys is away; the others are removed.
        """
        result = yield from remove_values(self.number, check_value_keys(keys))
        for failure in result.failures.values():
            raise failure
        return [outcome is Outcome.REMOVED for outcome in result.outcomes]

    def pin(self, keys: Sequence[bytes]) -> Steps[Pinned]:
        """Keep the bytes of values until `unpin`, or until the connection ends, whatever becomes of their keys.

        At most 4,096 keys.  SpaceNotFound, EngineBusy.
        """
        return pin_values(self.number, check_value_keys(keys))

    def unpin(self, pinned: Pinned) -> Steps[None]:
        """End a pin; does nothing if its connection has ended."""
        return unpin_values(self.lake.access(None), pinned)


def sized_keys(keys: Sequence[bytes], sizes: Sequence[int]) -> tuple[list[bytes], list[int] | None]:
    """Return checked keys, and the length that the value of each has to have; None: any.  InvalidArgument."""
    checked = check_value_keys(keys)
    if len(sizes) not in (0, len(checked)):
        raise InvalidArgument(f"{len(checked)} keys and {len(sizes)} sizes do not go together")
    return checked, list(sizes) or None


def value_memories(keys: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> tuple[list[bytes], list[memoryview]]:
    """Return checked keys, and the memory for each value.  InvalidArgument."""
    checked = check_value_keys(keys)
    if len(buffers) != len(checked):
        raise InvalidArgument(f"{len(checked)} keys and {len(buffers)} buffers do not go together")
    return checked, [writable_memory(buffer, "a value") for buffer in buffers]


def keyed_items(
    keys: Sequence[bytes], values: Sequence[ReadableBuffer | Slot], depths: Sequence[int] = ()
) -> list[KeyedItem]:
    """Return values to put, checked.  InvalidArgument."""
    checked = check_value_keys(keys)
    if len(values) != len(checked) or len(depths) not in (0, len(checked)):
        raise InvalidArgument(f"{len(checked)} keys, {len(values)} values and {len(depths)} depths do not go together")
    return [
        _item(place, key, data, depths[place] if depths else 0)
        for place, (key, data) in enumerate(zip(checked, values, strict=True))
    ]


def _item(place: int, key: bytes, data: ReadableBuffer | Slot, depth: int) -> KeyedItem:
    taken = data if isinstance(data, Slot) else bytes_to_put(data, f"key {key.hex()}")
    length = taken.length if isinstance(taken, Slot) else taken.nbytes
    if not 1 <= length <= KEYED_VALUE_BYTES_MAX:
        raise InvalidArgument(f"a value has 1 to {KEYED_VALUE_BYTES_MAX} bytes, that of key {key.hex()} has {length}")
    if not 0 <= depth <= KEYED_DEPTH_MAX:
        raise InvalidArgument(f"a depth is 0 to {KEYED_DEPTH_MAX}, not {depth}")
    return KeyedItem(place, key, taken, length, depth)
