"""Each bug in what a mount, or the engine, decides upon fails one of the checks of several mounts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import pytest

from tests.mount import test_at_once, test_close_to_open as checks, test_two_mounts
from tests.mount.planted_conditions import ENGINE_BUGS, MOUNT_BUGS, lake_with
from tests.mount.shared.ground import SharedMounts, another_mount, shared_mounts, wait_for_folder
from tests.mount.shared.hunt import Way, hunt
from tests.mount.shared.meddler import Meddler
from tests.mount.shared.worker import Worker
from tests.mount.test_close_to_open_faults import appended_once

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]
Check = Callable[[Path, Path], None]
SEQUENCES: Final = 60


class Rig(NamedTuple):
    """One folder on two mounts, the first with the bug; the proxy of that one; and a process on each."""

    here: Path
    there: Path
    workers: list[Worker]
    meddler: Meddler | None = None


class Seen(NamedTuple):
    """The check that sees a bug of a mount, and how the mount is connected."""

    check: Callable[[Rig], None]
    over: str = "unix"


def plain(check: Check) -> Callable[[Rig], None]:
    """Return a check that needs nothing but the folders."""
    return lambda rig: check(rig.here, rig.there)


def _lost_answer(rig: Rig) -> None:
    assert rig.meddler is not None
    appended_once(rig.meddler, rig.here, rig.there, 7, unmade=False)


def _lost_request(rig: Rig) -> None:
    assert rig.meddler is not None
    appended_once(rig.meddler, rig.here, rig.there, 7, unmade=True)


def _folder_is_not_back(rig: Rig) -> None:
    with TemporaryDirectory() as folder:
        test_at_once.folder_is_not_back(rig.workers, checks.both(rig.here, rig.there), Path(folder) / "stop")


SEEN_BY: Final[dict[str, Seen]] = {
    "kept-for-ever": Seen(plain(checks.a_listing_finds_what_was_closed_elsewhere)),
    "confirms-nothing": Seen(plain(checks.what_was_replaced_elsewhere_is_what_is_changed), "tcp"),
    "listing-for-ever": Seen(plain(checks.what_was_made_elsewhere_exists)),
    "no-conditions": Seen(plain(checks.what_was_removed_elsewhere_stays_removed)),
    "no-folder": Seen(_folder_is_not_back),
    "no-node": Seen(plain(checks.what_was_renamed_elsewhere_exists_once)),
    "appends-over": Seen(plain(checks.handles_of_both_append_to_one_file)),
    "appended-twice": Seen(_lost_answer),
    "taken-as-own": Seen(_lost_request),
    "brought-back": Seen(plain(checks.what_was_removed_elsewhere_stays_removed)),
    "ends-in-silence": Seen(plain(checks.what_was_removed_elsewhere_stays_removed)),
}
SEEN_IN_ENGINE: Final[dict[str, Callable[[Rig], None]]] = {
    "engine-ignores-all": plain(checks.handles_of_both_append_to_one_file),
    "engine-ignores-places": _folder_is_not_back,
    "engine-ignores-nodes": plain(checks.handles_of_both_append_to_one_file),
    "folder-stays": plain(checks.a_listing_finds_what_was_closed_elsewhere),
}
FAILURES: Final = (OSError, AssertionError, pytest.fail.Exception)


@pytest.fixture(scope="module")
def mounts() -> Iterator[SharedMounts]:
    """An engine that is right, and mounts of it."""
    with shared_mounts("tcp", mounts=2) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def earlier() -> Iterator[SharedMounts]:
    """An engine that does not check where a name is, and mounts of it."""
    with shared_mounts("unix", engine=lake_with("earlier-engine")) as mounted:
        yield mounted


@contextmanager
def raises() -> Iterator[None]:
    """Context manager: the check in the block fails; what it has left open on mounts is closed."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FAILURES):
        yield
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):
            if "/lake-" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep checks that are to fail from waiting for what does not happen."""
    monkeypatch.setattr(test_two_mounts, "SETTLE_S", 2.0)


def test_every_bug_has_a_check() -> None:
    assert SEEN_BY.keys() == MOUNT_BUGS.keys()
    assert SEEN_IN_ENGINE.keys() == ENGINE_BUGS.keys()


@pytest.mark.parametrize("bug", MOUNT_BUGS)
def test_a_bug_of_a_mount_is_seen(mounts: SharedMounts, bug: str) -> None:
    seen = SEEN_BY[bug]
    with another_mount(mounts, seen.over, bug, lake_with(bug)) as (folder, meddler):
        (folder / bug).mkdir()
        there = mounts.folders[1] / bug
        wait_for_folder(there)
        with raises():
            seen.check(Rig(folder / bug, there, mounts.workers, meddler))


@pytest.mark.parametrize("bug", ENGINE_BUGS)
def test_a_bug_of_the_engine_is_seen(bug: str) -> None:
    with shared_mounts("unix", engine=lake_with(bug)) as mounts:
        here, there = (folder / bug for folder in mounts.folders)
        here.mkdir()
        wait_for_folder(there)
        with raises():
            SEEN_IN_ENGINE[bug](Rig(here, there, mounts.workers))


def test_random_sequences_see_an_engine_that_ignores_conditions() -> None:
    way = Way("unix")
    with shared_mounts("unix", engine=lake_with("engine-ignores-all")) as mounts:
        found = next(filter(None, hunt(range(SEQUENCES), mounts.ground(), way, shortens=False)), None)
    assert found is not None, f"{SEQUENCES} sequences saw nothing"


@pytest.mark.parametrize(
    "check",
    [
        checks.an_append_keeps_what_was_closed_elsewhere,
        checks.an_open_for_writing_finds_what_was_closed_elsewhere,
        checks.a_listing_finds_what_was_closed_elsewhere,
        checks.what_was_made_elsewhere_exists,
        checks.nothing_is_made_in_a_folder_that_is_gone,
        checks.what_was_removed_elsewhere_stays_removed,
        checks.what_was_replaced_elsewhere_is_what_is_changed,
        checks.handles_of_both_append_to_one_file,
    ],
)
def test_a_mount_of_an_earlier_engine_asks_first(earlier: SharedMounts, check: Check) -> None:
    here, there = (folder / check.__name__ for folder in earlier.folders)
    here.mkdir()
    wait_for_folder(there)
    check(here, there)
