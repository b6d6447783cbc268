"""A mount of a real store: its life from the first command to the last, with what was written and not stored."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.mount_rig import MountRig, mount_rig
from tests.e2e.served import LAKE, Served

pytestmark = pytest.mark.fuse
UNSTORED = b"written, and not closed\n" * 1000


@pytest.fixture
def rig(served: Served) -> Iterator[MountRig]:
    """A mount point for the store, which has a bucket."""
    served("bucket", "create", "models")
    with mount_rig(LAKE, served.server) as made:
        yield made


def written(path: Path) -> int:
    """A new file that stays open."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(descriptor, UNSTORED)
    return descriptor


def give_up(descriptor: int) -> None:
    """Close what the mount has left behind."""
    with pytest.raises(OSError):
        os.close(descriptor)


def test_what_is_put_is_a_file_and_what_is_written_is_an_object(rig: MountRig, served: Served) -> None:
    served("put", "-", "models/put", stdin=b"by put")
    rig.mount()
    assert (rig.place / "models" / "put").read_bytes() == b"by put"
    (rig.place / "models" / "written").write_bytes(b"by write")
    assert served.good("cat", "models/written").out == b"by write"
    assert rig.lake("unmount", rig.place).code == 0
    assert not rig.is_mounted


def test_one_bucket_can_be_the_root(rig: MountRig, served: Served) -> None:
    served("put", "-", "models/root", stdin=b"x")
    rig.mount("--bucket", "models", "--read-only")
    assert (rig.place / "root").read_bytes() == b"x"
    with pytest.raises(OSError, match="Read-only"):
        (rig.place / "new").touch()


def test_a_bucket_that_is_not_there_is_told(rig: MountRig) -> None:
    done = rig.lake("mount", "--bucket", "nope", rig.place)
    assert (done.code, "'nope' does not exist" in done.err) == (66, True)
    assert not rig.is_mounted


def test_an_engine_that_is_not_there_is_told(rig: MountRig) -> None:
    done = rig.lake("mount", rig.place, server=f"unix:{rig.folder}/nobody")
    assert done.code == 69, done
    assert not rig.is_mounted


def test_a_mount_that_is_told_to_end_stores_what_is_written_and_open(rig: MountRig, served: Served) -> None:
    process = rig.foreground()
    descriptor = written(rig.place / "models" / "ended")
    assert process.signal(signal.SIGTERM).end() == 0, process.log
    give_up(descriptor)
    assert served.good("cat", "models/ended").out == UNSTORED


def test_a_mount_that_is_unmounted_lazily_goes_on_for_who_has_files_open(
    rig: MountRig, served: Served
) -> None:
    process = rig.foreground()
    descriptor = written(rig.place / "models" / "lazy")
    assert rig.lake("unmount", "--lazy", rig.place).code == 0
    os.write(descriptor, b"more")
    os.close(descriptor)
    assert process.end() == 0, process.log
    assert served.good("cat", "models/lazy").out == UNSTORED + b"more"


def test_a_killed_mount_leaves_what_was_written_and_the_next_one_names_it(rig: MountRig) -> None:
    process = rig.foreground()
    descriptor = written(rig.place / "models" / "killed")
    process.signal(signal.SIGKILL).end()
    give_up(descriptor)
    rig.mount()
    [line] = [line for line in rig.log.splitlines() if "models/killed" in line]
    named = re.search(r"path=(\S+)", line)
    assert named is not None
    assert Path(named[1]).read_bytes() == UNSTORED


def test_a_mount_ends_in_order_without_its_engine(rig: MountRig, served: Served) -> None:
    process = rig.foreground()
    served.kill()
    try:
        assert rig.lake("unmount", rig.place).code == 0
        assert process.end() == 0, process.log
    finally:
        served.start()
    assert not rig.is_mounted
