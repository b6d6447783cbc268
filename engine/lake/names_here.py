"""The names of a lake on this machine, opened in its folders, and the coordinator's table in them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Final

from engine.coordinator.names_coordinator import NamesCoordinator, open_names_coordinator
from engine.format.group_parts import FIRST_SHARD
from engine.lake.plan import LakePlan
from engine.process.mirrored_names import LocalNames
from engine.process.names_place import open_local_names
from engine.store.keyed_store import KeyedStore
from engine.store.metadata_life import Leading, always_leading
from engine.store.names_opening import BeginAnew
from lakefs.ids import NamesShard

TABLE: Final = "the table in the lake's names"
"""Words for the coordinator of a lake without etcd."""


def open_names(
    plan: LakePlan,
    leading: Leading = always_leading,
    begin_anew: BeginAnew | None = None,
    *,
    shard: NamesShard = FIRST_SHARD,
    is_new: bool | None = None,
) -> AbstractAsyncContextManager[LocalNames]:
    """Open the names of a shard in this machine's folders (`open_local_names`).

    `is_new`: make them if there are none; None: if the lake is new.  Where the machine has joined the lake, they are
    one replica of several, and have one copy here.
    """
    return open_local_names(
        plan.names_folders(shard),
        lake_id=plan.lake_id,
        protection_losses=0 if plan.machine.names_at else plan.protection.parity,
        is_new=plan.is_new if is_new is None else is_new,
        without=plan.without,
        restored=plan.restored,
        is_usable=plan.may_have_names,
        shard=shard,
        leading=leading,
        begin_anew=begin_anew,
    )


def open_table(store: KeyedStore) -> AbstractAsyncContextManager[NamesCoordinator]:
    """Open the coordinator's table in the names (`open_names_coordinator`)."""
    return open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features)
