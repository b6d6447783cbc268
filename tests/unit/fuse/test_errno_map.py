"""The mount's table of errnos."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from fuse.errno_map import ERRNO_BY_ERROR, errno_of
from lakefs.errors import ERROR_TABLE, ChunkDamaged, KeyNotFound, StoreFull


def test_every_error_of_the_tree_has_an_errno_and_nothing_else_has() -> None:
    assert set(ERRNO_BY_ERROR) == {row.error for row in ERROR_TABLE}
    assert set(ERRNO_BY_ERROR.values()) <= set(errno.errorcode)


def test_no_error_tells_a_blocking_caller_to_try_again() -> None:
    assert errno.EAGAIN not in ERRNO_BY_ERROR.values()
    assert errno.EINTR not in ERRNO_BY_ERROR.values()


def test_errors_that_applications_act_on_are_what_they_expect() -> None:
    assert errno_of(KeyNotFound("gone")) == errno.ENOENT
    assert errno_of(StoreFull("full")) == errno.ENOSPC
    assert errno_of(ChunkDamaged("rot")) == errno.EIO


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), OSError(errno.ENOENT, "x"), KeyboardInterrupt()])
def test_an_error_that_is_not_of_the_tree_is_an_input_output_error(error: BaseException) -> None:
    assert errno_of(error) == errno.EIO


def test_a_more_special_error_has_the_errno_of_its_class() -> None:
    class ShardNotFound(KeyNotFound):
        """A leaf that is newer than the table."""

    assert errno_of(ShardNotFound("gone")) == errno.ENOENT


def test_the_table_needs_no_fuse_library() -> None:
    probe = "import sys, fuse.errno_map; print('pyfuse3' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
