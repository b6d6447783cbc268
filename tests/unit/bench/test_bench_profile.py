"""Flames made of samples: frames by name, a box as wide as its samples, without the frames that all begin with."""

from __future__ import annotations

from bench.harness.profile import below_all, boxes, folded, pruned, shares

LINES = ["main (a.py:1);f (a.py:7);0x7f00 (libc.so.6) 3", "main (a.py:1);f (a.py:9) 1", "main (a.py:1);g (b.py:2) 4"]


def test_lines_of_one_function_are_one_frame_and_addresses_none() -> None:
    assert folded(LINES) == {"main (a.py);f (a.py)": 4, "main (a.py);g (b.py)": 4}


def test_threads_without_work_are_left_out() -> None:
    waiting = [
        "work (o.py:3);PyThread_acquire_lock_timed (libpython3.11.so.1.0) 9",
        "run (r.py:1);epoll_wait (libc.so.6) 9",
    ]
    assert folded([*LINES, *waiting]) == folded(LINES)


def test_what_all_stacks_begin_with_is_left_out() -> None:
    assert below_all(folded(LINES)) == {"f (a.py)": 4, "g (b.py)": 4}
    assert below_all({"main": 3}) == {"main": 3}


def test_a_box_is_as_wide_as_its_samples() -> None:
    found = list(boxes({"a;b": 2, "a;c": 1, "d": 1}))
    assert found == [(0, 0.0, 0.75, "a"), (0, 0.75, 0.25, "d"), (1, 0.0, 0.5, "b"), (1, 0.5, 0.25, "c")]


def test_shares_are_of_the_function_itself_and_with_what_it_calls() -> None:
    assert shares({"a;b": 2, "a": 1, "c": 1}, 2) == [("b", 0.5, 0.5), ("a", 0.75, 0.25)]


def test_what_is_rare_is_left_out() -> None:
    assert pruned({"a": 10_000, "b": 1}) == {"a": 10_000}
