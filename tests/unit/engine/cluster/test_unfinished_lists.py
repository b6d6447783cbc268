"""Lists of good copies whose making was cut short: no copy that lacks an answered change opens by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from engine.mirror.copy import Copy
from engine.mirror.copy_calls import InTurn, Outcome, T
from engine.mirror.copy_list import LIST_FILE, read_list, write_list
from engine.mirror.mirror_bounds import COPIES_MAX
from engine.mirror.mirror_opening import make_mirror
from engine.mirror.mirrored_disk import MirroredDisk
from engine.mirror.new_copy import add_copy
from lakefs.errors import DiskFailed, StoreUnusable
from tests.sim.world.disk import SimDisk
from tests.unit.engine.cluster.mirror_rig import Devices, content, good, put


class LastFirst(InTurn):
    """One copy after the other, the last one first: a new copy has its list before the old ones."""

    def each(self, copies: Sequence[Copy], call: Callable[[Copy], T], *, slow: bool) -> list[Outcome[T]]:
        return super().each(copies[::-1], call, slow=slow)[::-1]


class KilledHere(Exception):
    """The process ends at this operation."""


def fail_list(devices: Devices, name: str) -> None:
    """Let the next list not be written on that device."""
    devices.disks[name].fail_next("rename", DiskFailed("planted"), path=LIST_FILE)


def begun(count: int) -> Devices:
    """Return devices of which each has a file: names are made equal by an opening, bytes are not."""
    devices = Devices(count)
    answer(devices.open(), b"0", create=True)
    devices.kill()
    return devices


def answer(mirror: MirroredDisk, payload: bytes = b"1", *, create: bool = False) -> None:
    """Have a change answered that each good copy must have from then on."""
    file = mirror.open("file", create=create)
    file.pwrite(payload, 0)
    file.sync_data()
    file.close()
    mirror.sync_folder("")


def throw_out(devices: Devices, mirror: MirroredDisk, name: str) -> None:
    """Throw a copy out by a change that it fails at."""
    devices.disks[name].fail_next("open", DiskFailed("planted"))
    put(mirror, f"without-{name}", b"")


def cut_short(devices: Devices, name: str, change: Callable[[], object]) -> None:
    """Make a change; the process is killed when that device gets the list, which it does not have then."""
    devices.disks[name].fail_next("rename", KilledHere(), path=LIST_FILE)
    with pytest.raises(KilledHere):
        change()
    devices.kill()


def answered_with(devices: Devices, names: str, failing: str) -> None:
    """Open with a device that fails at each list, and have a change answered, if that is possible."""
    for _ in range(3):
        fail_list(devices, failing)
    try:
        answer(devices.open(*names))
    except (DiskFailed, StoreUnusable):
        devices.disks[failing].forget_failures()
        devices.kill()
        answer(devices.open(*names))
    devices.disks[failing].forget_failures()
    devices.kill()


def check_never_stale(devices: Devices, *sides: str) -> None:
    """Check that each of these sets of devices does not open, or all its good copies have what was answered."""
    for names in sides:
        with suppress(StoreUnusable):
            for copy in devices.open(*names).copies.good:
                assert content(copy.disk, "file") == b"1", f"{copy} of {names}"
        devices.kill()


ORDERS = pytest.mark.parametrize(("calls", "behind"), [(InTurn(), 1), (LastFirst(), 0)])
"""The copy that has the list first, and the index of the one behind that the process dies at."""


@ORDERS
@pytest.mark.parametrize("failing", "ab")
def test_a_copy_that_was_added_by_an_unfinished_list_and_the_old_one_do_not_open_alone(
    calls: InTurn, behind: int, failing: str
) -> None:
    devices = begun(1)
    devices.disks["b"] = SimDisk(1)
    mirror = devices.open()
    mirror.copies.calls = calls
    cut_short(devices, "ab"[behind], lambda: add_copy(mirror, "b", devices.disks["b"]))
    answered_with(devices, "ab", failing)
    check_never_stale(devices, "a", "b", "ab")


@ORDERS
@pytest.mark.parametrize("failing", "ab")
def test_copies_that_were_left_out_one_after_the_other_do_not_open_together(
    calls: InTurn, behind: int, failing: str
) -> None:
    """Three copies: "c" was left out, but only one of the others knows; then one of these fails at its list."""
    devices = begun(3)
    mirror = devices.open()
    mirror.copies.calls = calls
    cut_short(devices, "ab"[behind], lambda: throw_out(devices, mirror, "c"))
    answered_with(devices, "ab", failing)
    check_never_stale(devices, "ac", "bc", "a", "b", "c", "abc")


@pytest.mark.parametrize("known_to", ["a", "ab"])
def test_a_copy_that_was_added_by_an_unfinished_list_does_not_open_with_one_that_was_left_out(known_to: str) -> None:
    """The new one of three copies, "a", has the list that names it; the others go on, at last "c" alone."""
    devices = begun(3)
    throw_out(devices, devices.open(), "a")
    devices.kill()
    mirror = devices.open()
    mirror.copies.calls = LastFirst()
    devices.replace("a")
    cut_short(devices, "c", lambda: add_copy(mirror, "a", devices.disks["a"]))
    if known_to == "ab":
        write_list(devices.disks["b"], read_list(devices.disks["a"]))
    assert set(map(devices.copy_id, "abc")) == set(read_list(devices.disks["a"]).members)
    answered_with(devices, "bc", "b")
    check_never_stale(devices, "ab", "a", "b", "abc")


def test_lists_that_nobody_went_on_with_do_not_keep_devices_from_opening_that_are_all_there() -> None:
    devices = Devices(3)
    mirror = devices.open()
    cut_short(devices, "b", lambda: throw_out(devices, mirror, "c"))
    cut_short(devices, "c", lambda: devices.open("b", "c"))  # "a", which alone knows that "c" is out, is away
    assert good(devices.open()) == "abc"


def test_an_old_copy_of_a_folder_says_nothing_against_the_list_of_those_that_went_on() -> None:
    devices = begun(3)
    copied = devices.disks["x"] = SimDisk(9)
    put(copied, "unrelated", b"")  # so that inodes differ
    copied.unlink("unrelated")
    for name in devices.disks["b"].list_folder(""):
        put(copied, name, content(devices.disks["b"], name))
    mirror = devices.open("a", "b", "c")
    throw_out(devices, mirror, "c")
    answer(mirror)
    devices.kill()
    check_never_stale(devices, "acx")


def test_a_list_that_a_killed_process_has_not_synced_is_durable_before_it_counts() -> None:
    for seed in range(12):
        devices = begun(1)
        devices.rng.seed(seed)
        devices.disks["b"] = SimDisk(devices.rng)
        mirror = devices.open("a")
        devices.disks["a"].fail_next("sync_folder", KilledHere())
        with pytest.raises(KilledHere):
            add_copy(mirror, "b", devices.disks["b"])
        devices.kill()
        fail_list(devices, "a")
        with suppress(StoreUnusable):
            answer(devices.open())
            devices.crash()
            check_never_stale(devices, "a")


@pytest.mark.parametrize("is_list_failing", [True, False])
def test_what_a_new_copy_lacks_is_answered_only_when_no_list_names_it(*, is_list_failing: bool) -> None:
    """A change of another thread fails on the new copy while it gets the list that names it."""
    devices = Devices(1)
    mirror = devices.open()
    put(mirror, "f", b"old")
    file = mirror.open("f")
    new = devices.disks["b"] = Interrupted(3)
    listed: list[int] = []

    def change() -> None:
        new.fail_next("pwrite", DiskFailed("planted"))
        if is_list_failing:
            new.fail_next("sync_folder", DiskFailed("planted"))
        file.pwrite(b"new", 0)
        listed.append(len(read_list(devices.disks["a"]).members))

    new.at_list = change
    with suppress(DiskFailed):
        add_copy(mirror, "b", new)
    new.wait()
    assert listed == [1], "the change was answered when the list was without the new copy"
    devices.kill()
    assert content(devices.open(), "f") == b"new"


class Interrupted(SimDisk):
    """A device during whose list another thread does something, and is waited for only for a moment."""

    at_list: Callable[[], object] | None = None
    _thread: threading.Thread | None = None

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if target == LIST_FILE and self.at_list is not None:
            at_list, self.at_list = self.at_list, None
            self._thread = threading.Thread(target=at_list)
            self._thread.start()
            self._thread.join(0.1)

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join()


def test_a_mirror_that_has_stopped_writes_no_list() -> None:
    devices = Devices(3)
    mirror = devices.open()
    for name in "ab":
        devices.disks[name].fail_next("open", DiskFailed("planted"))
    with pytest.raises(DiskFailed, match="too many"):
        put(mirror, "f", b"")
    lists = [read_list(disk) for disk in devices.disks.values()]
    with pytest.raises(DiskFailed):
        mirror.throw_out(devices.copy_id("c"), "an operator's wish")
    mirror.close()
    assert [read_list(disk) for disk in devices.disks.values()] == lists


def test_a_mirror_has_no_more_copies_than_the_rules_hold_for() -> None:
    with pytest.raises(StoreUnusable, match="1 to 3 copies"):
        make_mirror({str(number): SimDisk(number) for number in range(4)})
    devices = Devices(COPIES_MAX)
    with pytest.raises(StoreUnusable, match="has 3 copies already"):
        add_copy(devices.open(), "z", SimDisk(7))
