"""The names of a lake on this machine: opened in its folders, and, with an etcd, announced as the ones that lead.

`open_leading_names` is the place where a lake with etcd opens its names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.names_coordinator import NamesCoordinator, open_names_coordinator
from engine.coordinator.names_leader import open_leading
from engine.coordinator.records import LeaderRecord
from engine.host.clock import SystemClock
from engine.lake.plan import LakePlan
from engine.process.mirrored_names import LocalNames
from engine.process.names_place import open_local_names
from engine.store.keyed_store import KeyedStore

TABLE: Final = "the table in the lake's names"
"""Words for the coordinator of a lake without etcd."""


def open_names(plan: LakePlan) -> AbstractAsyncContextManager[LocalNames]:
    """Open the names in this machine's folders (`open_local_names`)."""
    return open_local_names(
        plan.names_folders(),
        lake_id=plan.lake_id,
        protection_losses=plan.protection.parity,
        is_new=plan.is_new,
        without=plan.without,
        restored=plan.restored,
        is_usable=plan.may_have_names,
    )


def open_table(store: KeyedStore) -> AbstractAsyncContextManager[NamesCoordinator]:
    """Open the coordinator's table in the names (`open_names_coordinator`)."""
    return open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features)


@asynccontextmanager
async def open_leading_names(plan: LakePlan, coordinator: Coordinator) -> AsyncIterator[LocalNames]:
    """Open the names of a lake with etcd, and say there that they lead, until the block ends.  Errors of `open_names`.

    The names are a single replica, which no other one follows.
    """
    async with open_names(plan) as names:
        record = LeaderRecord(names.store.superblock.store_id, plan.machine.machine, plan.names_listen)
        async with open_leading(coordinator, SystemClock(), record):
            yield names
