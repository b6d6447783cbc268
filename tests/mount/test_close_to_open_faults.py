"""Close-to-open while answers, notices and engines are lost, and with more buckets than could be watched one by one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from lakefs import connect
from lakefs.wire.messages import (
    Commit,
    DeleteNames,
    MakeFolder,
    MakeSymlink,
    PutObjects,
    RemoveFolder,
    Rename,
    SetAttributes,
    Watch,
)
from tests.lengths import repeated
from tests.mount.place import pattern
from tests.mount.shared import load
from tests.mount.shared.ground import OVER, SharedMounts, shared_mounts
from tests.mount.shared.hunt import LATE_S
from tests.mount.shared.meddler import Meddler
from tests.mount.shared.worker import together
from tests.mount.test_close_to_open import CHECKS, MAKES, Check, append, beside, both, seen, write
from tests.mount.test_two_mounts import eventually
from tests.mount.tools import catch_up, content

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]
CHANGES: Final = (Commit, DeleteNames, MakeFolder, MakeSymlink, PutObjects, RemoveFolder, Rename, SetAttributes)
BUCKETS: Final = 20
"""More than a connection may have watches."""
MANY_BUCKETS: Final = int(os.environ.get("MOUNT_BUCKETS", "0")) or repeated(200, 1000)
ONE_WAY: Final = repeated(OVER[:1], OVER)
"""Over TCP, lost answers are tried everywhere; many buckets and late notices, which repeat that, in `make torture`."""
LONG: Final = 200_000
"""Bytes that are stored before the commit, not with it."""


@pytest.fixture(scope="module", params=OVER)
def mounts(request: pytest.FixtureRequest) -> Iterator[SharedMounts]:
    """Two mounts, each with a proxy before the engine that can lose answers."""
    with shared_mounts(request.param, meddled=True) as mounted:
        yield mounted


# --- lost answers ----------------------------------------------------------------------------------------


def _appended(here: Path) -> None:
    append(here / "log", b"second\n")
    assert (here / "log").read_bytes() == b"first\nsecond\n"


def _appended_much(here: Path) -> None:
    append(here / "long", content(LONG, 2))
    assert (here / "long").read_bytes() == content(LONG, 1) + content(LONG, 2)


def _overwritten(here: Path) -> None:
    write(here / "log", b"other\n")
    assert (here / "log").read_bytes() == b"other\n"


def _made(here: Path) -> None:
    write(here / "new", b"new\n")
    assert (here / "new").read_bytes() == b"new\n"


def _renamed(here: Path) -> None:
    os.rename(here / "log", here / "renamed")
    assert not (here / "log").exists()
    assert (here / "renamed").read_bytes() == b"first\n"


def _renamed_over(here: Path) -> None:
    os.rename(here / "log", here / "long")
    assert not (here / "log").exists()
    assert (here / "long").read_bytes() == b"first\n"


def _removed(here: Path) -> None:
    os.unlink(here / "log")
    assert not (here / "log").exists()


def _folder_removed(here: Path) -> None:
    os.rmdir(here / "folder")
    assert not (here / "folder").exists()


def _mode_changed(here: Path) -> None:
    os.chmod(here / "log", 0o600)
    assert (here / "log").stat().st_mode & 0o777 == 0o600


SENT_AGAIN: Final = (
    _appended, _appended_much, _overwritten, _made, _renamed, _renamed_over, _removed, _folder_removed, _mode_changed,
)  # fmt: skip


@pytest.mark.parametrize("unmade", [False, True], ids=["answer", "request"])
@pytest.mark.parametrize("change", SENT_AGAIN, ids=lambda change: change.__name__)
def test_a_change_whose_answer_or_request_is_lost_is_made_once(
    mounts: SharedMounts, here: Path, there: Path, change: Callable[[Path], None], unmade: bool
) -> None:
    (here / "folder").mkdir()
    (here / "log").write_bytes(b"first\n")
    (here / "long").write_bytes(content(LONG, 1))
    mounts.meddlers[0].lose(*CHANGES, unmade=unmade)
    change(here)
    assert mounts.meddlers[0].lost.is_set(), "no answer was lost"
    catch_up(here, there)


@pytest.mark.parametrize("kind", ["mkdir", "O_EXCL", "symlink"])
def test_what_was_made_and_whose_answer_was_lost_does_not_count_as_made_by_another(
    mounts: SharedMounts, here: Path, there: Path, kind: str
) -> None:
    mounts.meddlers[0].lose(*CHANGES)
    failed = _failure(lambda: MAKES[kind](here / "name"))
    assert failed in (0, errno.EIO)  # then it may or may not have been made
    assert mounts.meddlers[0].lost.is_set(), "no answer was lost"
    eventually(lambda: os.path.lexists(there / "name") and os.path.lexists(here / "name"), "it was not made")
    catch_up(here, there)


def appended_once(meddler: Meddler, here: Path, there: Path, size: int, *, unmade: bool) -> None:
    """Append while the answer, or the request, is lost, and another mount appends before it is sent again."""
    mine, theirs = content(size, 1), content(size, 2)
    (here / "log").write_bytes(b"first\n")
    catch_up(here, there)
    meddler.lose(Commit, PutObjects, refuse=True, unmade=unmade)
    closed: list[int] = []
    closing = threading.Thread(target=lambda: closed.append(_failure(lambda: append(here / "log", mine))))
    closing.start()
    try:
        assert meddler.lost.wait(30), "nothing was lost"
        append(there / "log", theirs)
    finally:
        meddler.accept()
        closing.join()
    assert closed == [0]
    expected = b"first\n" + (theirs + mine if unmade else mine + theirs)
    assert (there / "log").read_bytes() == expected
    assert (here / "log").read_bytes() == expected


@pytest.mark.parametrize("unmade", [False, True], ids=["answer", "request"])
@pytest.mark.parametrize("size", [7, LONG])
def test_what_is_sent_again_is_appended_once_also_when_another_mount_appends_before(
    mounts: SharedMounts, here: Path, there: Path, size: int, unmade: bool
) -> None:
    appended_once(mounts.meddlers[0], here, there, size, unmade=unmade)


def test_a_file_that_is_removed_elsewhere_before_its_commit_is_sent_again_does_not_come_back(
    mounts: SharedMounts, here: Path, there: Path
) -> None:
    (here / "file").write_bytes(b"first")
    catch_up(here, there)
    meddler = mounts.meddlers[0]
    descriptor = os.open(here / "file", os.O_WRONLY)
    os.write(descriptor, b"other")
    meddler.lose(Commit, PutObjects, refuse=True)
    closed: list[int] = []
    closing = threading.Thread(target=lambda: closed.append(_failure(lambda: os.close(descriptor))))
    closing.start()
    try:
        assert meddler.lost.wait(30), "no answer was lost"
        os.unlink(there / "file")
    finally:
        meddler.accept()
        closing.join()
    assert closed[0] in (0, errno.ESTALE)
    assert not os.path.lexists(there / "file")
    eventually(lambda: os.listdir(here) == [], "it came back")


def _failure(call: Callable[[], object]) -> int:
    """Return the errno of a call, 0 for none."""
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


# --- late notices ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ONE_WAY)
def late_mounts(request: pytest.FixtureRequest) -> Iterator[SharedMounts]:
    """Two mounts that get each notice at a random time up to two seconds late."""
    with shared_mounts(request.param, meddled=True, late_s=LATE_S) as mounted:
        yield mounted


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_late_notices_change_nothing(late_mounts: SharedMounts, check: Check) -> None:
    here, there = (folder / check.__name__ for folder in late_mounts.folders)
    here.mkdir()
    check(here, there)


def test_what_is_done_at_once_holds_with_late_notices(late_mounts: SharedMounts) -> None:
    folders = [folder / "at once" for folder in late_mounts.folders]
    folders[0].mkdir()
    load.prepare_mixed(folders[0])
    catch_up(*folders)
    assert together(late_mounts.workers, load.mixed, both(*folders), 7, 150) == [[], []]
    done = together(late_mounts.workers, load.noted, both(*folders))
    catch_up(*folders)
    assert load.mixed_wrong(folders[1], done) == []


def test_notices_that_are_lost_with_their_connection_are_made_up_for(late_mounts: SharedMounts) -> None:
    here, there = (folder / "lost" for folder in late_mounts.folders)
    here.mkdir()
    for number in range(5):
        assert not (here / f"name {number}").exists()
        (there / f"name {number}").write_bytes(b"x")
        late_mounts.meddlers[0].cut()
        eventually((here / f"name {number}").exists, "a name is not found")
        assert (here / f"name {number}").read_bytes() == b"x"


def test_a_close_is_seen_elsewhere_also_beside_a_handle_of_a_mount_that_was_killed() -> None:
    with shared_mounts("unix") as mounts:
        here, there = mounts.folders
        (there / "log").write_bytes(b"first\n")
        seen(here / "log")
        dead = os.open(here / "log", os.O_WRONLY | os.O_APPEND)
        mounts.kill(0)
        try:
            for number in range(50):
                append(here / "log", b"%d\n" % number)
                assert (there / "log").read_bytes().endswith(b"\n%d\n" % number), f"round {number}"
        finally:
            _failure(lambda: os.close(dead))


# --- engines that stop -----------------------------------------------------------------------------------


def test_an_open_of_a_name_that_always_exists_outlasts_engines(tmp_path: Path) -> None:
    with shared_mounts("unix", "-o", "engine_wait=30") as mounts:
        here, there = mounts.folders
        (here / "file").write_bytes(pattern(1, load.SAVED_BYTES))
        catch_up(here, there)
        os.sync()
        reader, writer = mounts.workers
        with beside(reader, load.read_beside, both(here, there), tmp_path / "stop") as results:
            writer.start(load.overwrite, 1, both(here, there), "save", 300)
            for end in (mounts.served.stop, mounts.served.kill) * 2:
                threading.Event().wait(0.5)
                end()
                mounts.served.start()
            assert writer.result() == []
        [(opened, wrong)] = results
        assert wrong == [], f"{len(wrong)} of {opened}"


# --- buckets ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ONE_WAY)
def many(request: pytest.FixtureRequest) -> Iterator[SharedMounts]:
    """Two mounts that have looked into twenty buckets."""
    with shared_mounts(request.param) as mounted:
        make_buckets(mounted, BUCKETS)
        yield mounted


def make_buckets(mounts: SharedMounts, count: int) -> None:
    """Make buckets, and look into each on both mounts."""
    with connect(mounts.served.server) as client:
        for number in range(count):
            client.create_bucket(f"bucket-{number}")
    for mount in mounts.mounts:
        for number in range(count):
            assert not (mount.folder / f"bucket-{number}" / "name").exists()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_last_of_many_buckets_is_as_the_first(many: SharedMounts, check: Check) -> None:
    here, there = (mount.folder / f"bucket-{BUCKETS - 1}" / check.__name__ for mount in many.mounts)
    here.mkdir()
    check(here, there)


def test_one_watch_serves_all_buckets() -> None:
    with shared_mounts("unix", meddled=True) as mounts:
        make_buckets(mounts, MANY_BUCKETS)
        for number in (0, 16, MANY_BUCKETS // 2, MANY_BUCKETS - 1):
            here, there = (mount.folder / f"bucket-{number}" for mount in mounts.mounts)
            assert not (here / "name").exists()
            (there / "name").write_bytes(b"x")
            eventually((here / "name").exists, f"a name in bucket {number} is not found")
        assert [meddler.passed[Watch.OP] for meddler in mounts.meddlers] == [1, 1]
