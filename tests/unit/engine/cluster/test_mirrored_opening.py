"""Copies that open a mirror: never a stale one by itself, and without a good one only by an operator's word."""

from __future__ import annotations

from itertools import combinations

import pytest

from engine.mirror.copy_calls import InTurn
from engine.mirror.copy_list import LIST_FILE, read_list, write_list
from engine.mirror.mirror_opening import make_mirror, open_mirror
from lakefs.errors import DiskFailed, StoreLocked, StoreUnusable
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.engine.cluster.mirror_rig import Devices, content, good, put


def fail(devices: Devices, *names: str) -> None:
    """Let copies fail one after the other, each followed by a file that those left have."""
    mirror = devices.open()
    for name in names:
        devices.disks[name].fail_next("open", DiskFailed("planted"))
        put(mirror, f"without-{name}", b"acknowledged")
    devices.kill()


def test_a_mirror_of_two_opens_with_the_copy_that_went_on_and_never_with_the_other() -> None:
    devices = Devices(2)
    fail(devices, "a")
    with pytest.raises(StoreUnusable, match=r"b \(copy .*--without") as refused:
        devices.open("a")
    assert devices.copy_id("b").hex() in refused.value.message
    assert good(devices.open("b")) == "b"
    devices.kill()
    mirror = devices.open("b", "a")
    assert good(mirror) == "b"
    assert mirror.exists("without-a")


def test_a_good_copy_that_is_missing_is_given_up_only_by_the_operators_word() -> None:
    devices = Devices(2)
    for name in "ab":
        with pytest.raises(StoreUnusable, match="too few are here"):
            devices.open(name)
    mirror = devices.open("a", without="b")
    put(mirror, "f", b"1")
    devices.kill()
    assert good(devices.open("a", without="b")) == "a", "said again"
    devices.kill()
    assert good(devices.open("a")) == "a", "said once"
    devices.kill()
    assert good(devices.open()) == "a", "the other is stale from then on"


def test_two_of_three_lists_open_and_throw_the_third_copy_out() -> None:
    for names in combinations("abc", 2):
        devices = Devices(3)
        mirror = devices.open(*names)
        assert good(mirror) == "".join(names)
        put(mirror, "f", b"1")
        assert {state.state for state in mirror.state()} == {"good", "out"}
        devices.kill()
        assert good(devices.open()) == "".join(names)
    for name in "abc":
        with pytest.raises(StoreUnusable, match="too few"):
            Devices(3).open(name)


@pytest.mark.parametrize("failed", ["", "a", "b", "ab", "ba", "bc", "cb"])
def test_whatever_is_there_opens_with_all_that_was_acknowledged_or_not_at_all(failed: str) -> None:
    for count in range(1, 4):
        for there in combinations("abc", count):
            devices = Devices(3)
            fail(devices, *failed)
            try:
                mirror = devices.open(*there)
            except StoreUnusable:
                continue
            assert not set(good(mirror)) & set(failed)
            for name in failed:
                assert content(mirror, f"without-{name}") == b"acknowledged"


def test_copies_that_two_operators_let_go_on_are_not_opened_together() -> None:
    devices = Devices(2)
    put(devices.open("a", without="b"), "only-a", b"1")
    devices.kill()
    put(devices.open("b", without="a"), "only-b", b"1")
    devices.kill()
    with pytest.raises(StoreUnusable, match="went on without each other"):
        devices.open()
    mirror = devices.open(without="a")
    assert good(mirror) == "b"
    assert mirror.exists("only-b")


def test_a_list_that_was_never_durable_on_all_its_copies_does_not_count_against_one_that_was() -> None:
    """The process dies when one of two has the list; the other opens with the third, and goes on."""
    devices = Devices(3)
    mirror = devices.open()
    devices.disks["c"].fail_next("open", DiskFailed("planted"))
    devices.disks["b"].crash_at = devices.disks["b"].operation_count + 3
    with pytest.raises(SimCrashed):
        put(mirror, "f", b"never answered")
    devices.kill()
    ahead = read_list(devices.disks["a"])
    assert devices.copy_id("c") not in ahead.members
    put(devices.open("b", "c"), "g", b"answered")
    devices.kill()
    write_list(devices.disks["a"], ahead.next(ahead.members))  # whatever its number
    write_list(devices.disks["a"], read_list(devices.disks["a"]).next(ahead.members))
    mirror = devices.open()
    assert good(mirror) == "bc"
    assert content(mirror, "g") == b"answered"


@pytest.mark.parametrize("is_power_loss", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_a_kill_at_any_step_of_throwing_a_copy_out_loses_nothing(count: int, *, is_power_loss: bool) -> None:
    victim = "a"
    for crashing in "abc"[1:count]:
        for step in range(1, 30):
            devices = Devices(count, step)
            mirror = devices.open()
            put(mirror, "before", b"acknowledged")
            file = mirror.open("f", create=True)
            disk = devices.disks[crashing]
            disk.crash_at = disk.operation_count + step
            devices.disks[victim].fail_next("sync_data", DiskFailed("planted"))
            answered = False
            try:
                file.pwrite(b"acknowledged", 0)
                file.sync_data()
                mirror.sync_folder("")
                answered = True
                mirror.unlink("before")
            except SimCrashed:
                pass
            (devices.crash if is_power_loss else devices.kill)()
            reopened = devices.open()
            if answered:
                assert good(reopened) == "abc"[1:count]
                assert content(reopened, "f") == b"acknowledged"
            else:
                assert content(reopened, "before") == b"acknowledged"
            devices.kill()
            if answered or good(reopened) != "abc"[:count]:
                with pytest.raises(StoreUnusable):
                    devices.open(victim)


def test_a_damaged_list_counts_as_a_copy_that_is_not_there() -> None:
    devices = Devices(3)
    devices.disks["b"].flip_bit(LIST_FILE, 40, 3)
    mirror = devices.open()
    assert good(mirror) == "ac"
    devices = Devices(2)
    devices.disks["b"].flip_bit(LIST_FILE, 40, 3)
    with pytest.raises(StoreUnusable, match=r"b cannot be read: mirror\.list does not match its checksum"):
        devices.open()


def test_a_copied_folder_does_not_count_unless_it_was_restored() -> None:
    devices = Devices(2)
    put(devices.open(), "f", b"1")
    devices.kill()
    copied = SimDisk(9)
    put(copied, "unrelated", b"")  # so that inodes differ
    copied.unlink("unrelated")
    for name in devices.disks["b"].list_folder(""):
        put(copied, name, content(devices.disks["b"], name))
    devices.disks["c"] = copied
    with pytest.raises(StoreUnusable, match="b and c are one copy"):
        devices.open()
    with pytest.raises(StoreUnusable, match="c is a copy of that folder"):
        devices.open("a", "c")
    assert good(devices.open("a", "c", restored=True)) == "ac"
    devices.kill()
    assert good(devices.open("a", "c")) == "ac", "said once"


def test_folders_of_other_lakes_and_folders_without_a_copy_are_refused_or_left_alone() -> None:
    devices, others = Devices(2), Devices(1, 7)
    devices.disks["x"] = others.disks["a"]
    with pytest.raises(StoreUnusable, match="different lakes"):
        devices.open()
    devices.disks["x"] = SimDisk(3)
    assert good(devices.open()) == "ab"
    assert devices.disks["x"].list_folder("") == []
    with pytest.raises(StoreUnusable, match="no folder has a list"):
        devices.open("x")
    with pytest.raises(StoreUnusable, match="not empty"):
        make_mirror({"y": _used()})


def _used() -> SimDisk:
    disk = SimDisk(5)
    put(disk, "somebody's", b"")
    return disk


def test_a_mirror_is_open_once() -> None:
    devices = Devices(2)
    mirror = devices.open()
    with pytest.raises(StoreLocked):
        devices.open("b")
    mirror.close()
    devices.open().close()
    mirror = open_mirror(devices.disks, InTurn())
    assert good(mirror) == "ab"


@pytest.mark.parametrize("step", range(1, 11))
def test_a_mirror_whose_making_is_cut_short_opens_or_is_made_again(step: int) -> None:
    disks = {"a": SimDisk(step), "b": SimDisk(step + 100)}
    disks["b"].crash_at = step
    try:
        make_mirror(disks)
    except SimCrashed:
        disks = {name: disk.crash() for name, disk in disks.items()}
    try:
        mirror = open_mirror(disks, InTurn())
    except StoreUnusable:
        disks = {name: disk.kill() for name, disk in disks.items()}
        make_mirror(disks)
        mirror = open_mirror(disks, InTurn())
    assert good(mirror) == "ab"
    put(mirror, "f", b"1")


def test_behind_a_crash_names_are_those_of_the_first_copy_and_nothing_is_removed() -> None:
    devices = Devices(2)
    mirror = devices.open()
    mirror.make_folder("journal")
    put(mirror, "journal/1", b"both")
    a, b = devices.disks["a"], devices.disks["b"]
    put(a, "journal/2", b"only the first has it")
    put(b, "journal/3", b"only the second has it")
    b.unlink("journal/1")
    put(b, "journal/1", b"another length")
    devices.kill()
    mirror = devices.open()
    assert good(mirror) == "ab"
    for disk in (devices.disks["a"], devices.disks["b"]):
        assert disk.list_folder("journal") == ["1", "2"]
    assert content(devices.disks["b"], "journal/2") == b"only the first has it"
    assert content(devices.disks["b"], "mirror.aside/journal-3") == b"only the second has it"
    assert content(devices.disks["b"], "journal/1") == b"another length", "either may be damaged"
    mirror.close()
    devices.kill()
    put(devices.disks["b"], "journal/4", b"")
    mirror = devices.open()
    assert devices.disks["b"].exists("journal/4"), "closed in order: nothing was looked at"


def test_names_that_nobody_synced_are_durable_when_the_mirror_was_closed_in_order() -> None:
    for seed in range(6):
        devices = Devices(2, seed)
        mirror = devices.open()
        mirror.make_folder("spares")
        put(mirror, "spares/1", b"")
        mirror.unlink("spares/1")
        mirror.open("f", create=True).close()
        mirror.close()
        devices.crash()
        for disk in devices.disks.values():
            assert disk.list_folder("spares") == []
            assert disk.exists("f")


def test_what_the_operator_went_on_with_counts_against_a_newer_copy_that_returns() -> None:
    devices = Devices(2)
    fail(devices, "a")  # the other one goes on, and is lost
    put(devices.open("a", without="b"), "chosen", b"1")
    devices.kill()
    mirror = devices.open()
    assert good(mirror) == "a"
    assert content(mirror, "chosen") == b"1"
