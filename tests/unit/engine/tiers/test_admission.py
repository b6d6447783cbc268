"""Admission to the DRAM tier: chunks read once stay out, those read often get in, and long scans displace nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from bench.dram_admission import AdmitAll, Ghost, TinyLfu, checkpoint, kv_reuse, loader, play
from engine.tables._frequency import Sketch
from engine.tiers.admission import Admission
from lakefs.ids import ChunkId, data_chunk_id
from tests.oracles.frequency import COUNT_MAX, TwinSketch


def _chunk(number: int) -> ChunkId:
    return data_chunk_id(number.to_bytes(8, "little"))


def test_the_second_read_is_what_admits() -> None:
    admission = Admission(100)
    admission.note(_chunk(1))
    assert not admission.admits(_chunk(1), None)
    admission.note(_chunk(1))
    assert admission.admits(_chunk(1), None)


def test_what_is_in_goes_only_for_what_is_read_more_often() -> None:
    admission = Admission(100)
    for _ in range(3):
        admission.note(_chunk(1))
    for reads, admitted in ((2, False), (3, False), (4, False), (5, True)):
        while admission.estimate(_chunk(2)) < reads:
            admission.note(_chunk(2))
        assert admission.admits(_chunk(2), _chunk(1)) is admitted


def test_estimates_are_never_too_low_before_they_are_halved_and_seldom_too_high() -> None:
    admission = Admission(1000)
    counts = {number: 1 + number % 5 for number in range(1000)}
    for number, count in counts.items():
        for _ in range(count):
            admission.note(_chunk(number))
    assert all(admission.estimate(_chunk(number)) >= count for number, count in counts.items())
    exact = sum(admission.estimate(_chunk(number)) == count for number, count in counts.items())
    assert exact > 950
    strangers = sum(admission.estimate(_chunk(number)) > 0 for number in range(10_000, 11_000))
    assert strangers < 100


def test_counts_are_bounded_and_fade() -> None:
    admission = Admission(10)
    for _ in range(100):
        admission.note(_chunk(0))
    assert admission.estimate(_chunk(0)) == COUNT_MAX
    for number in range(1, 4000):
        admission.note(_chunk(number))
    assert admission.estimate(_chunk(0)) < COUNT_MAX // 2


def test_a_checkpoint_that_is_read_once_or_twice_passes_the_working_set_by() -> None:
    hits, fills = play(checkpoint(random.Random(7)), TinyLfu())
    plain, plain_fills = play(checkpoint(random.Random(7)), AdmitAll())
    assert hits > plain * 1.2
    assert fills < plain_fills / 10


def test_reused_prefixes_stay_in() -> None:
    hits, _ = play(kv_reuse(random.Random(7)), TinyLfu())
    plain, _ = play(kv_reuse(random.Random(7)), AdmitAll())
    assert hits > plain * 1.1


def test_epochs_over_more_than_fits_are_served_in_part_and_not_turned_over() -> None:
    hits, fills = play(loader(4000)(random.Random(7)), TinyLfu())
    ghost, _ = play(loader(4000)(random.Random(7)), Ghost(1000))
    assert hits > 2 * ghost
    assert fills < 6


@given(
    width=sampled_from([1, 2, 16]),
    sample=integers(1, 40),
    step=integers(1, 15),
    reads=lists(integers(0, 12), max_size=80),
    later=integers(1, 40),
)
def test_the_native_counts_are_those_of_its_twin(
    width: int, sample: int, step: int, reads: list[int], later: int
) -> None:
    native = Sketch(width, sample, step)
    twin = TwinSketch(width, sample, step)
    for place, number in enumerate(reads):
        assert native.note(_chunk(number)) == twin.note(_chunk(number))
        if place == len(reads) // 2:
            native.halve_after(later)
            twin.halve_after(later)
    assert native.halvings == twin.halvings
    for number in range(13):
        assert native.estimate(_chunk(number)) == twin.estimate(_chunk(number))
    many = [_chunk(number) for number in reads * 3]
    one_by_one = TwinSketch(width, sample, step)
    for place, number in enumerate(reads):
        one_by_one.note(_chunk(number))
        if place == len(reads) // 2:
            one_by_one.halve_after(later)
    assert native.note_many(many) == twin.note_many(many) == bytes(map(one_by_one.note, many))


@pytest.mark.parametrize("made", [TwinSketch, Sketch])
def test_odd_widths_and_ids_are_refused(made: type[TwinSketch | Sketch]) -> None:
    for width, sample in ((0, 1), (3, 1), (4, 0)):
        with pytest.raises(ValueError, match="power of two"):
            made(width, sample)
    for odd in (0, 16):
        with pytest.raises(ValueError, match="1 to 15"):
            Sketch(4, 4, odd)
    with pytest.raises(ValueError, match="halved after a read"):
        Sketch(4, 4).halve_after(0)
    with pytest.raises(ValueError, match="digest"):
        made(4, 1).note(b"short")
    with pytest.raises(ValueError, match="digest"):
        made(4, 1).note_many([_chunk(1), b"short"])
