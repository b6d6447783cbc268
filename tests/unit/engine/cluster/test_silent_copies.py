"""Copies in threads: at once where a device is waited for, and no longer than the caller's patience."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.host.local_disk import LocalDisk, LocalFile
from engine.mirror.copy_calls import AtOnce
from engine.mirror.mirror_bounds import PIECE_BYTES
from engine.mirror.mirror_opening import make_mirror, open_mirror
from engine.mirror.mirrored_disk import MirroredDisk
from engine.mirror.new_copy import add_copy
from lakefs.errors import StoreUnusable
from lakefs.ids import Buffer
from tests.unit.engine.cluster.mirror_rig import content, good, put

PATIENCE_S = 1.0
LONG_S = 60.0
SHORT_S = 0.2


class Device(LocalDisk):
    """A folder on a device that may hang at each sync, or tell that one has begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.piece_read = threading.Event()
        self.write_done: threading.Event | None = None
        """Set by a writer; a piece that is copied to this device waits for it for a while."""

    def open(self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False) -> LocalFile:
        opened = super().open(path, create=create, direct=direct, read_only=read_only)
        device = self

        class File(LocalFile):
            __slots__ = ()

            def pwrite(self, payload: Buffer, offset: int) -> None:
                if device.write_done is not None and len(payload) == PIECE_BYTES:
                    device.piece_read.set()
                    device.write_done.wait(SHORT_S)
                super().pwrite(payload, offset)

            def sync_data(self) -> None:
                device.asked.set()
                assert device.answers.wait(LONG_S)
                super().sync_data()

        opened.__class__ = File
        return opened


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[dict[str, Device]]:
    """Three devices in memory, where a sync that is not made to hang takes no time."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm")) if os.path.isdir("/dev/shm") else tmp_path
    made = {name: Device(root / name) for name in "abc"}
    make_mirror(made)
    yield made
    for device in made.values():
        device.answers.set()
    shutil.rmtree(root)


def opened(devices: dict[str, Device], patience_s: float | None) -> MirroredDisk:
    return open_mirror(devices, AtOnce(patience_s))


@pytest.mark.parametrize("hanging", "abc")
def test_a_copy_that_hangs_is_thrown_out_when_another_one_has_answered(
    devices: dict[str, Device], hanging: str
) -> None:
    mirror = opened(devices, PATIENCE_S)
    file = mirror.open("f", create=True)
    file.pwrite(b"1", 0)
    devices[hanging].answers.clear()
    file.sync_data()
    assert good(mirror) == "abc".replace(hanging, "")
    (out,) = [state for state in mirror.state() if state.state == "out"]
    assert (out.name, out.reason) == (hanging, f"{hanging} has not answered 1 s after another copy")
    mirror.sync_folder("")
    file.close()
    put(mirror, "g", b"2")
    assert content(mirror, "g") == b"2"
    devices[hanging].answers.set()
    mirror.close()
    again = opened({name: device for name, device in devices.items() if name != hanging}, PATIENCE_S)
    assert good(again) == "abc".replace(hanging, "")
    again.close()


def test_when_no_copy_answers_all_are_waited_for(devices: dict[str, Device]) -> None:
    mirror = opened(devices, PATIENCE_S / 2)
    file = mirror.open("f", create=True)
    for device in devices.values():
        device.answers.clear()
        device.asked.clear()
    syncing = threading.Thread(target=file.sync_data)
    syncing.start()
    for device in devices.values():
        assert device.asked.wait(LONG_S)
    syncing.join(PATIENCE_S)
    assert syncing.is_alive()
    for device in devices.values():
        device.answers.set()
    syncing.join(LONG_S)
    assert not syncing.is_alive()
    mirror.close()


@pytest.mark.parametrize("patience_s", [None, LONG_S])
def test_all_copies_are_synced_at_once(devices: dict[str, Device], patience_s: float | None) -> None:
    """Each sync waits until the others have begun."""
    mirror = opened(devices, patience_s)
    file = mirror.open("f", create=True)
    for device in devices.values():
        device.asked.clear()
    devices["a"].answers = devices["b"].asked
    devices["b"].answers = devices["c"].asked
    devices["c"].answers = devices["a"].asked
    file.sync_data()
    assert good(mirror) == "abc"
    mirror.close()


def test_threads_that_write_at_once_throw_one_copy_out_once_and_lose_nothing(tmp_path: Path) -> None:
    devices = {name: LocalDisk(tmp_path / name) for name in "ab"}
    make_mirror(devices)
    mirror = open_mirror(devices, AtOnce())
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for step in range(20):
                if (number, step) == (0, 10):
                    (tmp_path / "a").rename(tmp_path / "lost")
                put(mirror, f"{number}-{step}", b"%d" % step)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(LONG_S)
    assert failures == []
    assert good(mirror) == "b"
    mirror.close()
    mirror = open_mirror({"b": LocalDisk(tmp_path / "b")}, AtOnce())
    assert len(mirror.list_folder("")) == 80
    mirror.close()
    with pytest.raises(StoreUnusable):
        open_mirror({"a": LocalDisk(tmp_path / "lost")}, AtOnce())


def test_a_writer_in_another_thread_does_not_come_between_the_read_and_the_write_of_a_piece(
    devices: dict[str, Device], tmp_path: Path
) -> None:
    mirror = opened(devices, None)
    mirror.throw_out(mirror.copies.good[2].id, "an operator's wish")
    file = mirror.open("f", create=True)
    file.pwrite(b"old" * PIECE_BYTES, 0)
    new = Device(tmp_path / "new")
    done = new.write_done = threading.Event()

    def write() -> None:
        assert new.piece_read.wait(LONG_S)
        file.pwrite(b"new", 99)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    add_copy(mirror, "new", new)
    writer.join(LONG_S)
    assert good(mirror) == "abnew"
    assert content(new, "f") == content(devices["a"], "f")
    assert content(new, "f")[96:105] == b"oldnewold"
    mirror.close()
