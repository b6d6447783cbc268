"""Several mounts at once against a local folder: some sequences on every run, more with `python -m tests.mount.shared`.

The model is tried first, on local folders, where nothing differs.  SHARED_SEQUENCES sets how many sequences each way
gets here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.lengths import repeated
from tests.mount.model import Difference
from tests.mount.shared.at_once import at_once
from tests.mount.shared.ground import SharedMounts, plain_ground, shared_mounts
from tests.mount.shared.hunt import WAYS, SharedFinding, Way, hunt
from tests.mount.shared.steps import RankStep, sequence
from tests.mount.steps import Step

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]
SEQUENCES: Final = int(os.environ.get("SHARED_SEQUENCES", "0")) or repeated(8, 12)


def test_processes_on_a_local_folder_never_differ(tmp_path: Path) -> None:
    with plain_ground(tmp_path, 3) as ground:
        way = Way("unix", 3, holds=False)
        assert [str(found) for found in hunt(range(60), ground, way) if found] == []


def test_a_seed_always_gives_the_same_sequence() -> None:
    assert sequence(11, ranks=2, cuts=True) == sequence(11, ranks=2, cuts=True)
    assert sequence(11, ranks=2) != sequence(12, ranks=2)


def test_a_finding_prints_the_line_that_repeats_it() -> None:
    steps = (RankStep(0, Step("mkdir", ("d", 0o755))), RankStep(1, Step("rmdir", ("d",))))
    text = str(SharedFinding(17, Way("tcp", 3, late=True), steps, Difference(1, "expected None, got ENOENT")))
    assert text.splitlines()[0] == "python -m tests.mount.shared --seed 17 --sequences 1 --over tcp --mounts 3 --late"
    assert text.splitlines()[-2:] == ["# here: expected None, got ENOENT", "1: rmdir('d',)"]


@pytest.fixture(scope="module", params=WAYS, ids=Way.options)
def on(request: pytest.FixtureRequest) -> Iterator[tuple[Way, SharedMounts]]:
    """Mounts of one way."""
    way: Way = request.param
    with shared_mounts(way.over, mounts=way.mounts, meddled=way.late, late_s=way.late_s) as mounts:
        yield way, mounts


def test_several_mounts_are_as_one_local_folder(on: tuple[Way, SharedMounts]) -> None:
    way, mounts = on
    # Late notices and killed mounts take their time.
    count = max(1, SEQUENCES // (4 if way.late or way.kills else 1))
    first = WAYS.index(way) * 1000
    found = [str(finding) for finding in hunt(range(first, first + count), mounts.ground(), way) if finding]
    assert "\n\n".join(found) == ""


def test_several_mounts_at_once_lose_nothing(on: tuple[Way, SharedMounts]) -> None:
    assert at_once(on[1], 3, 60) == []
