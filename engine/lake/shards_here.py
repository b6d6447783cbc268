"""The names shards of a lake as they lie in one machine's folders, and the note in each of the time it is of.

Each shard's names have the coordinator's record of the lake's charge (`engine.coordinator.moving`): in the first shard
it is the table's own, and in the others a note that repeats it.  While the names are at an etcd the notes say that they
have left for it; without an etcd they are equal.

Rules kept here:
- Where a lake has no etcd, all of its shards are here, or none is served: what only a missing shard names would
  be garbage for gc.
- Shards are of one time: one that was put back from another is refused.
- The first change of names that begin again without their log is that of the note: so they follow no log any more
  (`engine.lake.names_replica`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from engine.coordinator.coordinator import Put
from engine.coordinator.moving import charge_of
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.records import CHARGE_KEY, ChargeRecord, MemberRecord, encode
from engine.host.clock import SystemClock
from engine.lake.folders import NAMES_FOLDER, holds_names, names_folder, shards_in
from engine.lake.plan import LakePlan
from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction
from lakefs.errors import StoreUnusable
from lakefs.ids import NamesShard

NODE_BITS: Final = 40
"""Names of one shard over its life: 10^12."""


def shards_with_names(plan: LakePlan) -> list[NamesShard]:
    """Return the shards of which this machine has names, in order.  Blocks."""
    found = {shard for folder in plan.folders for shard in shards_in(folder) if holds_names(folder, shard)}
    return sorted(found)


def other_shards(count: int) -> Iterable[NamesShard]:
    """Return the shards behind the first one, of so many."""
    return map(NamesShard, range(1, count))


def refuse_missing(plan: LakePlan, count: int) -> None:
    """Raise StoreUnusable if one of so many shards is not here, naming it.  Blocks."""
    here = shards_with_names(plan)
    for shard in other_shards(count):
        if shard not in here:
            raise StoreUnusable(
                f"the names of this lake are in {count} shards, and those of shard {shard} are in none of these "
                f"folders; give all --data folders of the lake, or bring the devices back that have "
                f"{NAMES_FOLDER}.{shard}",
                subject=f"{NAMES_FOLDER}.{shard}",
            )


async def noted_in(metadata: Metadata) -> ChargeRecord | None:
    """Return the note in a shard's names; None before the first term of one that was added."""
    table = NamesCoordinator(metadata, SystemClock())
    try:
        return await charge_of(table)
    finally:
        table.close()


async def note(metadata: Metadata, shard: NamesShard, charge: ChargeRecord) -> None:
    """Let the names of a shard say of which time they are; durable on return, and safe to repeat.

    Nothing else changes them meanwhile.  Those of a shard that was added and had no term yet begin their numbers.
    """
    table = NamesCoordinator(metadata, SystemClock())
    try:
        found = await charge_of(table)
        if found is None:
            await begin_numbers(metadata, shard)
        if found != charge:
            await table.transact([], [Put(CHARGE_KEY, encode(charge))])
    finally:
        table.close()


async def refuse_other_note(metadata: Metadata, charge: ChargeRecord | None, shard: NamesShard) -> None:
    """Raise StoreUnusable unless the names of a shard are of the same time as those of the first one."""
    if await noted_in(metadata) != charge:
        raise StoreUnusable(
            f"the names of shard {shard} in these folders are of another time than those of shard 0: bring back the "
            f"{NAMES_FOLDER}.{shard} that was served with them",
            subject=f"{NAMES_FOLDER}.{shard}",
        )


async def begin_numbers(metadata: Metadata, shard: NamesShard) -> None:
    """Let numbers of nodes of a shard begin at its number << NODE_BITS; durable on return, and safe to repeat."""

    def decide(txn: Transaction) -> None:
        first = txn.new_node_ids(1)
        if first < shard << NODE_BITS:
            txn.new_node_ids((shard << NODE_BITS) - first - 1)

    _, sequence = await metadata.commit(decide)
    await metadata.wait_durable(sequence)


def hosts_of(members: Iterable[MemberRecord]) -> dict[str, str]:
    """Return the host of each machine, as the addresses of its members have it."""
    found = {}
    for member in members:
        for address in member.addresses:
            if address.startswith("tcp://"):
                found[member.domains[1]] = address.removeprefix("tcp://").rpartition(":")[0]
    return found


def how_to_copy(shard: NamesShard, machine: str | None, hosts: Mapping[str, str]) -> str:
    """Return words for what an operator does who wants a replica of a shard here; `machine`: one that has it."""
    where = "a machine that has one" if machine is None else hosts.get(machine, f"machine {machine}")
    return (
        f"stop lake serve at {where}, copy {names_folder(Path(), shard)} from each data folder there that has it into "
        "one here, and try again with"
    )
