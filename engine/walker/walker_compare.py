"""Compares the lists of one window: which chunks have all their shards at home, and which the walker must look at.

Nearly all chunks are whole, so they are not looked at one by one.  For each shard number there is a table from chunk
to the length of that shard at its home.  A chunk's *signature* is its lengths in these tables; few signatures exist,
or they are judged quickly, and each is judged once (`Verdicts`).

Rules kept here:
- What a home that has not answered has is not known: its shards count neither as present nor as missing.
- A shard anywhere but at its home makes its chunk odd.
- Lengths alone decide.  Copies with other bytes are found by their readers, by scrub, and by a deep walk.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from enum import Enum, auto
from itertools import repeat
from typing import Final, NamedTuple

from engine.stripes.shard_lengths import readings_of
from engine.walker.walker_lists import Columns, Window
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import MemberId
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES

UNKNOWN: Final = -1
"""In a signature: the shard's home has not answered."""
VERDICTS_MAX: Final = 65_536
"""Signatures that are kept, about 200 bytes each: 13 MiB.  Chunks of one granule have one for each length."""

Signature = tuple[int | None, ...]
"""For each shard number the length of the shard at its home, None if it is absent there, or UNKNOWN."""


class Verdict(Enum):
    """State of a chunk's shards at their homes."""

    WHOLE = auto()
    """All that can be seen is there."""
    ODD = auto()
    """Some are missing, or their lengths do not fit each other."""
    UNSURE = auto()
    """All are there, unless the chunk is longer than they are: its hash has to be checked."""


class Copy(NamedTuple):
    """A shard as one member listed it."""

    member: MemberId
    shard: int
    length: int
    crc: int | None
    """Checksum of its record; None: not known, but its bytes are right."""


class Compared(NamedTuple):
    """Chunks of a window: how many there are, those that are odd, and those that have to be checked by their hash."""

    chunk_count: int
    odd: list[bytes]
    unsure: list[bytes]


class Verdicts:
    """Judges signatures, and remembers them."""

    def __init__(self, code: ErasureCode) -> None:
        self.code: Final = code
        self._known: dict[Signature, Verdict] = {}

    def of(self, signature: Signature) -> Verdict:
        """Return the verdict on a signature."""
        verdict = self._known.get(signature)
        if verdict is None:
            if len(self._known) >= VERDICTS_MAX:
                self._known.clear()
            verdict = self._known[signature] = judge(self.code, signature)
        return verdict


def judge(code: ErasureCode, signature: Signature, length: int = 0) -> Verdict:
    """Return the verdict on a signature, of a chunk whose length is known if it is not 0."""
    if _is_plainly_whole(code, signature):
        return Verdict.WHOLE
    if length:
        return Verdict.ODD if any(signature[number] is None for number in code.shards(length)) else Verdict.WHOLE
    present = {number: size for number, size in enumerate(signature) if size is not None and size != UNKNOWN}
    readings = readings_of(code, present) if present else []
    if not readings:
        return Verdict.ODD
    needed = (*range(readings[0].data_shards), *range(code.data, code.data + code.parity))
    if any(signature[number] is None for number in needed):
        return Verdict.ODD
    if len(readings) == 1 or any(signature[number] == UNKNOWN for number in range(readings[1].data_shards)):
        return Verdict.WHOLE
    return Verdict.UNSURE


def _is_plainly_whole(code: ErasureCode, signature: Signature) -> bool:
    """Return True for a whole chunk whose last data shard is short, or the only one: nearly all, and soon seen."""
    count = signature.index(None) if None in signature else code.data
    size, last = signature[0], signature[count - 1]
    if count == 0 or count > code.data or size is None or last is None or last == UNKNOWN:
        return False
    if any(one != size for one in (*signature[: count - 1], *signature[code.data :])):
        return False
    if any(one is not None for one in signature[count : code.data]):
        return False
    if count == 1:
        return size % GRANULE_BYTES != 0 and size <= CHUNK_BYTES
    return last < size and code.shard_bytes((count - 1) * size + last) == size


def compare(window: Window, homes: Sequence[MemberId], answered: Set[MemberId], verdicts: Verdicts) -> Compared:
    """Compare the lists of a window.  `homes` has the home of each shard number, `answered` the members that listed."""
    at_home: list[dict[bytes, int]] = [{} for _ in homes]
    odd: set[bytes] = set()
    for member, columns in window:
        numbers = [number for number, home in enumerate(homes) if home == member]
        _sort_in(columns, numbers, at_home, odd)
    chunks = list(set().union(*at_home) - odd)
    signatures = zip(
        *(
            map(table.get, chunks) if home in answered else repeat(UNKNOWN)
            for table, home in zip(at_home, homes, strict=True)
        ),
        strict=False,
    )
    unsure: list[bytes] = []
    of = verdicts.of
    for chunk, signature in zip(chunks, signatures, strict=False):
        verdict = of(signature)
        if verdict is Verdict.ODD:
            odd.add(chunk)
        elif verdict is Verdict.UNSURE:
            unsure.append(chunk)
    count = len(chunks) + len(odd.difference(chunks))
    return Compared(count, sorted(odd), sorted(unsure))


def _sort_in(columns: Columns, numbers: list[int], at_home: list[dict[bytes, int]], odd: set[bytes]) -> None:
    """Add a member's shards to the tables of the numbers that are at home there; chunks of others are odd."""
    if len(numbers) == 1 and columns.shards.count(numbers[0]) == len(columns):
        at_home[numbers[0]].update(zip(columns.chunks, columns.lengths, strict=True))
        return
    for chunk, shard, length in zip(columns.chunks, columns.shards, columns.lengths, strict=True):
        if shard in numbers:
            at_home[shard][chunk] = length
        else:
            odd.add(chunk)


def copies_of(chunk: bytes, window: Window) -> list[Copy]:
    """Return all listed shards of a chunk."""
    copies: list[Copy] = []
    for member, columns in window:
        at = bisect_left(columns.chunks, chunk)
        while at < len(columns) and columns.chunks[at] == chunk:
            copies.append(Copy(member, columns.shards[at], columns.lengths[at], columns.crcs[at]))
            at += 1
    return copies


def signature_of(copies: Iterable[Copy], homes: Sequence[MemberId], unknown: Set[int]) -> Signature:
    """Return the signature that copies make; `unknown` are numbers of shards that count as not known."""
    sizes = {copy.shard: copy.length for copy in copies if homes[copy.shard] == copy.member}
    return tuple([UNKNOWN if number in unknown else sizes.get(number) for number in range(len(homes))])
