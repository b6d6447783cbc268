"""The budget of hot files: shares of the memory, and of what is left of it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, strategies as st

from fuse.hot.budget import Budget
from lakefs.host.memory_limits import Available, available_bytes
from lakefs.limits import GIB, KIB, MIB


def budget(wanted: int | None, free: int, of: int = 100 * GIB, *groups: Available) -> Budget:
    return Budget(
        wanted, lambda: min([of, *(group.of_bytes for group in groups)]), lambda: [Available(free, of), *groups]
    )


def test_without_a_wish_it_is_a_tenth_of_the_memory() -> None:
    assert budget(None, 90 * GIB).room_bytes(0) == 10 * GIB
    assert budget(None, 90 * GIB).room_bytes(4 * GIB) == 6 * GIB


def test_it_is_at_most_half_of_what_is_available() -> None:
    assert budget(50 * GIB, 20 * GIB).room_bytes(0) == 10 * GIB
    assert budget(50 * GIB, 11 * GIB).room_bytes(9 * GIB) == 1 * GIB  # 20 GiB without the hot files
    assert budget(50 * GIB, 5 * GIB).room_bytes(9 * GIB) == 0


def test_it_is_at_most_half_of_a_control_group() -> None:
    limited = budget(50 * GIB, 90 * GIB, 100 * GIB, Available(250 * MIB, 256 * MIB))
    assert limited.limit_bytes == 128 * MIB
    assert limited.room_bytes(0) == 125 * MIB
    assert budget(None, 90 * GIB, 100 * GIB, Available(250 * MIB, 256 * MIB)).limit_bytes == 256 * MIB // 10


def test_none_is_none() -> None:
    assert budget(0, 90 * GIB).limit_bytes == budget(0, 90 * GIB).room_bytes(0) == 0


def test_memory_is_scarce_below_a_tenth_of_the_machine_or_of_a_group() -> None:
    assert not budget(None, 10 * GIB).is_scarce()
    assert budget(None, 10 * GIB - 1).is_scarce()
    assert budget(None, 90 * GIB, 100 * GIB, Available(25 * MIB, 256 * MIB)).is_scarce()


@given(st.integers(0, 200 * GIB), st.integers(0, 100 * GIB), st.integers(0, 100 * GIB))
def test_room_that_is_taken_is_gone_and_room_that_is_freed_is_there(wanted: int, free: int, used: int) -> None:
    room = budget(wanted, free).room_bytes(used)
    assert budget(wanted, free - room).room_bytes(used + room) <= 1
    assert used + room <= max(used, budget(wanted, free).limit_bytes)


def test_what_is_available_is_read_from_the_machine_and_its_groups(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a/b\n3:cpu:/x\n4:memory:/old\n")
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n")
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("1000000\n")
    (tmp_path / "a" / "memory.current").write_text("700000\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 5\nactive_file 100000\ninactive_file 50000\nshmem 7\n")
    (group / "memory.max").write_text("max\n")
    old = tmp_path / "memory" / "old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000000\n")
    (old / "memory.usage_in_bytes").write_text("2500000\n")
    (old / "memory.stat").write_text("active_file 1\ntotal_active_file 30000\ntotal_inactive_file 0\n")
    assert available_bytes(tmp_path, tmp_path) == [
        Available(3000 * KIB, 4000 * KIB), Available(450_000, 1_000_000), Available(0, 2_000_000),
    ]  # fmt: skip
