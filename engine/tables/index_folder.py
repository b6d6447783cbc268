"""The folder of an index: removed, and put in the place of another.  LMDB opens its files itself, so `os` is used here.

All functions block.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from engine.host.failpoints import reached
from lakefs.errors import DiskFailed


def remove_index(path: Path) -> None:
    """Remove an index folder that is not open; does nothing when there is none."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskFailed(f"cannot remove {path}: {error.strerror}", subject=str(path)) from error


def replace_index(new: Path, path: Path) -> Path:
    """Put the folder `new` in the place of `path`; returns the old folder's new name, for the caller to remove.

    Open environments keep their files.  A crash between the renames leaves no index, and the next start rebuilds it.
    """
    old = path.with_name(path.name + ".old")
    remove_index(old)
    try:
        if path.exists():
            os.rename(path, old)
            reached("index.put-aside")
        os.rename(new, path)
        reached("index.put-in-place")
        sync_path(path.parent)
    except OSError as error:
        raise DiskFailed(f"cannot move {new} to {path}: {error.strerror}", subject=str(path)) from error
    return old


def sync_path(path: Path) -> None:
    """Sync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
