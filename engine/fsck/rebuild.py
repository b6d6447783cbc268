"""`lake fsck --rebuild`: rebuild a store's index from its checkpoint and journal, with the store closed.

The store's lock is held throughout.  Payloads are neither read nor changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.metadata.recovery import rebuild_store
from engine.superblock.superblock import open_store, write_superblock

_log: Final = structlog.get_logger(__name__)


def rebuild(data: Path, *, accept_loss: bool = False) -> dict[str, Any]:
    """Rebuild the index of the store in a folder; returns the report, JSON-able.  Blocks.

    Raises StoreLocked while an engine has the store; StoreUnusable if there is none; JournalDamaged with the place.
    With `accept_loss`, everything from the damage on is given up instead, and the report says from where.
    """
    disk, clock = LocalDisk(data), SystemClock()
    opened = open_store(disk, clock, create=False)
    try:
        for warning in opened.warnings:
            _log.warning(warning)
        superblock = opened.superblock
        report = rebuild_store(disk, clock, superblock.identity, superblock.clean_sequence, accept_loss=accept_loss)
        if report.lost_from:
            # The journal ends before the clean stop that the superblock notes: that note is no longer true.
            write_superblock(disk, replace(superblock, clean_sequence=None))
    finally:
        opened.lock.close()
    return report.as_dict()
