"""A sampled scenario: the warm-up does not count, a side that fails is out and says why, figures are measured ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.harness.accounting import Device, Memory, Spent
from bench.harness.measure import Bench, Scale, at_least, at_most
from bench.harness.plan import BY_NAME_ONLY, GENERATORS, WHOLE_RUN_S, expected_s
from bench.harness.sampled import NULL, CouldNotRun, Entrant, Run, Sampled, Side, Target, figures_of, one_by_one
from bench.scenarios import SCENARIOS
from lakefs.histogram import Histogram

THREE = Scale(quick=False, rounds=3)


def scenario(sides: dict[str, Sequence[float]], *targets: Target, generator: str = "words") -> Sampled:
    """Sides that take these seconds for 10 operations in turn, first for the warm-up, and then cannot go on."""

    @contextmanager
    def entered(seconds: Sequence[float]) -> Iterator[Side]:
        left = iter(seconds)

        def run() -> Run:
            for elapsed_s in left:
                return Run(10, 1000, Histogram.of_seconds([elapsed_s / 10] * 10), elapsed_s)
            raise CouldNotRun("no more")

        yield Side(run, servers=lambda: [os.getpid()])

    @contextmanager
    def set_up(bench: Bench) -> Iterator[Sequence[Entrant]]:
        yield [Entrant(name, lambda name=name: entered(sides[name])) for name in sides]  # type: ignore[misc]

    return Sampled("s", "work", "operations_per_s", set_up, generator, 1, targets)


def test_the_warm_up_does_not_count_and_the_figure_is_the_median_of_the_ratios(tmp_path: Path) -> None:
    rows, measured = scenario(
        {"ours": [99, 1, 2, 1], "a": [99, 2, 2, 8]}, Target("operations_per_s", at_least(3, "x"), "a")
    ).run(Bench(tmp_path, THREE))
    [row] = rows
    assert (row.value, row.met, row.spread) == (2.0, False, "1..8")
    assert [found["operations_per_s"] for found in measured["sides"]["a"]["rounds"]] == [5, 5, 1.25]


def test_a_goal_may_be_for_our_own_figure(tmp_path: Path) -> None:
    rows, _ = scenario({"ours": [1, 1, 1, 1]}, Target("p50_us", at_most(200_000))).run(Bench(tmp_path, THREE))
    assert [row.met for row in rows] == [True]
    assert rows[0].value == pytest.approx(100_000, rel=0.01)


def test_a_goal_may_be_for_another_side_of_ours_and_hides_no_comparison(tmp_path: Path) -> None:
    sides: dict[str, Sequence[float]] = {"ours": [1] * 4, "ours, fast": [0.5] * 4, "a": [1] * 4}
    fast = Target("operations_per_s", at_least(2, "x"), "a", "ours, fast")
    absent = Target("operations_per_s", at_least(2, "x"), "a", "ours, faster")
    rows, _ = scenario(sides, fast, absent).run(Bench(tmp_path, THREE))
    assert [(row.what, row.value, row.met) for row in rows] == [
        ("work, ours, fast, operations/s / a", 2.0, True),
        ("work, operations/s / ours, fast", 0.5, True),
        ("work, operations/s / a", 1.0, True),
    ]


@pytest.mark.parametrize("seconds", [[], [1], [1, 1]])
def test_a_peer_that_fails_is_out_and_says_why(seconds: Sequence[float], tmp_path: Path) -> None:
    rows, measured = scenario({"ours": [1] * 4, "a": seconds, "b": [1] * 4}).run(Bench(tmp_path, THREE))
    assert [(row.what, row.could_not_run) for row in rows][1:] == [("work / a", "no more")]
    assert set(measured["sides"]) == {"ours", "b"}


def test_a_failure_of_ours_is_one_of_the_scenario(tmp_path: Path) -> None:
    with pytest.raises(CouldNotRun):
        scenario({"ours": [1], "a": [1] * 4}).run(Bench(tmp_path, THREE))


def test_what_has_no_room_on_the_disk_is_listed_and_touches_nothing(tmp_path: Path) -> None:
    wide = replace(scenario({"ours": []}), disk_bytes=1 << 60)
    [row], _ = wide.run(Bench(tmp_path, THREE))
    assert row.met
    assert re.fullmatch(r"1152921505 GB of free disk are needed, and \d+ GB are free", row.could_not_run)
    assert not wide.lack_of_disk(Bench(tmp_path, Scale(quick=True, rounds=3)))
    assert not replace(wide, disk_bytes=0).lack_of_disk(Bench(tmp_path, THREE))


def test_a_null_server_is_told_of_with_its_rate(tmp_path: Path) -> None:
    sides: dict[str, Sequence[float]] = {"ours": [1] * 4, NULL: [0.1] * 4, "a": [1] * 4}
    rows, measured = scenario(sides, generator=NULL).run(Bench(tmp_path, THREE))
    assert "reaches 100/s, 10 x" in measured["generator"]
    assert [row.what.rpartition(" / ")[2] for row in rows] == ["a"]


def test_figures_are_by_operation_and_by_byte() -> None:
    run = Run(100, 400, elapsed_s=2, stored_bytes=200, more={"own": 7})
    found = figures_of(run, Spent(3, 1e-3, 2e-3, 300, Memory(5, 6)), served=True)
    assert found == {
        "operations_per_s": 50, "bytes_per_s": 200, "client_cpu_us": 20, "server_cpu_us": 10, "private_bytes": 5,
        "shared_bytes": 6, "device_bytes_per_byte": 1.5, "own": 7,
    }  # fmt: skip


def test_a_side_without_a_server_has_no_figures_of_one() -> None:
    found = figures_of(Run(1), Spent(1, 0, 0, None, Memory(0, 0)), served=False)
    assert set(found) == {"operations_per_s", "client_cpu_us"}


def test_calls_are_counted_and_timed_each() -> None:
    done: list[int] = []
    run = one_by_one((partial(done.append, n) for n in range(5)), bytes_each=10, stored=True)
    assert (run.operations, run.moved_bytes, run.stored_bytes, done) == (5, 50, 50, list(range(5)))
    assert run.latencies is not None
    assert run.latencies.count == 5


def test_what_is_written_and_settled_is_seen_by_the_device(tmp_path: Path) -> None:
    device = Device(tmp_path)
    if not device.counts:
        pytest.skip("this file system has no block device of its own")
    before = device.written_bytes()
    (tmp_path / "x").write_bytes(os.urandom(1 << 20))
    device.settle()
    assert device.written_bytes() - before >= 1 << 20


def test_all_scenarios_together_stay_under_75_minutes() -> None:
    seconds = {name: expected_s(name, found) for name, found in SCENARIOS.items()}
    assert all(0 < some <= 300 for some in seconds.values())
    assert sum(some for name, some in seconds.items() if not name.startswith(BY_NAME_ONLY)) < WHOLE_RUN_S
    assert all(any(name.startswith(beginning) for name in seconds) for beginning in BY_NAME_ONLY)


def test_every_beginning_of_the_generators_table_is_one_of_a_scenario() -> None:
    assert [name for name in GENERATORS if not any(known.startswith(name) for known in SCENARIOS)] == []
