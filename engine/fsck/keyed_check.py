"""Checks keyed blobs of an open store, for `engine.fsck.check`.

Every value must belong to a space, and each of its chunks must exist with the part's length.  A value that expires
must have its expiry record, and no other value has one.  Every name of a space
must have its record.  A space's usage must be that of its values; it is compared only if nothing changed in the table
between two looks at it, so beside writers it may stay unchecked.  Damaged values are named by space and key.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.format.keyed import (
    EXPIRIES_BEGIN,
    EXPIRIES_END,
    NAMES_BEGIN,
    NOT_COUNTED,
    SPACES_BEGIN,
    SPACES_END,
    VALUES_BEGIN,
    VALUES_END,
    SpaceRecord,
    expiry_key,
    number_of_space,
    space_and_key,
    space_key,
    unpack_expiry_key,
    unpack_space,
    unpack_value,
    value_key,
)
from engine.format.layouts import Table
from engine.fsck.report import Problem
from engine.metadata.metadata_store import Metadata
from engine.namespace.walk import records, value_of
from lakefs.errors import LakeError
from lakefs.findings import Finding
from lakefs.ids import ChunkId

ChunkProblem = Callable[[ChunkId, int], Problem | None]
"""Returns the problem of a chunk with a given length, or None."""


def value_name(metadata: Metadata, key: bytes) -> str:
    """Return the name of a value for people, from its key in the table: its space, and its own key in hex."""
    number, own = space_and_key(key)
    record = value_of(metadata, Table.KEYED, space_key(number))
    try:
        space = repr(unpack_space(record).name) if record is not None else str(number)
    except LakeError:
        space = str(number)
    return f"space {space}, key {own.hex()}"


class KeyedCheck:
    """Checks the table `keyed`, page by page, beside writers.  Memory: the spaces, and the damaged records."""

    def __init__(self, metadata: Metadata, chunk_problem: ChunkProblem) -> None:
        self._metadata = metadata
        self._chunk_problem = chunk_problem
        self._damaged: dict[bytes, Problem] = {}
        """Problems, by the key of a record."""
        self.counts = {"spaces": 0, "values": 0}

    async def run(self) -> None:
        """Check all records."""
        before = self._spaces()
        used = dict.fromkeys(before, (0, 0, 0))
        self.counts["spaces"] += len(before)
        async for key, value in records(self._metadata, Table.KEYED, NAMES_BEGIN, VALUES_BEGIN):
            self._name(key, value)
        async for key, value in records(self._metadata, Table.KEYED, VALUES_BEGIN, VALUES_END):
            self.counts["values"] += 1
            number = space_and_key(key)[0]
            size_bytes, part_count = self._value(key, value)
            entries, used_bytes, parts = used.get(number, (0, 0, 0))
            used[number] = entries + 1, used_bytes + size_bytes, parts + part_count
        async for key, _ in records(self._metadata, Table.KEYED, EXPIRIES_BEGIN, EXPIRIES_END):
            self._expiry(key)
        after = self._spaces()
        for number, record in after.items():
            entries, used_bytes, parts = used.get(number, (0, 0, 0))
            told_parts = parts if record.parts == NOT_COUNTED else record.parts
            told = record.entries, record.value_bytes, told_parts
            if before.get(number) == record and told != (entries, used_bytes, parts):
                found = entries, used_bytes, parts
                says = f"its record says {told}, and it has {found}: values, their bytes and parts"
                self._damaged[space_key(number)] = Problem(Finding.KEYED_USAGE_WRONG, says)

    async def values_again(self) -> None:
        """Check values again, after more chunks were found damaged."""
        async for key, value in records(self._metadata, Table.KEYED, VALUES_BEGIN, VALUES_END):
            self._value(key, value)

    def findings(self) -> list[tuple[str, Problem]]:
        """Return the damaged records by name, with their problems."""
        return [(self._name_of(key), problem) for key, problem in self._damaged.items()]

    def _name_of(self, key: bytes) -> str:
        if key[:1] == VALUES_BEGIN:
            return value_name(self._metadata, key)
        if key[:1] == EXPIRIES_BEGIN:
            return f"expiry {key[1:].hex()}"
        if key[:1] == NAMES_BEGIN:
            return f"space {key[1:].decode(errors='replace')!r}"
        return f"space {number_of_space(key)}"

    def _spaces(self) -> dict[int, SpaceRecord]:
        """Return the readable records of spaces, by number."""
        found: dict[int, SpaceRecord] = {}
        with self._metadata.view() as view:
            for key, value in view.scan(Table.KEYED, SPACES_BEGIN, SPACES_END):
                try:
                    found[number_of_space(key)] = unpack_space(value)
                except LakeError as error:
                    self._damaged[key] = Problem(Finding.KEYED_UNREADABLE, error.message)
        return found

    def _name(self, key: bytes, value: bytes) -> None:
        record = value_of(self._metadata, Table.KEYED, space_key(int.from_bytes(value[:4], "big")))
        if record is None and value_of(self._metadata, Table.KEYED, key) == value:
            self._damaged[key] = Problem(Finding.KEYED_MISFILED, "a name of a space that has no record")

    def _expiry(self, key: bytes) -> None:
        expires_ns, number, own = unpack_expiry_key(key)
        with self._metadata.view() as view:  # value and expiry change together
            record = view.get(Table.KEYED, value_key(number, own))
            is_there = view.get(Table.KEYED, key) is not None
        try:
            is_right = record is not None and unpack_value(record).expires_ns == expires_ns
        except LakeError:
            return  # found unreadable by itself
        if is_there and not is_right:
            self._damaged[key] = Problem(Finding.KEYED_MISFILED, "an expiry without its value; upkeep removes it")

    def _has_expiry(self, key: bytes, expires_ns: int) -> bool:
        return value_of(self._metadata, Table.KEYED, expiry_key(expires_ns, *space_and_key(key))) is not None

    def _value(self, key: bytes, record: bytes) -> tuple[int, int]:
        """Check one value; returns its bytes and the number of its parts, 0 if its record cannot be read."""
        size_bytes = part_count = 0
        try:
            value = unpack_value(record)
        except LakeError as error:
            problem: Problem | None = Problem(Finding.KEYED_UNREADABLE, error.message)
        else:
            size_bytes, part_count = value.size_bytes, len(value.lengths)
            parts = zip(value.chunks, value.lengths, strict=True)
            problem = next(filter(None, (self._chunk_problem(chunk, length) for chunk, length in parts)), None)
            if problem is None and value_of(self._metadata, Table.KEYED, space_key(space_and_key(key)[0])) is None:
                problem = Problem(Finding.KEYED_MISFILED, "belongs to no space, and keeps its chunks")
            if problem is None and value.expires_ns and not self._has_expiry(key, value.expires_ns):
                problem = Problem(Finding.KEYED_MISFILED, "has no expiry record, so it stays when its time is over")
        if problem and value_of(self._metadata, Table.KEYED, key) == record:
            self._damaged[key] = problem
        return size_bytes, part_count
