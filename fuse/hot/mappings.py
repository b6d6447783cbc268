"""Mappings that outlive the handles of a hot file: its open file is released when the last that may write has ended."""

from __future__ import annotations

from typing import Final

import structlog
import trio

from fuse.hot.hot_file import HotFile
from fuse.state.mount import Mount
from fuse.state.open_content import OpenContent

_LOOK_S: Final = 0.5
"""Time between looks at such a file."""
_log: Final = structlog.get_logger(__name__)


async def release_when_unmapped(mount: Mount, file: OpenContent, hot: HotFile) -> None:
    """Wait for the end of the mappings, then release the file, unless the mount has done that.  No error leaves it."""
    while hot.is_mapped_for_writing():  # noqa: ASYNC110 - no event tells its end
        await trio.sleep(_LOOK_S)
    if file in mount.mapped:
        mount.mapped.discard(file)
        try:
            await file.release(stores=True)
        except Exception:  # noqa: BLE001 - nothing waits for it, and it must not end the mount
            _log.exception("a file could not be closed after its mapping")
