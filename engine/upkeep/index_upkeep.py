"""Verifies the index after start-up and whenever a read met damage; rebuilds it from checkpoint and journal if damaged.

Until it is rebuilt, a request that needs a damaged record fails with an error, never with a false "not found".  gc
frees nothing before the check has ended, nor while a damaged index cannot be rebuilt.
"""

from __future__ import annotations

from typing import Any, Protocol

import structlog
import trio

from engine.metadata.metadata_store import Metadata
from lakefs.errors import IndexDamaged, LakeError

_log = structlog.get_logger()


class IndexedStore(Protocol):
    """The part of a store that is used here; `engine.store.store.Store` documents the fields."""

    metadata: Metadata
    index_verified: bool
    index_looked_at: trio.Event
    index_damage: LakeError | None


async def keep_index_whole(store: IndexedStore) -> None:
    """Verify the index after start-up, and whenever a read met damage in it; rebuild it on a mismatch."""
    is_suspect = False
    while True:
        store.metadata.index_suspect = trio.Event()
        try:
            await store.metadata.verify_index()
        except IndexDamaged as error:
            _log.error(
                "the index is damaged: the engine rebuilds it now from checkpoint and journal; what needs the "
                "damaged records fails until then, all else is served",
                error=error.message,
            )
            await _rebuild_index(store)
        else:
            store.index_verified = True
            store.index_damage = None
            if is_suspect:
                _log.warning("every record of the index was checked, because a read failed: it is whole")
        store.index_looked_at.set()
        await store.metadata.index_suspect.wait()
        is_suspect = True
        store.index_looked_at = trio.Event()
        store.index_verified = False


def index_state(store: IndexedStore) -> dict[str, Any]:
    """Return the state of the index's upkeep, for people and scripts; JSON-able."""
    progress = store.metadata.index_progress
    if progress.doing:
        return {"state": progress.doing, "progress": progress.text}
    if store.index_damage is not None:
        damage = store.index_damage
        return {"state": "damaged", "code": damage.finding.code, "reason": damage.message}
    return {"state": "verified" if store.index_verified else "being checked"}


def with_what_happens(store: IndexedStore, error: IndexDamaged) -> IndexDamaged:
    """Have the index checked because a read failed; returns the error with the engine's next step and the remedy."""
    store.metadata.index_suspect.set()
    if store.index_damage is None:
        what_next = (
            "the engine checks its index now, and rebuilds it where it is damaged: try again when "
            "`lake status` says index.state verified; if it fails again then, run: lake fsck"
        )
    elif store.index_damage.message in error.message:
        return error
    else:
        what_next = f"the index cannot be rebuilt: {store.index_damage.message}"
    return IndexDamaged(f"{error.message}; {what_next}", subject=error.subject)


async def _rebuild_index(store: IndexedStore) -> None:
    store.index_damage = None
    begun = trio.current_time()
    try:
        await store.metadata.rebuild_online()
    except LakeError as error:
        store.index_damage = error
        _log.error(
            "the index cannot be rebuilt; what it cannot answer stays an error, and nothing is freed; "
            "stop the engine, and run: lake fsck --data DIR --repair",
            error=error.message,
        )
    else:
        store.index_verified = True
        _log.warning("the index has been rebuilt", seconds=round(trio.current_time() - begun, 1))
