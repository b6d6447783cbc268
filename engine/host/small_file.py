"""Replaces a small file of a disk as a whole: superblock, token, list of copies, record of a machine.

    NAME.new written and synced  --  renamed to NAME  --  folder synced

Rules kept here:
- A reader, and a start after a crash, finds the old content or the new one.  A rest of an earlier attempt is removed.
- The caller holds what keeps two processes from replacing one file at once.
"""

from __future__ import annotations

import os
from contextlib import closing

from engine.host.failpoints import reached
from lakefs.ports import Disk


def replace_small_file(disk: Disk, path: str, content: bytes, *, points: str = "") -> None:
    """Let a file have this content; durable on return.  After an error it is the old one or the new one.

    `points` names the failpoints: POINTS.synced, POINTS.renamed and POINTS.durable; empty: there are none.  Blocks.
    DiskFailed, StoreFull.
    """
    temporary = f"{path}.new"
    if disk.exists(temporary):
        disk.unlink(temporary)
    with closing(disk.open(temporary, create=True)) as file:
        file.pwrite(content, 0)
        file.sync_data()
    if points:
        reached(f"{points}.synced")
    disk.rename(temporary, path)
    if points:
        reached(f"{points}.renamed")
    disk.sync_folder(os.path.dirname(path))
    if points:
        reached(f"{points}.durable")
