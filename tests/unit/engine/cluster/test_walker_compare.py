"""Lists of members, merged and compared: pages of any size give the same windows, and what differs is found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest

from engine.members.ports import Members
from engine.walker import walker_compare
from engine.walker.walker_compare import UNKNOWN, Sizes, Verdicts, compare, copies_of, is_whole
from engine.walker.walker_lists import DAMAGED_BYTES, Columns, ShardList, Windows, by_partition
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import Buffer, MemberId
from lakefs.limits import GRANULE_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.unit.support.metadata_rig import run

CODE = ErasureCode(4, 2)
HOMES = tuple(MemberId(bytes([number]) * 16) for number in range(6))
OTHER = MemberId(b"o" * 16)
LENGTHS = (1, 5000, GRANULE_BYTES, GRANULE_BYTES + 1, 200_000, 300_000, 400_000, 1 << 22)
Entry = tuple[bytes, int, int, int]


class Listing:
    """Members that only list."""

    def __init__(self, shards: dict[MemberId, list[Entry]]) -> None:
        self.shards = {member: sorted(entries) for member, entries in shards.items()}

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        assert isinstance(request, m.ListShards)
        at = int.from_bytes(request.after, "big")
        entries = self.shards[member]
        page = entries[at : at + request.limit]
        following = at + request.limit
        after = following.to_bytes(4, "big") if following < len(entries) else b""
        chunks, shards = [e[0] for e in page], [e[1] for e in page]
        lengths, chunk_lengths = [e[2] for e in page], [e[3] for e in page]
        return Reply(m.ShardsListed(chunks, shards, lengths, [7] * len(page), [1] * len(page), after, chunk_lengths))


def some_lists(rng: random.Random, chunks: int) -> tuple[dict[MemberId, list[Entry]], dict[bytes, int]]:
    """Return members' lists of chunks at home, and the chunks' lengths."""
    lists: dict[MemberId, list[Entry]] = {member: [] for member in (*HOMES, OTHER)}
    lengths = {b"\1" + rng.randbytes(32): rng.choice(LENGTHS) for _ in range(chunks)}
    for chunk, length in lengths.items():
        for shard in CODE.shards(length):
            lists[HOMES[shard]].append((chunk, shard, CODE.part_bytes(length, shard), length))
    return lists, lengths


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_pages_each_chunk_is_in_one_window_with_all_its_shards_and_what_differs_is_found(
    seed: int,
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        lists, lengths = some_lists(rng, 60)
        odd: set[bytes] = set()
        for member in HOMES:
            for entry in rng.sample(lists[member], 3):
                lists[member].remove(entry)
                odd.add(entry[0])
                if rng.random() < 0.5:
                    lists[rng.choice([OTHER, *HOMES])].append(entry)
        expected = {
            chunk: sorted((m_, n) for m_, entries in lists.items() for c, n, *_ in entries if c == chunk)
            for chunk in lengths
        }
        port = cast(Members, Listing(lists))
        for page in (1, 2, 7, 1000):
            merged = Windows([ShardList(port, member, b"", b"", page) for member in lists])
            seen: dict[bytes, list[tuple[MemberId, int]]] = {}
            found: set[bytes] = set()
            count = 0
            while (window := await merged.next()) is not None:
                chunks = {chunk for _, columns in window for chunk in columns.chunks}
                assert not chunks & seen.keys()
                seen |= {c: sorted((one.member, one.shard) for one in copies_of(c, window)) for c in chunks}
                compared = compare(window, HOMES, set(HOMES), Verdicts(CODE))
                count += compared.chunk_count
                found.update(compared.odd)
            whole = {chunk: copies for chunk, copies in expected.items() if copies}
            assert (seen, count) == (whole, len(whole))
            restored = {c for c in odd if expected[c] == sorted((HOMES[n], n) for n in CODE.shards(lengths[c]))}
            assert found == odd - restored - {c for c in odd if not expected[c]}

    run(main, seed)


def columns_of(entries: Sequence[Entry]) -> Columns:
    """Return a member's list, in order."""
    found = Columns()
    for chunk, shard, length, chunk_length in sorted(entries):
        found.append(Columns([chunk], [shard], [length], [7], [chunk_length]))
    return found


def changed(entry: Entry, rng: random.Random, *, is_other: bool) -> Entry:
    """Return another shard, or one that has other lengths."""
    chunk, shard, length, chunk_length = entry
    other = rng.choice((0, 3) if is_other else (0, 1, 2, 3))
    if other == 0:
        return chunk, (shard + 1) % 6, length, chunk_length
    if other == 1:
        return chunk, shard, length + 1, chunk_length
    if other == 2:
        return chunk, shard, length, rng.choice([0, chunk_length + 1, max(1, chunk_length - 1)])
    return chunk[:-1] + bytes([chunk[-1] ^ 1]), shard, length, chunk_length


@pytest.mark.parametrize("seed", range(60))
def test_whole_columns_say_the_same_as_chunks_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    lists, lengths = some_lists(rng, 12)
    damage = seed % 6
    if damage:
        victims = lists[rng.choice(HOMES)]
        at = rng.randrange(len(victims))
        one = victims.pop(at)
        damaged = (*one[:2], DAMAGED_BYTES, 0)
        other = [one, changed(one, rng, is_other=True)]
        victims += [[], [changed(one, rng, is_other=False)], other, [damaged], [one]][damage - 1]
        if damage == 5:
            lists[OTHER].append(damaged)
    window = [(member, columns_of(entries)) for member, entries in lists.items() if entries]
    quick = compare(window, HOMES, set(HOMES), Verdicts(CODE))
    monkeypatch.setattr(walker_compare, "_is_all_whole", lambda *_: False)
    slow = compare(window, HOMES, set(HOMES), Verdicts(CODE))
    assert quick == slow
    assert bool(quick.odd) == bool(damage)
    if not damage:
        assert quick.chunk_count == len(lengths)


@pytest.mark.parametrize("bits", [2, 8, 12, 14])
def test_a_window_is_split_by_partition_and_nothing_of_it_is_lost(bits: int) -> None:
    rng = random.Random(bits)
    lists, _ = some_lists(rng, 80)
    kinds = {
        member: [(bytes([rng.choice((1, 2))]) + entry[0][1:], *entry[1:]) for entry in entries]
        for member, entries in lists.items()
    }
    window = [(member, columns_of(entries)) for member, entries in kinds.items()]
    parts = list(by_partition(window, bits))
    begins = [(part[0][1].chunks[0][0], partition) for partition, part in parts]
    assert begins == sorted(set(begins)), "each partition of each kind once, in order"
    joined = {member: Columns() for member, _ in window}
    for partition, part in parts:
        for member, columns in part:
            joined[member].append(columns)
            assert all(int.from_bytes(chunk[1:3], "big") >> 16 - bits == partition for chunk in columns.chunks)
    assert joined == dict(window)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_shard_that_is_missing_is_seen_and_one_that_is_not_known_is_not(length: int) -> None:
    sizes = CODE.sizes(length)
    whole: list[Sizes | None] = [(sizes[number], length) if number in sizes else None for number in range(6)]
    assert is_whole(CODE, tuple(whole))
    for number in range(6):

        def with_(one: Sizes | None, at: int = number) -> tuple[Sizes | None, ...]:
            return *whole[:at], one, *whole[at + 1 :]

        assert is_whole(CODE, with_(UNKNOWN))
        assert is_whole(CODE, with_(None)) == (number not in sizes)
        size = sizes.get(number, 1)
        others = [(size, length + 1), (size + 1, length), (size, 0), (size, -1), (size, 1 << 40), (0, length)]
        assert not any(is_whole(CODE, with_(other)) for other in others)
    assert not is_whole(CODE, (None,) * 6)
    assert not is_whole(CODE, (UNKNOWN,) * 6), "nobody says its length"


def test_of_homes_that_have_several_shards_of_a_row_each_counts() -> None:
    homes = (HOMES[0], HOMES[1], HOMES[2], HOMES[0], HOMES[1], HOMES[2])
    chunk, length = b"\1" * 33, 1 << 22
    columns = {home: Columns() for home in homes}
    for number, home in enumerate(homes):
        columns[home].append(Columns([chunk], [number], [CODE.part_bytes(length, number)], [1], [length]))
    window = list(columns.items())
    assert compare(window, homes, set(homes), Verdicts(CODE)) == (1, [])
    columns[HOMES[1]].take(1)
    assert compare(window, homes, set(homes), Verdicts(CODE)) == (1, [chunk])
    assert compare(window, homes, set(homes) - {HOMES[1]}, Verdicts(CODE)) == (1, [])
