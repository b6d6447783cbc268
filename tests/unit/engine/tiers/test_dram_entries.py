"""Readers by the index beside an engine that admits, demotes, frees, recuts and ends: never another chunk's bytes.

The model is a reader that keeps what it found, and what it has mapped, for as long as it likes; during its copies
anything may happen.  It checks nothing but the generation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import booleans, integers, sampled_from

from engine.tiers.arena import Arena
from engine.tiers.dram_entries import joined
from engine.tiers.dram_tier import DramTier
from engine.tiers.shared_index import SharedIndex
from lakefs.content.verify import Check, vector_bytes
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.dram_slabs import Slabs
from lakefs.host.crc import crc32c
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import HOT_INDEX_SLOTS_MIN, KIB, MIB
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import PLACE_GENERATION_BITS, Found, pack_place, table_bytes
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT

SLAB = 1 * MIB
LENGTHS = (16 * KIB, 40 * KIB, 64 * KIB, 200 * KIB)
Happening = Callable[[], None]


def _payload(number: int, length: int) -> bytes:
    return (number.to_bytes(4, "little") * (length // 4 + 1))[:length]


def _segment_place(payload: bytes, turn: int) -> Found:
    return MEDIUM_SEGMENT, 7 + turn, 4096, len(payload), crc32c(payload)


class Engine:
    """A tier, an index that is joined with it, and the places of chunks that are durable."""

    def __init__(self) -> None:
        self.tier = DramTier(Arena(2, SLAB))
        self.memory = bytearray(table_bytes(HOT_INDEX_SLOTS_MIN))
        self.index = SharedIndex(
            metadata=cast("Any", None),
            is_quarantined=lambda _: False,
            offload=cast("Any", None),
            identity=cast("Any", None),
            backing=cast("Any", SimpleNamespace(is_kept=False, save=lambda: None)),
            table=SharedTable(self.memory, HOT_INDEX_SLOTS_MIN),
            is_growing=False,
        )
        self.places: dict[ChunkId, Found] = {}
        self._joined = joined(self.index, self.tier)
        self._joined.__enter__()

    def put(self, payload: bytes, turn: int) -> None:
        """Make a record durable, or move it."""
        chunk = data_chunk_id(payload)
        self.places[chunk] = place = _segment_place(payload, turn)
        self.index._tell(chunk, place)

    def read(self, payload: bytes, times: int) -> None:
        """Read a chunk, so that the tier takes it when that is worth it."""
        chunk, extent = data_chunk_id(payload), len(payload) + vector_bytes(len(payload))
        worth_it = [self.tier.note_read(chunk, len(payload)) for _ in range(times)]
        if not any(worth_it):
            return
        size = self.tier.needs_slab(chunk, extent)
        if size is not None:
            self.tier.add_slab(self.tier.arena.make_slab_memory(), size)
        cell = self.tier.reserve(chunk, extent)
        if cell is not None:
            memory = self.tier.arena.memory(cell)
            memory[:] = b"\xff" * len(memory)
            memory[: len(payload)] = payload
            self.tier.publish(cell, len(payload), crc32c(payload))

    def free(self, chunk: ChunkId) -> None:
        """Remove a record, durably."""
        self.tier.forget(chunk)
        self.places.pop(chunk, None)
        self.index.remove(chunk)

    def map_all(self, slabs: Slabs) -> None:
        """Map the descriptors that OpenSlabs answers with."""
        arena = self.tier.arena
        held = [os.dup(slab.memory.descriptor) for slab in arena.slabs.values()]
        slabs.add(list(arena.slabs), [*held, os.dup(arena.generations_descriptor)], SLAB)

    def end(self) -> None:
        """Stop; what readers have mapped stays."""
        self._joined.__exit__(None, None, None)
        self.tier.close()


class Disturbed:
    """A reader's memory; when half of it is filled, something happens."""

    def __init__(self, length: int, happening: Happening) -> None:
        self.content = bytearray(length)
        self._happening = happening

    def __len__(self) -> int:
        return len(self.content)

    def __setitem__(self, _: slice, source: memoryview) -> None:
        half = len(self.content) // 2
        self.content[:half] = source[:half]
        self._happening()
        self.content[half:] = source[half:]


class Readers(RuleBasedStateMachine):
    """One reader with all that it ever found, and one engine after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = mock.patch.multiple("engine.tiers.dram_tier", EMPTIED_AT_ONCE_MAX=3)
        self.bounds.start()
        self.engine = Engine()
        self.descriptors = SegmentDescriptors()
        self.found: list[tuple[bytes, Found]] = []
        self.turn = 0

    @property
    def slabs(self) -> Slabs:
        return self.descriptors.slabs

    def _happen(self, what: str, payload: bytes) -> None:
        chunk = data_chunk_id(payload)
        if what == "put":
            self.turn += 1
            self.engine.put(payload, self.turn)
        elif what == "read":
            self.engine.read(payload, 4)
        elif what == "free":
            self.engine.free(chunk)
        elif what == "demote":
            self.engine.tier.forget(chunk)
        elif what == "map":
            self.engine.map_all(self.slabs)
        elif what == "restart":
            self.engine.end()
            self.engine = Engine()
        elif what == "drop":
            self.slabs.drop()

    @rule(
        what=sampled_from(["put", "put", "read", "read", "read", "map", "map", "free", "demote", "drop"]),
        number=integers(0, 12),
        length=sampled_from(LENGTHS),
    )
    def something_happens(self, what: str, number: int, length: int) -> None:
        self._happen(what, _payload(number, length))

    @rule(number=integers(0, 12), length=sampled_from(LENGTHS))
    def something_is_hot(self, number: int, length: int) -> None:
        for what in ("put", "read", "map"):
            self._happen(what, _payload(number, length))

    @rule(odds=integers(0, 9))
    def the_engine_is_replaced(self, odds: int) -> None:
        if not odds:
            self._happen("restart", b"")

    @rule(number=integers(0, 12), length=sampled_from(LENGTHS))
    def look_up(self, number: int, length: int) -> None:
        payload = _payload(number, length)
        found = self.engine.index.table.find(data_chunk_id(payload))
        if found is not None:
            self.found.append((payload, found))

    @rule(
        which=integers(0, 60),
        what=sampled_from(["put", "read", "free", "demote", "map", "restart", "drop", "nothing"]),
        number=integers(0, 12),
        length=sampled_from(LENGTHS),
        same=booleans(),
    )
    def copy(self, which: int, what: str, number: int, length: int, same: bool) -> None:
        if not self.found:
            return
        payload, found = self.found[-1 - which % len(self.found)]
        other = payload if same else _payload(number, length)
        target = Disturbed(found[3], lambda: self._happen(what, other))
        shared = DirectReads(cast("Any", self.engine.index.table), self.descriptors, Check.NONE, lambda: True)
        chunk = data_chunk_id(payload)
        grant = self.engine.tier.grant(chunk)
        is_there = grant is not None and found[1:3] == (pack_place(grant.segment, grant.epoch), grant.offset)
        is_mapped = found[0] == MEDIUM_DRAM and not self.slabs.missing({found[1] >> PLACE_GENERATION_BITS})
        length_read = shared.read_found(chunk, found, cast("Any", target))
        if length_read != NOT_READ:
            assert length_read == len(payload)
            assert target.content == payload
        elif what == "nothing" and is_there and is_mapped and grant is not None:
            assert not self.slabs.is_current(grant), "what is there was not read"

    @invariant()
    def the_table_tells_what_is_so(self) -> None:
        index, tier = self.engine.index, self.engine.tier
        told = index.table.find_many(list(self.engine.places))
        for (chunk, place), found in zip(self.engine.places.items(), told, strict=True):
            grant = tier.grant(chunk)
            if grant is None:
                assert found == place
                assert chunk not in index.in_slabs
            else:
                assert found is not None
                assert found[:3] == (MEDIUM_DRAM, pack_place(grant.segment, grant.epoch), grant.offset)
                assert index.in_slabs[chunk] == place
        assert index.places_of(list(self.engine.places)) == list(self.engine.places.values())
        assert index.table.count == len(self.engine.places)
        assert len(index.in_slabs) == sum(tier.grant(chunk) is not None for chunk in self.engine.places)

    def teardown(self) -> None:
        self.engine.end()
        self.descriptors.close()
        self.bounds.stop()


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_reader_that_looks_at_no_generation_takes_another_chunks_bytes() -> None:
    """This shows that the model can fail."""

    def careless(self: Slabs, place: int, offset: int, target: memoryview, behind: memoryview) -> bool:
        arena = self._arena
        if arena is None or place >> PLACE_GENERATION_BITS not in arena.slabs:
            return False
        target[:] = arena.slabs[place >> PLACE_GENERATION_BITS][offset : offset + len(target)]
        return True

    with mock.patch.object(Slabs, "copy_place", careless):
        readers = Readers()
        try:
            with pytest.raises(AssertionError):
                for number in range(40):
                    readers.something_is_hot(number % 13, 64 * KIB)
                    readers.look_up(number % 13, 64 * KIB)
                    readers.copy(0, "demote", number % 13, 64 * KIB, True)
                    readers.something_is_hot((number + 1) % 13, 64 * KIB)
                    readers.copy(0, "nothing", 0, 64 * KIB, False)
        finally:
            readers.teardown()


def test_what_does_not_fit_an_entry_is_told_as_a_segment() -> None:
    assert pack_place(1 << 16, 2) is None
    assert pack_place(1, 1 << PLACE_GENERATION_BITS) is None
    engine = Engine()
    payload = _payload(1, 64 * KIB)
    engine.put(payload, 1)
    with mock.patch("engine.tiers.dram_entries.pack_place", return_value=None):
        engine.read(payload, 4)
    chunk = data_chunk_id(payload)
    assert chunk in engine.tier
    assert engine.index.table.find(chunk) == engine.places[chunk]
    engine.end()
