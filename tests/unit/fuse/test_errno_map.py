"""The mount's table of errnos."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from fuse.errno_map import errno_of
from lakefs.errors import ChunkDamaged, EngineUnreachable, KeyNotFound, SessionLost, StoreFull


def test_errors_that_applications_act_on_are_what_they_expect() -> None:
    assert errno_of(KeyNotFound("gone")) == errno.ENOENT
    assert errno_of(StoreFull("full")) == errno.ENOSPC
    assert errno_of(ChunkDamaged("rot")) == errno.EIO
    assert errno_of(EngineUnreachable("gone")) == errno_of(SessionLost("gone")) == errno.EIO


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
