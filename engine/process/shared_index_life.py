"""Makes the shared index of an engine as configured, and the keyed index beside it; runs them, and closes them.

Only a serving engine has one; a store opened for one command has none.  If it cannot be made, the start fails when a
path was configured; else the error is logged, and the engine serves without it.

A member of a lake has both once it keeps keys, for clients on its machine (`engine.head.local_keys`).  They name whole
chunks alone, which are those of values: its shards have no entries.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import structlog
import trio

from engine.format.keyed import unpack_value
from engine.format.layouts import Table
from engine.keyed.spaces import list_spaces
from engine.memory.backing import open_backing
from engine.store.store import Store
from engine.tiers.dram_entries import joined
from engine.tiers.keyed_index import KEYED_WATCHED, KeyedIndex
from engine.tiers.owned_table import capacity_allowed
from engine.tiers.shared_index import WATCHED, SharedIndex
from lakefs.errors import LakeError
from lakefs.limits import HOT_INDEX_ENTRIES_MIN
from lakefs.shared_index import keyed_index
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import capacity_for, entries_max, table_bytes

KEYED_INDEX_ENTRIES_MIN: Final = 50_000
"""Room of the smallest keyed index: a table of 4 MiB."""
OFF: Final = "off"
BY_ITSELF: Final = ("auto", "memory")
_log: Final = structlog.get_logger(__name__)


async def run_indexes_of_member(store: Store, setting: str) -> None:
    """Make and run the shared index and the keyed index of a member of a lake, from when it keeps keys on."""
    if setting == OFF:
        return
    await store.keyed.used.wait()
    async with trio.open_nursery() as nursery:
        least = max(KEYED_INDEX_ENTRIES_MIN, 2 * _value_count(store))
        await nursery.start(partial(run_shared_index, store, "memory", 0, least=least))
        await nursery.start(run_keyed_index, store)


async def run_shared_index(
    store: Store,
    setting: str,
    entries: int,
    *,
    least: int = 0,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Make and run the store's shared index; `started` is called once it is in use.

    `entries` 0: it sizes itself, for `least` chunks at first if that is given, else for those of the store.

    If a path was given: ConfigError, StoreLocked, EngineBusy, DiskFailed.  Else an error is logged, and the store runs
    without a shared index.
    """
    if setting == OFF:
        task_status.started()
        return
    try:
        index = await _opened(store, setting, entries, least or _likely_entries(store))
    except LakeError as error:
        if setting not in BY_ITSELF:
            raise
        _log.warning("there is no shared index", reason=error.message)
        task_status.started()
        return
    store.metadata.on_durable_records(WATCHED, index.records_durable)
    store.shared_index = index
    if index.backing.note:
        _log.info("hot_index", backing=index.backing.kind, note=index.backing.note)
    task_status.started()
    await index.run()


async def run_keyed_index(store: Store, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Make and run the table of keys of a store that has a shared index; `started` is called once it is in use.

    Without the native module that clients look keys up with there is none.  If memory is short, that is logged, and
    clients ask for each key.
    """
    shared, keyed = store.shared_index, store.keyed
    if shared is None or not keyed_index.IS_BUILT:
        task_status.started()
        return
    capacity = min(capacity_for(max(KEYED_INDEX_ENTRIES_MIN, _value_count(store))), capacity_allowed())
    try:
        backing = await store.offload.run(open_backing, "memory", table_bytes(capacity))
    except LakeError as error:
        _log.warning("there is no keyed index", reason=error.message)
        task_status.started()
        return
    index = KeyedIndex(
        store.metadata,
        shared.places_of,
        lambda record: keyed.values().is_absent(unpack_value(record)),
        store.offload,
        store.superblock.identity,
        backing,
        SharedTable(backing.memory, capacity),
    )
    index.write_header()

    def close() -> None:
        store.keyed_index = None
        index.close()

    store.leaving.callback(close)
    store.metadata.on_durable_records(KEYED_WATCHED, index.records_durable)  # behind those of the shared index
    store.keyed_index = index
    task_status.started()
    await index.run()


async def _opened(store: Store, setting: str, entries: int, least: int) -> SharedIndex:
    """Open an index that is closed with the store, of `entries`, or of `least` at first."""
    wanted = capacity_for(entries or least)
    capacity = min(wanted, capacity_allowed())
    backing = await store.offload.run(open_backing, setting, table_bytes(capacity))
    index = SharedIndex(
        store.metadata,
        store.chunks.is_quarantined,
        store.offload,
        store.superblock.identity,
        backing,
        SharedTable(backing.memory, capacity),
        is_growing=not entries and not backing.is_kept,
    )

    def close() -> None:
        store.shared_index = None
        index.close()

    store.leaving.callback(close)
    if entries > entries_max(capacity):
        less = f"memory allows {entries_max(capacity)} entries, not {entries}"
        backing.note = "; ".join(filter(None, [less, backing.note]))
    await store.offload.run(index.begin, store.clean_before)
    store.leaving.enter_context(joined(index, store.dram.tier))
    if backing.is_kept:
        store.at_clean_stop.append(index.keep)
    return index


def _likely_entries(store: Store) -> int:
    try:
        return max(HOT_INDEX_ENTRIES_MIN, 2 * store.metadata.record_count(Table.CHUNKS))
    except LakeError:  # a damaged index is rebuilt later; the table grows
        return HOT_INDEX_ENTRIES_MIN


def _value_count(store: Store) -> int:
    with store.metadata.view() as view:
        return sum(space.entries for space in list_spaces(view))
