"""The key-value bench: a side that works is measured, one that does not is a row with the reason, bytes are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.contest import CouldNotRun
from bench.harness.measure import Bench, Scale
from bench.harness.sampled import Sampled
from bench.peers.kv_blocks import is_block, write_block
from bench.peers.kv_contest import KvSide, Moved, kv_scenario

BLOCK_BYTES = 8192


def scenario(*sides: KvSide, what: str = "get") -> Sampled:
    moved = Moved("get" if what == "get" else "put", BLOCK_BYTES, 4, 16, 8)
    return kv_scenario("kv", what, moved, sides, targets=(), generator="none", expected_s=1)


def test_a_block_is_its_keys_and_no_others() -> None:
    memory = memoryview(bytearray(BLOCK_BYTES))
    write_block(7, memory)
    assert is_block(7, memory)
    assert not is_block(8, memory)
    assert not is_block(7 + (4 << 20) // 4096, memory)
    memory[-1] ^= 1
    assert not is_block(7, memory)


@pytest.mark.slow
def test_who_cannot_or_gives_other_bytes_is_a_row_with_the_reason(tmp_path: Path) -> None:
    sides = (
        KvSide("copy", "copies", "folder"),
        KvSide("files", "files", "folder"),
        KvSide("liar", "nothing", "folder"),
        KvSide("absent", "openlake", "folder"),
    )
    rows, measured = scenario(*sides).run(Bench(tmp_path, Scale(quick=True, rounds=2)))
    by_name = {row.what.rpartition(" / ")[2]: row for row in rows}
    assert by_name["files"].value > 0
    assert "are not what was stored" in by_name["liar"].could_not_run
    assert "openlake_client" in by_name["absent"].could_not_run
    assert {name: len(side["rounds"]) for name, side in measured["sides"].items()} == {"copy": 2, "files": 2}


@pytest.mark.slow
def test_what_is_put_is_taken_back_before_the_next_round(tmp_path: Path) -> None:
    sides = KvSide("files", "files", "folder"), KvSide("direct", "direct", "folder")
    rows, _ = scenario(*sides, what="put").run(Bench(tmp_path, Scale(quick=True, rounds=2)))
    assert [row.could_not_run for row in rows] == [""]
    kept = [path for path in (tmp_path / "folder").iterdir() if path.name != "direct"]
    assert len(kept) == 4 + 2 * 4


@pytest.mark.slow
def test_what_ours_cannot_do_is_a_failure_of_the_scenario(tmp_path: Path) -> None:
    with pytest.raises(CouldNotRun, match="are not what was stored"):
        scenario(KvSide("ours", "nothing", "folder")).run(Bench(tmp_path, Scale(quick=True, rounds=1)))
