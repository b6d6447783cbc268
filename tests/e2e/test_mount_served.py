"""A mount of a real store, from the first command to the last, and what was written to it and not stored."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.mount_rig import MountRig, mount_rig
from tests.e2e.served import LAKE, WAIT_S, Served

pytestmark = pytest.mark.fuse
UNSTORED = b"written, and not closed\n" * 1000


@pytest.fixture
def rig(served: Served) -> Iterator[MountRig]:
    """A mount point for the store, which has a bucket."""
    served("bucket", "create", "models")
    with mount_rig(LAKE, served.server) as made:
        yield made


def written(path: Path) -> int:
    """Open a new file, write to it, and leave it open."""
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


def test_a_mount_that_is_unmounted_lazily_goes_on_for_who_has_files_open(rig: MountRig, served: Served) -> None:
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


@contextmanager
def stopped(served: Served) -> Iterator[None]:
    """Stop the engine's process for the block: it does nothing and sends nothing."""
    assert served.process is not None
    served.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        served.process.send_signal(signal.SIGCONT)


def test_what_is_not_stored_in_time_when_the_mount_ends_stays_staged_and_is_told(rig: MountRig, served: Served) -> None:
    process = rig.foreground("-o", "stop_wait=1.5")
    models = rig.place / "models"
    opened = [written(models / name) for name in ("late1", "late2")]
    closing = written(models / "closing")
    with stopped(served), ThreadPoolExecutor(1) as pool:
        close = pool.submit(os.close, closing)  # waits for the engine
        assert process.signal(signal.SIGTERM).end() == 75, process.log
        assert isinstance(close.exception(WAIT_S), OSError)
    for descriptor in opened:
        give_up(descriptor)
    assert not rig.is_mounted
    assert "3 files could not be stored when the mount ended" in process.log
    assert "lake staged ls --staging" in process.log
    for name in ("late1", "late2", "closing"):
        assert f"models/{name}" in process.log
    assert rig.lake("staged", "restore", "--all").code == 0
    for name in ("late1", "late2", "closing"):
        assert served.good("cat", f"models/{name}").out == UNSTORED


def test_a_mount_whose_engine_went_away_ends_with_its_error_and_keeps_what_was_written(
    rig: MountRig, served: Served
) -> None:
    process = rig.foreground("-o", "engine_wait=0.1")
    descriptor = written(rig.place / "models" / "orphan")
    served.kill()
    try:
        assert process.signal(signal.SIGTERM).end() == 69, process.log
    finally:
        served.start()
    give_up(descriptor)
    assert "1 file could not be stored when the mount ended" in process.log
    assert rig.lake("staged", "restore", "models/orphan").code == 0
    assert served.good("cat", "models/orphan").out == UNSTORED


def test_an_engine_that_is_stopped_is_an_error_after_a_while_and_the_mount_lives_on(
    rig: MountRig, served: Served
) -> None:
    served("put", "-", "models/large", stdin=os.urandom(5 << 20))
    served("put", "-", "models/small", stdin=b"small")
    rig.mount("-o", "engine_silence=1,engine_wait=0.1,attr_timeout=0,entry_timeout=0")
    models = rig.place / "models"
    handle = os.open(models / "large", os.O_RDONLY)
    dirty = written(models / "dirty")
    calls: list[Callable[[], object]] = [
        lambda: os.pread(handle, 100, 4 << 20),
        lambda: (models / "small").read_bytes(),
        lambda: os.listdir(models),
        lambda: (models / "new").mkdir(),
        lambda: (models / "small").unlink(),
        lambda: os.fsync(dirty),
    ]
    with stopped(served), ThreadPoolExecutor(len(calls)) as pool:
        for failure in [pool.submit(call).exception for call in calls]:
            error = failure(WAIT_S)
            assert isinstance(error, OSError), error
            assert error.errno == errno.EIO
    assert len(os.pread(handle, 100, 4 << 20)) == 100
    os.close(handle)
    os.close(dirty)
    assert served.good("cat", "models/dirty").out == UNSTORED
    assert "does not answer" in rig.log
