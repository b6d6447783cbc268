"""Seeds of the simulator: whatever happens, the engine keeps its promises."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.seeds import groups, result_of, run_group

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SEEDS = range(215)
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
    "write failed": 3,
    "read failed": 3,
    "room failed": 1,
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
    "torn": 100,
    "lost": 50,
    "kept": 50,
    "reordered": 50,
    "names lost": 50,
    "index lost": 20,
    "index as at the last commit": 50,
    "index as at the commit before the last": 10,
    "index with a commit that was not answered": 2,
    "index with dropped pages": 10,
    "index with torn pages": 20,
    "chunks moved": 1000,
    "chunks changed while they were moved": 3,
    "segments emptied": 50,
    "end in compact": 5,
    "end in collect": 3,
    "end in checkpoint": 3,
    "end in rebuild": 3,
    "collect": 100,
    "scrub": 100,
    "scrub met damage": 3,
    "clock forward": 50,
    "clock back": 50,
    "clock elsewhere": 50,
    "flipped": 10,
    "damage met": 5,
    "refused while opening": 5,
    "crash while checking": 5,
    "kill while opening": 5,
    "remove_version": 50,
    "answers repeated": 2000,
    "keyed_put": 200,
    "keyed_get": 100,
    "keyed_match": 50,
    "keyed_remove": 50,
    "keyed_look_at_all": 30,
}


@pytest.mark.parametrize("seeds", groups(SEEDS.start, SEEDS.stop), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_store_keeps_its_promises_through_stops_kills_and_power_losses(seeds: range) -> None:
    run_group(seeds)


def test_the_seeds_come_across_everything_that_they_are_meant_to() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met += result_of(seed).met
    rare = {what: met[what] for what, least in MUST_HAPPEN.items() if met[what] < least}
    assert rare == {}
