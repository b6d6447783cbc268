"""Checks of what native code answers: each passes on a mount without a bug, and fails on the same mount with one.

And mounts on a machine that has no native module, or an older libfuse.
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from fuse.native import layer
from lakefs import connect
from lakefs.limits import GRANULE_BYTES, MIB, PAGE_BYTES
from tests.mount.mounts import LakeMounts, lake
from tests.mount.planted_layer import BUGS, NOT_BUILT, PlantedLayer, lake_with
from tests.mount.test_native import read_past_cache
from tests.mount.test_native_writes import until_full
from tests.mount.test_planted_mounts import what_was_written_shows_to_every_reader
from tests.mount.tools import spoil

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.skipif(not layer.IS_BUILT, reason="the native module is not built"),
]
STAGING_BYTES: Final = 24 * MIB
_numbers = itertools.count()


def damage_is_an_error(mounts: LakeMounts, size: int, *, was_read: bool) -> None:
    """Damage in a chunk that native threads read, in the granules of the read; `was_read`: by a read before, too."""
    content, name = os.urandom(2 * MIB + 4321), f"damaged{next(_numbers)}"
    with connect(mounts.served.server) as client:
        client.put(f"bucket/{name}", content)
    descriptor = os.open(mounts.folders[0] / name, os.O_RDONLY | os.O_DIRECT)
    for at in (0, 0, MIB, MIB) if was_read else (0, 0):
        assert read_past_cache(descriptor, at, size) == content[at : at + size]
    spoil(mounts.served.data, content[MIB : MIB + 64])
    with pytest.raises(OSError, match="Input/output"):
        read_past_cache(descriptor, MIB, size)
    os.close(descriptor)


def a_write_shows_to_readers(mounts: LakeMounts) -> None:
    with connect(mounts.served.server) as client:
        what_was_written_shows_to_every_reader(mounts, client, f"written{next(_numbers)}")


def the_limit_of_staged_bytes_is_exact(mounts: LakeMounts) -> None:
    assert until_full(mounts.folders[0] / f"full{next(_numbers)}", MIB) == (STAGING_BYTES, errno.ENOSPC)


def what_is_appended_is_in_the_file(mounts: LakeMounts) -> None:
    path, expected = mounts.folders[0] / f"appended{next(_numbers)}", os.urandom(50_000)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for at in range(0, len(expected), 1000):
        assert os.pwrite(descriptor, expected[at : at + 1000], at) == 1000
    os.close(descriptor)
    assert path.read_bytes() == expected


Check = Callable[[LakeMounts], None]
SEEN_BY: Final[dict[str, Check]] = {
    "four-granules-unchecked": partial(damage_is_an_error, size=MIB, was_read=False),
    "granule-unchecked": partial(damage_is_an_error, size=GRANULE_BYTES, was_read=False),
    "summed-granule-unchecked": partial(damage_is_an_error, size=PAGE_BYTES, was_read=False),
    "pages-unchecked": partial(damage_is_an_error, size=PAGE_BYTES, was_read=True),
    "content-not-ended": a_write_shows_to_readers,
    "append-unbounded": the_limit_of_staged_bytes_is_exact,
    "append-not-counted": what_is_appended_is_in_the_file,
}


@pytest.fixture(scope="module")
def planted_layer(tmp_path_factory: pytest.TempPathFactory) -> PlantedLayer:
    """The native module with all bugs."""
    try:
        return PlantedLayer(tmp_path_factory.mktemp("layer"))
    except FileNotFoundError as error:
        pytest.skip(f"there is no {error.filename} here")
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the native module does not build: {error.stderr.decode()}")


@pytest.fixture(scope="module")
def mounts(planted_layer: PlantedLayer) -> Iterator[LakeMounts]:
    """A mount with that module, and without files in memory."""
    options = ("--hot-memory", "0", "-o", f"append_forced,staging_size={STAGING_BYTES}")
    with (
        TemporaryDirectory(prefix="lake-", dir="/var/tmp") as path,
        lake(Path(path), *options, program=planted_layer.program, any_way=False) as mounted,
    ):
        yield mounted


def test_every_bug_has_a_check() -> None:
    assert SEEN_BY.keys() == BUGS.keys() - {"older-libfuse"}


@pytest.mark.parametrize("bug", SEEN_BY)
def test_a_planted_bug_is_seen(mounts: LakeMounts, planted_layer: PlantedLayer, bug: str) -> None:
    check = SEEN_BY[bug]
    check(mounts)
    with planted_layer.planted(bug), pytest.raises((AssertionError, pytest.fail.Exception)):
        check(mounts)
    check(mounts)


def test_an_older_libfuse_is_a_mount_without_the_layer_which_says_why(planted_layer: PlantedLayer) -> None:
    with planted_layer.planted("older-libfuse"):
        is_answered_in_python(planted_layer.program, "libfuse 3.13 or later is needed")


def test_a_module_that_is_not_built_is_a_mount_without_the_layer_which_says_why() -> None:
    is_answered_in_python(lake_with(NOT_BUILT), "the native module is not built")


def is_answered_in_python(program: Sequence[str], reason: str) -> None:
    """Read and write on a mount of that program; its log has the reason in one line for each consequence."""
    content = os.urandom(2 * MIB)
    with (
        TemporaryDirectory(prefix="lake-", dir="/var/tmp") as path,
        lake(Path(path), "-o", "append_forced,hot_forced", program=program, any_way=False) as mounts,
    ):
        (mounts.folders[0] / "file").write_bytes(content)
        for _ in range(3):
            assert (mounts.folders[0] / "file").read_bytes() == content
        assert mounts.mounts[0].end() == 0
        log = mounts.mounts[0].log.read_text()
    [line] = [line for line in log.splitlines() if "every request is answered in Python" in line]
    assert reason in line
    [line] = [line for line in log.splitlines() if "no hot files" in line]
    assert reason in line
