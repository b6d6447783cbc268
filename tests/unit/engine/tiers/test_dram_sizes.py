"""The size of the DRAM tier: a bounded share by default, never more than the machine has, and otherwise the setting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.tiers.arena import tier_bytes
from lakefs.errors import ConfigError
from lakefs.host.memory_limits import memory_bytes
from lakefs.limits import GIB, MIB


def _machine(folder: Path, total_kib: int, groups: str, limits: dict[str, str]) -> int:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {total_kib:>14} kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    for path, text in limits.items():
        place = cgroups / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")
    return memory_bytes(proc, cgroups)


def test_the_machine_s_memory_counts_where_no_group_limits_it(tmp_path: Path) -> None:
    limits = {"memory.max": "max", "a/memory.max": "max"}
    assert _machine(tmp_path, 8 << 20, "0::/a\n", limits) == 8 * GIB


def test_the_least_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    limits = {"a/memory.max": str(2 * GIB), "a/b/memory.max": str(4 * GIB)}
    assert _machine(tmp_path, 8 << 20, "0::/a/b\n", limits) == 2 * GIB


def test_limits_of_the_older_kind_of_groups_count_too(tmp_path: Path) -> None:
    limits = {"memory/x/memory.limit_in_bytes": str(3 * GIB), "memory/memory.limit_in_bytes": str(1 << 62)}
    assert _machine(tmp_path, 8 << 20, "4:memory:/x\n3:cpu:/y\n0::/\n", limits) == 3 * GIB


def test_where_proc_is_hidden_as_under_our_unit_the_kernel_is_asked(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path, tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:memory:/x\n")
    (tmp_path / "memory" / "x").mkdir(parents=True)
    (tmp_path / "memory" / "x" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_bytes(tmp_path, tmp_path) == memory_bytes(tmp_path, tmp_path / "none")


def test_where_nobody_knows_there_is_no_tier_by_itself() -> None:
    assert tier_bytes(None, 0) == (0, "")


@pytest.mark.parametrize(
    ("memory", "expected"), [(2 * GIB, 0), (4 * GIB, 256 * MIB), (24 * GIB, 24 * GIB // 16), (512 * GIB, 4 * GIB)]
)
def test_by_itself_it_takes_a_small_bounded_share(memory: int, expected: int) -> None:
    assert tier_bytes(None, memory) == (expected, "")


def test_what_is_asked_for_is_taken_in_whole_slabs_and_zero_is_none() -> None:
    assert tier_bytes(0, 8 * GIB) == (0, "")
    assert tier_bytes(200 * MIB, 8 * GIB) == (192 * MIB, "")
    assert tier_bytes(1 * GIB, 0) == (1 * GIB, "")


def test_more_than_the_memory_is_clamped_and_told() -> None:
    size, warning = tier_bytes(64 * GIB, 8 * GIB)
    assert size == 6 * GIB
    assert "65536 MiB were asked for" in warning
    assert "8192 MiB" in warning


def test_less_than_a_slab_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one slab; give 64M or more, or 0 for none"):
        tier_bytes(1 * MIB, 8 * GIB)
