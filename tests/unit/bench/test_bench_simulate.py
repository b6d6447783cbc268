"""The simulated lake: what is counted is what was lost, reads end whatever is silent, and one seed gives one result."""

from __future__ import annotations

from itertools import groupby

import pytest

from bench.simulate.balance import changed, loads, spread
from bench.simulate.hardware import DISK_BYTES, DISK_FULL, KIB, Shape, members_of, table_of
from bench.simulate.reads import Head, asked
from bench.simulate.rebuild import WALKER_CPU_S_PER_GIB, bounds, work_of
from bench.simulate.rows import seconds, table
from lakefs.cluster.table import moves
from lakefs.limits import CHUNK_BYTES, HEDGE_S_MAX, HEDGE_S_MIN

SMALL = Shape(6, devices=2, rack=2)


def test_homes_are_even_and_only_those_of_a_lost_machine_move() -> None:
    first, members = table_of(SMALL), members_of(SMALL)
    assert spread(loads(first)) == pytest.approx(1.0, abs=0.01)
    gone = changed(first, [member for member in members if member.machine != "machine 0"])
    assert gone.moved >= gone.needed > 0
    assert changed(first, members).moved == 0


def test_a_lost_device_is_made_anew_from_four_shards_of_each_stripe() -> None:
    first, members = table_of(SMALL), members_of(SMALL)
    lost = {members[0].id}
    following = changed(first, members[1:]).last
    work = work_of(first, following, lost)
    assert work.places == sum(move.before in lost for move in moves(first, following))
    assert sum(work.written.values()) == pytest.approx(DISK_BYTES * DISK_FULL, rel=0.01)
    assert sum(work.read.values()) == 4 * sum(work.written.values())
    assert not lost & (work.read.keys() | work.written.keys())
    machines = {member.id: member.machine for member in members}
    one, three = bounds(work, machines, 1), bounds(work, machines, 3)
    assert one["walkers"] == pytest.approx(3 * three["walkers"])
    assert one["walkers"] > WALKER_CPU_S_PER_GIB
    assert one["disks"] == three["disks"]


@pytest.mark.parametrize("length", [64 * KIB, CHUNK_BYTES])
def test_reads_end_when_a_rack_is_silent_and_are_as_before_when_it_was_found_away(length: int) -> None:
    rack = frozenset(member.id for member in members_of(SMALL) if member.rack == "rack 0")
    head = Head(SMALL, length, seed=1)
    head.run(500)
    healthy = head.run(500)
    head.silent = rack
    silent = head.run(500)
    head.away = rack
    away = head.run(500)
    assert max(healthy) < HEDGE_S_MIN
    assert HEDGE_S_MIN < max(silent) < HEDGE_S_MAX
    assert max(away) < HEDGE_S_MIN
    assert len(healthy) == len(silent) == len(away) == 500


def test_one_seed_gives_one_result() -> None:
    one, same, other = (Head(SMALL, CHUNK_BYTES, seed).run(200) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_members_that_are_away_are_not_asked_and_others_take_their_reads() -> None:
    rack = {member.id for member in members_of(SMALL) if member.rack == "rack 0"}
    healthy, without = asked(SMALL, lambda member: True), asked(SMALL, lambda member: member not in rack)
    assert not rack & without.keys()
    assert sum(without.values()) == sum(healthy.values()) == 4 * len(table_of(SMALL).rows)


def test_a_row_of_a_table_has_as_many_columns_as_its_head() -> None:
    lines = table(["a", "b"], [["1", "2"], ["3", "4"]]).splitlines()
    assert [count for count, _ in groupby(line.count("|") for line in lines)] == [3]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2e-4, "200 us"), (0.0012, "1.2 ms"), (51.7, "51.7 s"), (600, "10 min"), (63_000, "17.5 h"), (2e6, "23.1 days")],
)
def test_times_are_written_with_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text
