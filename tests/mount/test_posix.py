"""System calls on a mount give what they give on a local file system, or a difference that is documented.

Cases and comparison: `tests.mount.posix` and the modules beside it.  Root only, since users have to be changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.mount import posix_attributes as attributes, posix_content as content, posix_names as names
from tests.mount.model import POLL_S, SETTLE_S
from tests.mount.mounts import LakeMounts, lake
from tests.mount.operations import DOCUMENT
from tests.mount.posix import Case, Posix, Thing, comparing, tree
from tests.mount.posix_known import KNOWN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users"),
]
Family = Callable[[], Iterable[Case]]
FAMILIES: Final[tuple[Family, ...]] = (
    names.opening, names.folders, names.removing, names.renaming, names.links, names.limits,
    attributes.modes, attributes.owners, attributes.set_id_bits, attributes.times, attributes.access,
    attributes.xattrs,
    content.writing, content.lengths, content.mappings, content.locks, content.folder_reading, content.notices,
)  # fmt: skip
EACH: Final = 6
"""One in so many cases is checked on another mount, too."""
_compared: list[Family] = []


@pytest.fixture(scope="module")
def mounted(short_folder: Path) -> Iterator[LakeMounts]:
    """Two mounts that everybody may use."""
    short_folder.chmod(0o755)
    with lake(short_folder, "--allow-other", mounts=2) as mounts:
        yield mounts


@pytest.fixture(scope="module")
def posix(mounted: LakeMounts, short_folder: Path) -> Iterator[Posix]:
    """The first mount beside a local folder."""
    local = short_folder / "local"
    local.mkdir()
    with comparing(mounted.folders[0], local) as compared:
        yield compared


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_system_call_gives_what_it_gives_locally(posix: Posix, family: Family) -> None:
    assert posix.differences(family()) == []
    _compared.append(family)


def test_every_known_difference_is_one(posix: Posix) -> None:
    if len(_compared) < len(FAMILIES):
        pytest.skip("not all cases were compared")
    assert set(KNOWN) - posix.seen == set()


def test_another_mount_shows_the_same_attributes_and_times(mounted: LakeMounts, posix: Posix) -> None:
    if not _compared:
        posix.differences(names.folders())
    for name in sorted(os.listdir(mounted.folders[0]))[::EACH]:
        until = time.monotonic() + SETTLE_S
        while different := _different(*(folder / name for folder in mounted.folders)):
            assert time.monotonic() < until, (name, different)
            time.sleep(POLL_S)


def _different(here: Path, there: Path) -> list[str]:
    ours, theirs = tree(here), tree(there)
    assert ours.keys() == theirs.keys()
    return [
        f"{name}: {thing} there {theirs[name]}" for name, thing in ours.items() if _shown(thing) != _shown(theirs[name])
    ]


def _shown(thing: Thing) -> tuple[object, ...]:
    return (thing.status, thing.times)


def test_known_differences_are_documented() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    assert [known.reason for known in KNOWN if known.reason not in text] == []
