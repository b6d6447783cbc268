"""Histories of a whole lake: whatever happens to its processes, disks and ways, it keeps its promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.sim.cluster.world import History, LakeWorld
from tests.sim.seeds import groups

pytestmark = pytest.mark.slow

SEEDS = range(34)
FIRST = 10
"""So many are run first; the others take as long again, and are run with what is thorough."""
OVER_ETCD = range(18)
FIRST_OVER_ETCD = 3
MUST_HAPPEN = {
    "crashes": 20,
    "cut off: SILENT": 10,
    "cut off: CUT": 5,
    "cut off: LATE": 5,
    "way: SILENT": 3,
    "way: CUT": 3,
    "way: LATE": 3,
    "slow": 5,
    "full": 5,
    "lost": 5,
    "rot": 5,
    "lies: BYTES": 2,
    "lies: LENGTH": 2,
    "lies: LONGER": 2,
    "lying disk": 5,
    "put back": 5,
    "put back, and found out": 3,
    "disk failed: sync_data": 1,
    "disk failed: pwrite": 1,
    "disk failed: pread_into": 1,
    "names crashed": 10,
    "names cut off": 5,
    "names' device broken": 10,
    "head killed": 5,
    "names: killed": 2,
    "names: power lost": 2,
    "names: stopped": 4,
    "names: divided": 4,
    "names: disk lost": 3,
    "names: slow": 2,
    "names: restarted": 1,
    "names: way: SILENT": 1,
    "names: way: CUT": 1,
    "names: way: LATE": 1,
    "names: etcd killed": 1,
    "names: etcd stopped": 1,
    "names: etcd separated": 1,
    "names: etcd full": 1,
    "names: compacted": 1,
    "names shard added": 1,
    "copy across": 1,
    "rename across": 2,
    "operations on buckets": 300,
    "drain": 5,
    "added": 5,
    "healed": 20,
    "gc asked for": 5,
    "fsck asked for": 5,
    "keyed hits": 100,
    "operations": 4000,
}
_ROOT = Path(__file__).resolve().parents[3]
_PRINT_LOG = """
import hashlib, structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
from tests.sim.cluster.world import LakeWorld
worlds = LakeWorld(3, 8, 6), LakeWorld(3, 8, 6, has_etcd=True, shards=2)
logs = [world.run().log for world in worlds]
print(hashlib.blake2b(str(logs).encode()).hexdigest())
"""


@cache
def history_of(seed: int, *, has_etcd: bool = False) -> History:
    """Return a seed's history, which is run once a process."""
    world = LakeWorld(seed, has_etcd=has_etcd)
    try:
        return world.run()
    except Exception as error:
        error.add_note("\n".join([*world.history.log[-60:], f"again: python -m tests.sim.cluster {world.name}"]))
        raise


def _name(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop - 1}"


@pytest.mark.parametrize("seeds", groups(SEEDS.start, FIRST), ids=_name)
def test_a_lake_keeps_its_promises_whatever_happens_to_its_parts(seeds: range) -> None:
    for seed in seeds:
        history_of(seed)


@pytest.mark.parametrize("seeds", groups(OVER_ETCD.start, FIRST_OVER_ETCD), ids=_name)
def test_a_lake_over_an_etcd_keeps_its_promises(seeds: range) -> None:
    for seed in seeds:
        history_of(seed, has_etcd=True)


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", groups(FIRST_OVER_ETCD, OVER_ETCD.stop), ids=_name)
def test_more_lakes_over_an_etcd_keep_their_promises(seeds: range) -> None:
    for seed in seeds:
        history_of(seed, has_etcd=True)


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", groups(FIRST, SEEDS.stop), ids=_name)
def test_more_lakes_keep_their_promises(seeds: range) -> None:
    for seed in seeds:
        history_of(seed)


@pytest.mark.thorough
def test_the_histories_come_across_everything_that_they_are_meant_to() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met.update(history_of(seed).met)
    for seed in OVER_ETCD:
        met.update(history_of(seed, has_etcd=True).met)
    rare = {what: met[what] for what, least in MUST_HAPPEN.items() if met[what] < least}
    assert rare == {}


def test_a_seed_is_the_same_history_in_any_process_however_it_hashes() -> None:
    logs = set()
    for hashing in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_LOG],
            env={**os.environ, "PYTHONHASHSEED": hashing},
            cwd=_ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        logs.add(done.stdout.split()[-1])
    assert len(logs) == 1
