"""Handles: what the kernel has open on a mount, and the end of all of them when the mount has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog
import trio
from pyfuse3 import RequestContext

from fuse.hot.hot_file import HotFile
from fuse.hot.hot_set import HotSet
from fuse.open_file import OpenFile
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from fuse.state.open_content import OpenContent
from lakefs.errors import LakeError

_log: Final = structlog.get_logger(__name__)


class Handle(NamedTuple):
    """One handle that the kernel has open."""

    inode: Inode
    """The kernel's; the file may be another inode's (`fuse.names.opening`)."""
    file: OpenFile
    flags: int
    opener: RequestContext
    hot: HotFile | None
    """The file in memory that the kernel passes it through to."""


async def release_all(handles: Sequence[Handle], mount: Mount, hot: HotSet | None, within_s: float) -> None:
    """Close all open files when the mount has ended; files not stored within `within_s` stay staged."""
    for handle in handles:
        if hot is not None and handle.hot is not None:
            hot.closed(handle.hot, handle.flags)
    files: list[OpenContent] = [handle.file for handle in handles]
    files += mount.mapped
    mount.mapped.clear()
    with trio.move_on_after(within_s) as limit:
        for opened in files:
            try:
                await opened.release()
            except LakeError as error:
                _log.error("an open file could not be given back", error=error.message)
    if limit.cancelled_caught:
        _log.warning("the mount had to end before everything was stored", after_s=mount.options.stop_wait_s)
        for opened in files:
            opened.abandon()
