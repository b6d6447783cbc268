"""The DRAM tier against a model: never another chunk's bytes, never over its limit, and figures that add up."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from engine.format.checksums import seal_payload, vector_of
from engine.format.extents import large_extent_bytes
from engine.tiers.arena import CELL_SIZES, Arena, Cell
from engine.tiers.dram_tier import DramTier, Placement
from lakefs.content.verify import vector_bytes
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire.grants import Grant
from lakefs.wire.media import MEDIUM_SEGMENT

SLAB = 1 * MIB
LENGTHS = (4 * KIB, 16 * KIB, 40 * KIB, 64 * KIB, 100 * KIB, 256 * KIB)


def _payload(number: int, length: int) -> bytes:
    return (number.to_bytes(4, "little") * (length // 4 + 1))[:length]


def _extent(length: int) -> int:
    return length + vector_bytes(length)


@contextmanager
def _tier(slabs: int = 2) -> Iterator[DramTier]:
    tier = DramTier(Arena(slabs, SLAB))
    yield tier
    tier.close()


def _reserved(tier: DramTier, chunk: ChunkId, length: int) -> Cell | None:
    size = tier.needs_slab(chunk, _extent(length))
    if size is not None:
        tier.add_slab(tier.arena.make_slab_memory(), size)
    return tier.reserve(chunk, _extent(length))


def _fill(tier: DramTier, cell: Cell, payload: bytes) -> bool:
    area = memoryview(bytearray(large_extent_bytes(len(payload))))
    area[: len(payload)] = payload
    crc = seal_payload(area, len(payload), vector_of(payload))
    tier.arena.memory(cell)[: _extent(len(payload))] = area[: _extent(len(payload))]
    return tier.publish(cell, len(payload), crc)


def _bring_in(tier: DramTier, payload: bytes, reads: int = 2) -> ChunkId:
    chunk = data_chunk_id(payload)
    for _ in range(reads):
        tier.note_read(chunk, len(payload))
    cell = _reserved(tier, chunk, len(payload))
    if cell is not None:
        _fill(tier, cell, payload)
    return chunk


class TierModel(RuleBasedStateMachine):
    """Reads, fills that end in any order, frees and pins, beside a dictionary of what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = DramTier(Arena(2, SLAB))
        self.tier.on_admitted.append(self._admitted)
        self.tier.on_demoted.append(self._demoted)
        self.told: set[ChunkId] = set()
        self.filling: list[tuple[Cell, bytes, bool]] = []
        self.pins: list[tuple[Placement, bytes]] = []
        self.granted: list[tuple[Placement, bytes]] = []
        self.counted: Counter[str] = Counter()

    def _admitted(self, chunk: ChunkId) -> None:
        assert chunk not in self.told
        self.told.add(chunk)

    def _demoted(self, chunk: ChunkId) -> None:
        self.told.remove(chunk)

    @rule(number=integers(0, 3), length=sampled_from(LENGTHS), times=integers(1, 5))
    def read(self, number: int, length: int, times: int) -> None:
        payload = _payload(number, length)
        chunk = data_chunk_id(payload)
        place = self.tier.find(chunk)
        self.counted["hits" if place else "misses"] += 1
        if place is not None:
            assert bytes(self.tier.extent(place)[: len(payload)]) == payload
            self.granted.append((place, payload))
        for _ in range(times):
            worth_it = self.tier.note_read(chunk, length)
        if worth_it:
            cell = _reserved(self.tier, chunk, length)
            if cell is not None:
                self.filling.append((cell, payload, False))

    @rule(which=integers(0, 10))
    @precondition(lambda self: self.filling)
    def fill(self, which: int) -> None:
        if self.filling:
            cell, payload, _ = self.filling.pop(which % len(self.filling))
            wanted = self.tier._filling.get(data_chunk_id(payload)) is cell
            assert _fill(self.tier, cell, payload) is wanted
            self.counted["fills"] += wanted

    @rule(which=integers(0, 10))
    def fail_to_fill(self, which: int) -> None:
        if self.filling:
            cell, _, _ = self.filling.pop(which % len(self.filling))
            self.tier.arena.memory(cell)[:4] = b"torn"
            self.tier.abandon(cell)

    @rule(number=integers(0, 3), length=sampled_from(LENGTHS))
    def free(self, number: int, length: int) -> None:
        chunk = data_chunk_id(_payload(number, length))
        self.counted["forgotten"] += chunk in self.tier
        self.tier.forget(chunk)
        assert chunk not in self.tier
        assert self.tier.pin(chunk) is None

    @rule(number=integers(0, 3), length=sampled_from(LENGTHS))
    def pin(self, number: int, length: int) -> None:
        payload = _payload(number, length)
        place = self.tier.pin(data_chunk_id(payload))
        if place is not None:
            self.pins.append((place, payload))

    @rule(which=integers(0, 10))
    def unpin(self, which: int) -> None:
        if self.pins:
            place, _ = self.pins.pop(which % len(self.pins))
            self.tier.unpin(place)

    @invariant()
    def nobody_reads_another_chunks_bytes(self) -> None:
        current = self.tier.arena._generations
        for place, payload in self.pins:
            assert current[(place.slab * SLAB + place.offset) // (16 * KIB)] == place.generation
            assert bytes(self.tier.extent(place)[: len(payload)]) == payload
        for place, payload in self.granted[-50:]:
            if current[(place.slab * SLAB + place.offset) // (16 * KIB)] == place.generation:
                assert bytes(self.tier.extent(place)[: len(payload)]) == payload
                pinned = any(place == held for held, _ in self.pins)
                assert pinned or data_chunk_id(payload) in self.tier, "what is freed is not read any more"

    @invariant()
    def it_is_within_its_limit_and_its_figures_add_up(self) -> None:
        figures = self.tier.statistics()
        cells = list(self.tier.arena.taken_cells())
        held = [cell for cell in cells if not cell.filling and not cell.forgotten]
        assert figures["memory_bytes"] <= figures["limit_bytes"] == 2 * SLAB
        assert figures["pinned_bytes"] <= SLAB
        assert figures["chunks"] == len(held) == len(self.told) == len(self.tier)
        assert figures["payload_bytes"] == sum(cell.stored_bytes for cell in held)
        assert {cell.chunk for cell in held} == self.told
        assert figures["fills"] == figures["chunks"] + figures["demotions"] + figures["forgotten"]
        assert {name: figures[name] for name in self.counted} == dict(self.counted)
        for slab in self.tier.arena.slabs.values():
            taken = [cell for cell in slab.cells if cell is not None]
            assert sorted(slab.free) == [index for index, cell in enumerate(slab.cells) if cell is None]
            assert slab.taken == len(taken)
            assert slab.busy == sum(cell.filling or cell.pins > 0 for cell in taken)

    def teardown(self) -> None:
        self.tier.close()


class ShortStepsModel(TierModel):
    """The same where each step looks at, and empties, very little: what it begins goes on with the next one."""

    def __init__(self) -> None:
        self.bounds = mock.patch.multiple("engine.tiers.dram_tier", HAND_STEPS_MAX=3, EMPTIED_AT_ONCE_MAX=2)
        self.bounds.start()
        super().__init__()

    def teardown(self) -> None:
        super().teardown()
        self.bounds.stop()


TestTierModel = TierModel.TestCase
TestTierModel.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestShortStepsModel = ShortStepsModel.TestCase
TestShortStepsModel.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)


def test_what_was_read_once_is_not_brought_in_and_what_was_read_twice_is() -> None:
    with _tier() as tier:
        once = _bring_in(tier, _payload(1, 64 * KIB), reads=1)
        twice = _bring_in(tier, _payload(2, 64 * KIB))
        assert once not in tier
        assert twice in tier


def test_a_scan_longer_than_the_tier_leaves_the_working_set_in() -> None:
    with _tier() as tier:
        working = [_bring_in(tier, _payload(number, 64 * KIB), reads=4) for number in range(32)]
        for _ in range(2):
            for number in range(100, 200):
                _bring_in(tier, _payload(number, 64 * KIB), reads=1)
        assert all(chunk in tier for chunk in working)


def test_a_chunk_that_fits_no_cell_and_one_that_is_too_short_are_left_out() -> None:
    with _tier() as tier:
        for length in (1 * KIB, 2 * MIB):
            chunk = data_chunk_id(_payload(1, length))
            assert not any(tier.note_read(chunk, length) for _ in range(5))
            assert tier.reserve(chunk, _extent(2 * MIB)) is None


def test_another_size_takes_a_slab_that_nobody_reads_any_more() -> None:
    with _tier() as tier:
        for number in range(32):
            _bring_in(tier, _payload(number, 64 * KIB), reads=3)
        assert tier.statistics()["memory_bytes"] == 2 * SLAB
        for _ in range(20):
            for number in range(3):
                _bring_in(tier, _payload(number, 256 * KIB), reads=2)
        kept = sum(data_chunk_id(_payload(number, 256 * KIB)) in tier for number in range(3))
        assert kept == 3
        assert tier.statistics()["memory_bytes"] == 2 * SLAB


def test_a_slab_changes_its_size_in_bounded_steps_and_what_is_left_in_it_is_found_meanwhile() -> None:
    with _tier(slabs=1) as tier, mock.patch("engine.tiers.dram_tier.EMPTIED_AT_ONCE_MAX", 5):
        small = [_bring_in(tier, _payload(number, 64 * KIB)) for number in range(16)]
        large = data_chunk_id(_payload(99, 256 * KIB))
        sizes = [len(tier)]
        while large not in tier:
            _bring_in(tier, _payload(99, 256 * KIB))
            sizes.append(len(tier))
            found = [tier.find(chunk) for chunk in small]
            assert sum(place is not None for place in found) == len(tier) - (large in tier)
            assert len(tier) < 16 or not tier.arena.slabs[0].is_leaving
            assert not (tier.arena.slabs[0].is_leaving and any(tier.pin(chunk) for chunk in small))
        assert max(before - after for before, after in pairwise(sizes[:-1])) == 5
        assert sizes[0] == 16
        assert len(tier) == 1


def test_the_hand_takes_what_was_read_longest_ago_of_those_that_it_looked_at() -> None:
    with _tier(slabs=1) as tier, mock.patch("engine.tiers.dram_tier.HAND_STEPS_MAX", 4):
        chunks = [_bring_in(tier, _payload(number, 64 * KIB)) for number in range(16)]
        size = tier.arena.classes[1]
        for first in (0, 4):
            with mock.patch.object(size, "cell_at", wraps=size.cell_at) as looked_at:
                victim = tier._next_victim(size)
            assert [call.args for call in looked_at.mock_calls] == [(first + at,) for at in range(4)]
            assert victim is not None
            assert victim.chunk == chunks[first], "of those it was read first"
        _bring_in(tier, _payload(99, 64 * KIB), reads=9)
        assert sum(chunk not in tier for chunk in chunks) == 1


def test_a_pinned_chunk_outlives_its_being_freed_and_its_cell_is_used_again_afterwards() -> None:
    with _tier(slabs=1) as tier:
        payload = _payload(1, 64 * KIB)
        chunk = _bring_in(tier, payload)
        first, second = tier.pin(chunk), tier.pin(chunk)
        assert first is not None
        assert first == second
        free = tier.arena.classes[1].free_count
        tier.forget(chunk)
        assert tier.find(chunk) is None
        tier.unpin(first)
        assert bytes(tier.extent(first)) == payload
        assert tier.arena.classes[1].free_count == free
        tier.unpin(first)
        assert tier.arena.classes[1].free_count == free + 1
        tier.unpin(first)  # one beyond the limit changes nothing
        assert tier.statistics()["pinned_bytes"] == 0


def test_at_most_half_of_the_arena_is_pinned() -> None:
    with _tier() as tier:
        chunks = [_bring_in(tier, _payload(number, 64 * KIB)) for number in range(32)]
        pinned = [tier.pin(chunk) for chunk in chunks]
        assert sum(place is not None for place in pinned) == 16
        assert tier.statistics()["pinned_bytes"] == SLAB


def test_sizes_of_cells_hold_payloads_of_chunks_with_their_vectors() -> None:
    for length, cell_bytes in ((64 * KIB, 64 * KIB), (256 * KIB, 260 * KIB), (4 * MIB, 4 * MIB + 4 * KIB)):
        assert min(size for size in CELL_SIZES if size >= _extent(length)) == cell_bytes


def test_chunks_that_are_located_are_counted_as_each_by_itself() -> None:
    with _tier() as one, _tier() as other:
        payloads = [_payload(number, 64 * KIB) for number in range(24)]
        chunks = [data_chunk_id(payload) for payload in payloads]
        for payload in payloads[:20]:
            assert _bring_in(one, payload) == _bring_in(other, payload)
        for understood in (False, True, True):
            grants = [Grant(MEDIUM_SEGMENT, 1, 4096 * number, 64 * KIB, 64 * KIB) for number in range(24)]
            wanted = one.note_reads(chunks, grants, understood=understood)
            often = other.note_located(list(chunks), understood=understood)
            assert wanted == [chunk for chunk in often if other.may_fit(chunk, 64 * KIB)]
            assert one.statistics() == other.statistics()
            for mine, yours in zip(one.arena.taken_cells(), other.arena.taken_cells(), strict=True):
                assert (mine.chunk, mine.referenced, mine.used_at) == (yours.chunk, yours.referenced, yours.used_at)
            assert [slab.used_at for slab in one.arena.slabs.values()] == [
                slab.used_at for slab in other.arena.slabs.values()
            ]


def test_places_take_little_of_the_engines_own_memory_and_free_ones_next_to_none() -> None:
    arena = Arena(1, 64 * MIB)
    tier = DramTier(arena)
    memory, size = arena.make_slab_memory(), arena.classes[0]
    chunks = [data_chunk_id(number.to_bytes(8)) for number in range(size.cells_per_slab)]
    tracemalloc.start()
    try:
        tier.add_slab(memory, size)
        assert _traced_bytes() < 16 * len(chunks)
        for chunk in chunks:
            while (cell := tier.reserve(chunk, size.cell_bytes)) is None:
                tier.note_read(chunk, 4 * KIB)
            assert tier.publish(cell, 4 * KIB, 2**31 + len(tier))
        assert len(tier) == len(chunks)
        assert _traced_bytes() < 300 * len(chunks)
        for chunk in chunks:
            tier.forget(chunk)
        assert _traced_bytes() < 64 * len(chunks)
    finally:
        tracemalloc.stop()
        tier.close()


def _traced_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]
