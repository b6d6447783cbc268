"""Seeds of the simulator, the first half: whatever happens, the engine keeps its promises."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.seeds import groups, result_of, run_group

SEEDS = range(150)
MUST_HAPPEN = {
    "crash while opening": 5,
    "crash while serving": 20,
    "crash while stopping": 3,
    "crash while stopped": 5,
    "kill while serving": 3,
    "index rebuilt": 20,
    "journal files": 20,
    "segments": 20,
    "checkpoint": 20,
    "rebuild": 10,
    "cancelled": 20,
    "cut": 10,
    "sync failed": 3,
    "write failed": 1,
    "read-only": 3,
    "reserve released": 1,
    "StoreFull": 5,
    "EngineUnreachable": 10,
    "PreconditionFailed": 10,
    "FolderNotEmpty": 10,
    "move_folder": 10,
    "put_visible": 20,
    "put_keeping_the_node": 20,
    "make_symlink": 20,
    "set_attributes": 20,
    "remove_folder": 5,
    "sync": 20,
    "hold_open": 20,
    "put_again_beside_gc": 20,
    "commit_beside_gc": 20,
    "upload": 20,
    "finish_upload": 20,
    "UploadNotFound": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", groups(SEEDS.start, SEEDS.stop), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}"
)
def test_a_store_keeps_its_promises_through_stops_kills_and_power_losses(seeds: range) -> None:
    run_group(seeds)


@pytest.mark.slow
def test_the_seeds_come_across_everything_that_they_are_meant_to() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met += result_of(seed).met
    rare = {what: met[what] for what, least in MUST_HAPPEN.items() if met[what] < least}
    assert rare == {}
