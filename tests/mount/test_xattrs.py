"""Extended attributes where there is no object for them: the list of buckets; and beside a writer of the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.commits import HALF, REST, Sizes
from tests.mount.mounts import LakeMounts

pytestmark = pytest.mark.fuse
NAMES = [
    "user.key",
    "trusted.key",
    "security.key",
    "security.capability",
    "system.posix_acl_access",
    "other.key",
    "key",
]


def errno_of(call: Callable[[], object]) -> int:
    """Return the errno of a call, 0 if it succeeds."""
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_buckets_answers_as_a_folder_without_attributes(mounts: LakeMounts, here: Path, name: str) -> None:
    root = mounts.mounts[0].folder
    assert os.listxattr(root) == os.listxattr(here) == []
    expected = errno_of(lambda: os.getxattr(here, name))
    assert errno_of(lambda: os.getxattr(root, name)) == expected != 0


def test_the_list_of_buckets_takes_no_attributes(mounts: LakeMounts) -> None:
    root = mounts.mounts[0].folder
    assert errno_of(lambda: os.setxattr(root, "user.key", b"value")) == errno.EPERM
    assert errno_of(lambda: os.removexattr(root, "user.key")) == errno.EPERM


def test_attributes_of_a_file_beside_its_writer_commit_nothing_of_it(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    with file.open("xb", buffering=0) as opened:
        opened.write(HALF)
        os.setxattr(file, "user.key", b"value")
        os.listdir(here)
        assert os.getxattr(file, "user.key") == b"value"
        assert os.listxattr(file) == ["user.key"]
        opened.write(REST)
        os.setxattr(opened.fileno(), "user.other", b"value")
        os.removexattr(file, "user.key")
        assert sizes(file) == [0]
    assert sizes(file) == [0, len(HALF + REST)]
    assert os.listxattr(file) == ["user.other"]
