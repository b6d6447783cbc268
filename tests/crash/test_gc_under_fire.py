"""gc, compaction and writes while others read: nobody gets another chunk's bytes as good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

from tests.crash.fire import Fire
from tests.e2e.served import LAKE

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
CYCLES = 2000 if os.environ.get("LAKE_TORTURE") else 25
CYCLES_TO_NOTICE = 400  # far more than needed: only a test that is about to fail runs so many


@contextmanager
def fire(bug: str = "") -> Iterator[Fire]:
    program = [*LAKE[:-1], "tests.crash.planted_lake", bug] if bug else None
    with TemporaryDirectory(prefix="lake-") as folder, Fire(Path(folder), bug or "one", program) as burning:
        yield burning


def test_no_reader_gets_bytes_of_others_while_names_go_and_their_room_is_freed() -> None:
    with fire() as burning:
        burning.run(CYCLES)
        for figure in ("stops", "moved chunks", "segments removed", "stale", "freed under holders", "children"):
            assert burning.figures[figure], f"nothing was tried: {burning}"


@pytest.mark.parametrize(
    ("bug", "seen"),
    [
        ("reuse-freed", "somebody else|has other bytes|is damaged"),
        ("forget-leases", "a leased object cannot be read"),
        ("free-before-move", "damage|cannot be read"),
    ],
)
def test_a_planted_bug_is_noticed(bug: str, seen: str) -> None:
    with fire(bug) as burning, pytest.raises(AssertionError, match=seen):
        burning.run(CYCLES_TO_NOTICE)


def test_a_reader_that_skips_its_checks_is_noticed() -> None:
    with (
        mock.patch("lakefs.grants.grant_reads.matches", return_value=True),
        mock.patch("lakefs.grants.grant_reads.granule_crcs", return_value=mock.ANY),
        mock.patch("lakefs.grants.grant_reads.crcs_of", return_value=b""),
        fire() as burning,
        pytest.raises(AssertionError, match=r"not its own passed|has other bytes|a leased object changed"),
    ):
        burning.run(CYCLES_TO_NOTICE)
