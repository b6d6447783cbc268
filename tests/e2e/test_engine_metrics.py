"""The figures about upkeep on the admin port of a real engine."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.served import WAIT_S, Served, serving

pytestmark = pytest.mark.slow
MIB = 1 << 20


def figures(engine: Served) -> dict[str, float]:
    """Return each figure without labels, by name."""
    [address] = [line.split()[-1] for line in engine.printed if line.startswith("admin")]
    with urllib.request.urlopen(f"{address}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in pairs}


def test_gc_scrub_and_quarantine_are_counted(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0") as engine:
        before = figures(engine)
        assert before["lake_gc_cycles_total"] == before["lake_gc_last_cycle_timestamp_seconds"] == 0
        engine.good("put", "-", "bkt/kept", stdin=os.urandom(MIB))
        engine.good("put", "-", "bkt/gone", stdin=os.urandom(2 * MIB))
        engine.good("rm", "bkt/gone")
        engine.good("gc")
        [segment] = (engine.data / "segments").glob("*.large")
        with segment.open("r+b") as file:
            file.seek(4096 + 1000)
            file.write(b"damage")
        assert engine("scrub", "--rate", "0").code == 1
        after = figures(engine)
    assert after["lake_gc_cycles_total"] == 1
    assert 2 * MIB <= after["lake_gc_freed_bytes_total"] < 3 * MIB
    assert after["lake_compaction_moved_bytes_total"] == 0
    assert after["lake_gc_last_cycle_timestamp_seconds"] > 1.7e9
    assert after["lake_gc_running"] == after["lake_scrub_running"] == 0
    assert after["lake_scrub_bytes_total"] >= MIB
    assert after["lake_scrub_damage_total"] == after["lake_quarantined_chunks"] == 1
