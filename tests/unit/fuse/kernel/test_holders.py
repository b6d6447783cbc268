"""Mounts that are elsewhere: every namespace that has one is found, and the text about them has bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse.kernel import holders
from fuse.kernel.holders import NAMESPACES_NAMED, PROCESSES_NAMED, Holder, find_holders, told
from fuse.kernel.mount_point import MountEntry, entries_of

DEVICE = "0:44"


class Machine:
    """A /proc of a test's own, where links of namespaces may be read or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def process(self, pid: int | str, namespace: int, *devices: str, command: str = "sh", shown: bool = True) -> None:
        """Add a process: its namespace has a root, and a lake mount for each device."""
        place = self.folder / str(pid)
        (place / "ns").mkdir(parents=True)
        if shown:
            (place / "ns" / "mnt").symlink_to(f"mnt:[{namespace}]")
        (place / "comm").write_text(f"{command}\n")
        lines = [f"{namespace}0 1 8:1 / / rw - ext4 /dev/vda rw"]
        lines += [f"{namespace}{n} 1 {device} / /lake{n} rw - fuse.lake lake rw" for n, device in enumerate(devices, 1)]
        (place / "mountinfo").write_text("\n".join(lines) + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose first namespace, 1, is this process's own."""

    def seen(pid: str, device: str = "") -> list[MountEntry]:
        table = tmp_path / pid / "mountinfo"
        return entries_of(table, device) if table.exists() else []

    monkeypatch.setattr(holders, "_PROC", tmp_path)
    monkeypatch.setattr(holders, "mounts_seen_by", seen)
    made = Machine(tmp_path)
    made.process("self", 1)
    made.process(1, 1, command="init")
    return made


def test_each_namespace_that_has_the_device_is_found_with_its_processes(machine: Machine) -> None:
    machine.process(10, 2, DEVICE, command="nginx")
    machine.process(9, 2, DEVICE, command="sh")
    machine.process(20, 3, "0:440", "10:44")
    machine.process(30, 4, "0:45", DEVICE)
    found = find_holders(DEVICE)
    assert found == [
        Holder("2", Path("/lake1"), [(9, "sh"), (10, "nginx")], 2),
        Holder("4", Path("/lake2"), [(30, "sh")], 1),
    ]
    assert told(found) == "mount namespace 2, processes 9 (sh), 10 (nginx); mount namespace 4, process 30 (sh)"


def test_processes_whose_namespace_may_not_be_asked_are_told_apart_by_their_first_mount(machine: Machine) -> None:
    machine.process(2, 1, shown=False)
    machine.process(10, 2, DEVICE, shown=False)
    machine.process(11, 2, DEVICE, shown=False)
    machine.process(12, 3, DEVICE, shown=False)
    first, second = find_holders(DEVICE)
    assert (first.namespace, first.process_count, second.processes) == ("", 2, [(12, "sh")])


def test_what_is_said_has_bounds(machine: Machine) -> None:
    for namespace in range(2, 2 + NAMESPACES_NAMED + 3):
        for number in range(PROCESSES_NAMED + 5):
            machine.process(namespace * 1000 + number, namespace, DEVICE, command="a b\x07")
    line = told(find_holders(DEVICE))
    assert line.count("mount namespace ") == NAMESPACES_NAMED
    assert line.count("(a b?)") == NAMESPACES_NAMED * PROCESSES_NAMED
    assert line.count(" and 5 more") == NAMESPACES_NAMED
    assert line.endswith("; and 3 more mount namespaces")


def test_a_search_that_takes_too_long_ends_with_what_it_has(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.process(10, 2, DEVICE)
    monkeypatch.setattr(holders, "SEARCH_S", -1.0)
    assert find_holders(DEVICE) == []


def test_a_process_that_ends_during_the_search_is_no_error(machine: Machine) -> None:
    machine.process(10, 2, DEVICE)
    (machine.folder / "11").mkdir()
    assert [holder.namespace for holder in find_holders(DEVICE)] == ["2"]
