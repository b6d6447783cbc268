"""Keyed blobs under fire for a moment: no wrong byte, no durable value lost; and planted bugs that are noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.keyed_fire import KeyedFire

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
MINUTES = 30 if os.environ.get("LAKE_TORTURE") else 1 / 3
MINUTES_TO_NOTICE = 5  # far more than needed: only a test that is about to fail runs so long


@contextmanager
def fire(bug: str = "none") -> Iterator[KeyedFire]:
    with TemporaryDirectory(prefix="lake-") as folder, KeyedFire(Path(folder), bug, bug) as burning:
        yield burning


def test_no_value_is_wrong_or_lost_while_engines_are_killed() -> None:
    with fire() as burning:
        burning.run(MINUTES)
        for figure in ("lives", "kills", "checked values of own spaces", "checked values of the shared space"):
            assert burning.figures[figure], f"nothing was tried: {burning}"


def test_no_key_has_the_bytes_of_another_in_100_000_matches_and_loads_beside_eviction_and_compaction() -> None:
    with fire() as burning:
        burning.read_beside(100_000)
        assert burning.figures["matched"] + burning.figures["loaded"] >= 100_000
        assert burning.figures["loaded"] > 1000


@pytest.mark.parametrize(
    ("bug", "seen"),
    [
        ("gc-forgets-values", "damage|not one of|was lost|failed"),
        ("answer-first", "not one of|was lost|was replaced"),
        ("evict-from-any-space", "not one of|which had|failed|damage"),
        ("load-the-neighbour", "failed"),
    ],
)
def test_a_planted_bug_is_noticed(bug: str, seen: str) -> None:
    with fire(bug) as burning, pytest.raises(AssertionError, match=seen):
        burning.run(MINUTES_TO_NOTICE)
