"""Compares the lists of one window: which chunks have all their shards at home, and which the walker must look at.

Nearly all chunks are whole, so they are not looked at one by one.  First whole columns are compared: the first home
lists all chunks, which say what the other homes have to list (`_is_all_whole`).  If one differs, there is for each
shard number a table from chunk to the length of that shard at its home, and of the chunk as its home says it.  A
chunk's *signature* is what these tables have of it; there is one for each length of whole chunks, and it is judged once
(`Verdicts`).

Rules kept here:
- What a home that has not answered has is not known: its shards count neither as present nor as missing.
- A shard anywhere but at its home makes its chunk odd, and so does a damaged one, wherever it is: by its length it is
  not the shard that its home has to have, and it is nobody's copy.
- Lengths alone decide.  Copies with other bytes are found by their readers, by scrub, and by a deep walk.
- Homes that say different lengths of a chunk make it odd: its hash decides which are right.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import compress, repeat
from typing import Final, NamedTuple

from engine.walker.walker_lists import DAMAGED_BYTES, Columns, Window
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import MemberId
from lakefs.limits import CHUNK_BYTES

Sizes = tuple[int, ...]
"""Bytes of a shard, and of its chunk."""
UNKNOWN: Final[Sizes] = ()
"""In a signature: the shard's home has not answered."""
VERDICTS_MAX: Final = 16_384
"""Signatures that are kept, at 4+2 about 700 bytes each: 11 MiB."""

Signature = tuple[Sizes | None, ...]
"""For each shard number its sizes at its home, None if it is absent there, or UNKNOWN."""


class Copy(NamedTuple):
    """A shard as one member listed it."""

    member: MemberId
    shard: int
    length: int
    chunk_bytes: int
    crc: int | None
    """Checksum of its record; None: not known, but its bytes are right."""


class Damaged(NamedTuple):
    """A shard that its member knows to be damaged."""

    member: MemberId
    shard: int


class Compared(NamedTuple):
    """Chunks of a window: how many there are, and those that are odd."""

    chunk_count: int
    odd: list[bytes]


class Verdicts:
    """Judges signatures, and remembers them."""

    def __init__(self, code: ErasureCode) -> None:
        self.code: Final = code
        self._known: dict[Signature, bool] = {}
        self._rows: dict[int, tuple[int, ...]] = {}

    def rows(self, lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Return for each shard number the lengths of that shard of chunks of these lengths; 0: it has none."""
        if len(self._rows) >= VERDICTS_MAX:
            self._rows.clear()
        for length in set(lengths).difference(self._rows):
            self._rows[length] = _row(self.code, length)
        return zip(*map(self._rows.__getitem__, lengths), strict=True)

    def is_whole(self, signature: Signature) -> bool:
        """Return the verdict on a signature."""
        verdict = self._known.get(signature)
        if verdict is None:
            if len(self._known) >= VERDICTS_MAX:
                self._known.clear()
            verdict = self._known[signature] = is_whole(self.code, signature)
        return verdict


def _row(code: ErasureCode, length: int) -> tuple[int, ...]:
    """Return the length of each shard of a chunk, 0 for one that it has not; all are 0 if no chunk has that length."""
    if not 0 < length <= CHUNK_BYTES:
        return (0,) * (code.data + code.parity)
    size = code.shard_bytes(length)
    before_last = (length - 1) // size
    last = length - before_last * size
    return *(size,) * before_last, last, *(0,) * (code.data - before_last - 1), *(size,) * code.parity


def is_whole(code: ErasureCode, signature: Signature) -> bool:
    """Return True if all shards of a chunk are at their homes, as far as they are known, and say one length of it."""
    length = next((one[1] for one in signature if one), 0)
    if not 0 < length <= CHUNK_BYTES:
        return False
    whole = tuple([(size, length) if size else None for size in _row(code, length)])
    return signature == whole or all(one in (UNKNOWN, other) for one, other in zip(signature, whole, strict=True))


def compare(window: Window, homes: Sequence[MemberId], answered: Set[MemberId], verdicts: Verdicts) -> Compared:
    """Compare the lists of a window.  `homes` has the home of each shard number, `answered` the members that listed."""
    lists = dict(window)
    if _is_all_whole(lists, homes, verdicts):
        return Compared(len(lists[homes[0]]), [])
    at_home: list[dict[bytes, Sizes]] = [{} for _ in homes]
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
    judge = verdicts.is_whole
    odd.update([chunk for chunk, signature in zip(chunks, signatures, strict=False) if not judge(signature)])
    count = len(chunks) + len(odd.difference(chunks))
    return Compared(count, sorted(odd))


def _is_all_whole(lists: Mapping[MemberId, Columns], homes: Sequence[MemberId], verdicts: Verdicts) -> bool:
    """Return True if the homes, each of one shard number, list all shards of the same chunks, and nothing else does."""
    if len(lists) != len(homes) or not all(home in lists for home in homes):
        return False  # the window of few chunks, or a member has several numbers, or a stray
    first = lists[homes[0]]
    for number, (home, expected) in enumerate(zip(homes, verdicts.rows(first.chunk_lengths), strict=True)):
        columns, chunks, lengths = lists[home], first.chunks, first.chunk_lengths
        if not all(expected):
            chunks, lengths = list(compress(chunks, expected)), list(compress(lengths, expected))
            expected = tuple(filter(None, expected))
        same = columns.chunks == chunks and columns.chunk_lengths == lengths and columns.lengths == list(expected)
        if not same or columns.shards.count(number) != len(columns):
            return False
    return True


def _sort_in(columns: Columns, numbers: list[int], at_home: list[dict[bytes, Sizes]], odd: set[bytes]) -> None:
    """Add a member's shards to the tables of the numbers that are at home there; chunks of others are odd."""
    sizes = zip(columns.lengths, columns.chunk_lengths, strict=True)
    if len(numbers) == 1 and columns.shards.count(numbers[0]) == len(columns):
        at_home[numbers[0]].update(zip(columns.chunks, sizes, strict=True))
        return
    for chunk, shard, of_both in zip(columns.chunks, columns.shards, sizes, strict=True):
        if shard in numbers:
            at_home[shard][chunk] = of_both
        else:
            odd.add(chunk)


def copies_of(chunk: bytes, window: Window) -> list[Copy]:
    """Return all listed shards of a chunk, but for damaged ones."""
    return [copy for copy in _rows_of(chunk, window) if copy.length != DAMAGED_BYTES]


def damaged_of(chunk: bytes, window: Window) -> list[Damaged]:
    """Return the shards of a chunk that are listed as damaged."""
    return [Damaged(row.member, row.shard) for row in _rows_of(chunk, window) if row.length == DAMAGED_BYTES]


def _rows_of(chunk: bytes, window: Window) -> Iterator[Copy]:
    for member, columns in window:
        at = bisect_left(columns.chunks, chunk)
        while at < len(columns) and columns.chunks[at] == chunk:
            sizes = columns.lengths[at], columns.chunk_lengths[at]
            yield Copy(member, columns.shards[at], *sizes, columns.crcs[at])
            at += 1


def signature_of(copies: Iterable[Copy], homes: Sequence[MemberId], unknown: Set[int]) -> Signature:
    """Return the signature that copies make; `unknown` are numbers of shards that count as not known."""
    sizes = {copy.shard: (copy.length, copy.chunk_bytes) for copy in copies if homes[copy.shard] == copy.member}
    return tuple([UNKNOWN if number in unknown else sizes.get(number) for number in range(len(homes))])
