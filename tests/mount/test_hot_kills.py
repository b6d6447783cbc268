"""A mount is killed after each step of a program that reads, writes, maps, renames and removes a hot file.

Then the store has what was stored last, whole; what was written and not stored is restored from the staging folder; a
mapping that is left shows what it showed; and a new mount of the place serves the file, and has it hot again.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest

from lakefs import connect
from lakefs.client.blocking.lake import Lake
from lakefs.limits import MIB
from tests.mount.hot_mounts import forced_mounts, passes_through
from tests.mount.mounts import LakeMounts
from tests.mount.test_two_mounts import eventually

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]
SIZE: Final = 2 * MIB + 4321


class Scene:
    """One file, and what it should be: to those who have it open, in the store, and as restored."""

    def __init__(self, folder: Path, client: Lake, number: int) -> None:
        self.folder, self.client = folder, client
        self.name = f"file{number}"
        self.shown = bytearray(os.urandom(SIZE))
        self.staged = bytearray(self.shown)
        """Bytes that calls wrote, over stored bytes; a mapping's bytes are staged when the mount looks for them."""
        self.is_unsaved = False
        self.stored: bytes | None = bytes(self.shown)
        self.opened: list[int] = []
        self.maps: list[mmap.mmap] = []
        client.put(f"bucket/{self.name}", bytes(self.shown))

    @property
    def path(self) -> Path:
        """The file on the mount."""
        return self.folder / self.name

    def _open(self, flags: int) -> int:
        self.opened.append(os.open(self.path, flags))
        return self.opened[-1]

    def _write(self, descriptor: int, offset: int, data: bytes) -> None:
        os.pwrite(descriptor, data, offset)
        for content in (self.shown, self.staged):
            content[offset : offset + len(data)] = data
        self.is_unsaved = True

    def _is_stored(self) -> None:
        self.staged[:] = self.shown
        self.stored, self.is_unsaved = bytes(self.shown), False

    # --- steps, in this order ---

    def open_a_reader(self) -> None:
        """Open it for reading: it passes through; and map it."""
        self.reader = self._open(os.O_RDONLY)
        self.maps.append(mmap.mmap(self.reader, SIZE, mmap.MAP_SHARED, mmap.PROT_READ))

    def open_a_writer(self) -> None:
        """Open it for reading and writing beside the reader."""
        self.writer = self._open(os.O_RDWR)

    def write(self) -> None:
        """Write to the middle and the end."""
        self._write(self.writer, MIB - 5, b"first write")
        self._write(self.writer, SIZE - 3, b"end")

    def sync(self) -> None:
        """Store it."""
        os.fsync(self.writer)
        self._is_stored()

    def write_by_a_mapping(self) -> None:
        """Write by a mapping: nobody tells the mount."""
        self.maps.append(mmap.mmap(self.writer, SIZE))
        self.maps[-1][100_000:100_006] = self.shown[100_000:100_006] = b"mapped"

    def write_beside_the_mapping(self) -> None:
        """Write to another granule by a call."""
        self._write(self.writer, 2 * MIB, b"beside")

    def sync_both(self) -> None:
        """Store what both have written."""
        os.fsync(self.writer)
        self._is_stored()

    def write_by_the_mapping_again(self) -> None:
        """Write where nothing looks for it before the end."""
        self.maps[-1][500_000:500_005] = self.shown[500_000:500_005] = b"again"

    def close_the_writer(self) -> None:
        """End mapping and handle: what the mapping has written is stored."""
        self.maps.pop().close()
        self.opened.remove(self.writer)
        os.close(self.writer)
        self._is_stored()

    def shorten(self) -> None:
        """Cut it by its name: that is stored at once, as nobody is writing to it."""
        os.truncate(self.path, SIZE - MIB)
        del self.shown[SIZE - MIB :], self.staged[SIZE - MIB :]
        self.maps.pop().close()  # it is longer
        self._is_stored()

    def rename(self) -> None:
        """Give it another name; what was written is stored before."""
        before, self.name = self.path, self.name + " renamed"
        before.rename(self.path)
        self._is_stored()

    def empty_and_fill(self) -> None:
        """Overwrite it beside the reader; the handle stays open."""
        self.writer = self._open(os.O_WRONLY | os.O_TRUNC)
        del self.shown[:], self.staged[:]
        self._write(self.writer, 0, b"new" * MIB)

    def close_the_other_writer(self) -> None:
        """Close that handle: the new content is stored."""
        self.opened.remove(self.writer)
        os.close(self.writer)
        self._is_stored()

    def remove(self) -> None:
        """Unlink it; the reader has it still."""
        self.path.unlink()
        self.stored, self.is_unsaved = None, False


STEPS: Final[tuple[Callable[[Scene], None], ...]] = (
    Scene.open_a_reader,
    Scene.open_a_writer,
    Scene.write,
    Scene.sync,
    Scene.write_by_a_mapping,
    Scene.write_beside_the_mapping,
    Scene.sync_both,
    Scene.write_by_the_mapping_again,
    Scene.close_the_writer,
    Scene.shorten,
    Scene.rename,
    Scene.empty_and_fill,
    Scene.close_the_other_writer,
    Scene.remove,
)


@pytest.fixture(scope="module")
def forced() -> Iterator[LakeMounts]:
    """A mount on which every file is hot at its first open."""
    with forced_mounts() as mounted:
        yield mounted


@pytest.mark.parametrize("last", range(len(STEPS)), ids=[step.__name__ for step in STEPS])
def test_a_mount_that_is_killed_after_a_step_loses_nothing_that_was_stored(forced: LakeMounts, last: int) -> None:
    mount = forced.mounts[0]
    with ExitStack() as stack:
        client = stack.enter_context(connect(forced.served.server))
        scene = Scene(forced.folders[0], client, last)
        for step in STEPS[: last + 1]:
            step(scene)
            if "writer" not in step.__name__:
                assert os.pread(scene.reader, 2 * SIZE, 0) == scene.shown, step.__name__
        eventually(lambda: passes_through(forced, scene.reader), "reads are asked of the mount")  # it may be storing
        mount.process.send_signal(signal.SIGKILL)
        mount.process.wait(30)
        for memory in scene.maps:
            assert memory[:] == scene.shown
            memory.close()
        for descriptor in scene.opened:
            with suppress(OSError):
                os.close(descriptor)
        mount.start_again()
        key = f"bucket/{scene.name}"
        if scene.stored is None:
            assert not client.exists(key)
            with pytest.raises(FileNotFoundError):
                scene.path.read_bytes()
            return
        assert client.get(key) == scene.stored
        for _ in range(2):
            with scene.path.open("rb") as again:
                assert again.read() == scene.stored
                assert passes_through(forced, again.fileno())
        forced.served.good("staged", "restore", "--staging", forced.served.data.parent / "staging0", "--all")
        assert client.get(key) == (scene.staged if scene.is_unsaved else scene.stored)
