"""The index is kept whole: verified behind start-up, and whenever a read met damage; rebuilt where it is not.

What cannot be answered meanwhile is an error, never a false "not found"; nothing is freed before the walk has ended.
"""

from __future__ import annotations

from typing import Protocol

import structlog
import trio

from engine.metadata import Metadata
from lakefs.errors import IndexDamaged, LakeError

_log = structlog.get_logger()


class IndexedStore(Protocol):
    """What of a store this is about; `engine.store.Store` says what each is."""

    metadata: Metadata
    index_verified: bool
    index_suspect: trio.Event
    index_looked_at: trio.Event
    index_damage: LakeError | None


async def keep_index_whole(store: IndexedStore) -> None:
    """Verify the index behind start-up, and whenever a read met damage in it; rebuild it on a mismatch."""
    while True:
        store.index_suspect = trio.Event()
        try:
            await store.metadata.verify_index()
        except IndexDamaged as error:
            _log.error("the index is damaged and is being rebuilt from the journal", error=error.message)
            await _rebuild_index(store)
        else:
            store.index_verified = True
            store.index_damage = None
        store.index_looked_at.set()
        await store.index_suspect.wait()
        store.index_looked_at = trio.Event()
        store.index_verified = False


async def _rebuild_index(store: IndexedStore) -> None:
    store.index_damage = None
    try:
        await store.metadata.rebuild_online()
    except LakeError as error:
        store.index_damage = error
        _log.error("the index cannot be rebuilt; what it cannot answer stays an error", error=error.message)
    else:
        store.index_verified = True
        _log.warning("the index has been rebuilt")
