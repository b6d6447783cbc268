"""Opens the metadata of a store: recovery in a thread, then `engine.metadata.metadata_store.Metadata`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from engine.format.layouts import StoreIdentity
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.journal.writer import no_reserve
from engine.metadata.metadata_store import Metadata
from engine.metadata.recovery import recover
from lakefs.ports import Clock, Disk, Offload

_log: Final = structlog.get_logger(__name__)


async def open_metadata(
    disk: Disk,
    offload: Offload,
    clock: Clock,
    *,
    identity: StoreIdentity,
    clean_sequence: int | None,
    release_reserve: Callable[[], bool] = no_reserve,
    journal_offload: Offload | None = None,
    index_committed: Callable[[], None] | None = None,
    sizes: MetadataSizes = DEFAULT_SIZES,
    headroom_bytes: int = 0,
) -> Metadata:
    """Recover the metadata of a store whose lock is held, and open it for writing; start `run` next.

    `clean_sequence` is the superblock's; the caller writes a superblock that says "not clean" before it commits.
    `release_reserve` runs in a thread.  `journal_offload` should always have a thread free; default: `offload`.
    Half of `headroom_bytes`, beside `owed_bytes`, is kept for decisions without `grows`.
    `index_committed` runs in a thread after each commit of the index.
    Errors: JournalDamaged, StoreDamaged, StoreUnusable, StoreFull, DiskFailed.
    """
    recovered = await offload.run(
        lambda: recover(
            disk,
            clock,
            identity,
            clean_sequence,
            release_reserve=release_reserve,
            index_committed=index_committed,
            sizes=sizes,
        )
    )
    if recovered.rebuilt_because:
        _log.warning(
            "the index was rebuilt from checkpoint and journal", reason=recovered.rebuilt_because, upto=recovered.end
        )
    return Metadata(
        disk, offload, identity, recovered, release_reserve, journal_offload or offload, sizes, headroom_bytes
    )
