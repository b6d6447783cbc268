"""The coordinator's table in a replica of the names takes charge of a lake whose etcd is lost for ever.

                the table
    1.          LEFT        what the leader has repeated               (`engine.coordinator.repeating`)
    2.          MOVING      as a new incarnation, with a turn above the etcd's
    3.          MOVING      all partitions are dirty
    4.          SERVES      the next ring epoch and generation, and a walk from the beginning

The last seconds of the etcd may not have been repeated, and members know them.  So:

- The generation goes on far above what the etcd can have reached: gc frees nothing by a number that was used before.
- The newest table is made once more, as an epoch far above: members refuse a table that is older than theirs, and each
  epoch is one table.  What lies where a lost table wanted it is found by the walk, which asks all members.
- Notes of dirty partitions may be lost: so all are dirty.
- The turn is above that of the etcd, which is refused when it returns (`engine.coordinator.moving`).

A crash before 4 leaves a table that is not in charge; another try goes on.  A replica that was changed here follows no
log of before: its table has another incarnation (`engine.lake.names_replica`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec

from engine.coordinator.coordinator import Coordinator, Delete, HasValue, Operation, Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.lasting import batches
from engine.coordinator.moving import charge_of, refuse_other_lake
from engine.coordinator.records import (
    CHARGE_KEY,
    EPOCH_KEY,
    GENERATION_KEY,
    REPEATED_KEY,
    SHARDS_KEY,
    WALK_KEY,
    Charge,
    ChargeRecord,
    EpochRecord,
    GenerationRecord,
    RepeatedRecord,
    ShardsChargeRecord,
    WalkRecord,
    decode,
    encode,
    epoch_key,
)
from lakefs.cluster.table_format import pack, unpack
from lakefs.errors import EngineBusy, StoreUnusable
from lakefs.ids import GcGeneration, Partition, RingEpoch, new_id16

EPOCHS_SKIPPED: Final = 1 << 10
"""Tables follow a change of members, at most four before they were walked; a second is repeated late at most."""
GENERATIONS_SKIPPED: Final = 1 << 20
"""A cycle takes seconds, so even a lake that repeated nothing for months used fewer."""
_TURNS: Final = 2
"""A table that was being left when its etcd was lost knows of a turn less than that etcd may have."""


async def repeated_in(table: Coordinator) -> RepeatedRecord | None:
    """Return what a table says of the records that were repeated into it; None if none were."""
    entry = (await table.get(REPEATED_KEY)).entry
    return None if entry is None else decode(RepeatedRecord, entry.value)


async def rescue(
    table: Coordinator, lake: bytes, place: str, newer: Mapping[bytes, bytes] = MappingProxyType({})
) -> ChargeRecord:
    """Let a table be in charge of its lake, durably; safe to repeat.  `place`: words for where it is.

    `newer`: records that are known to be newer than those of the table; keys that it has besides stay.
    StoreUnusable when the table has no records of the lake; PreconditionFailed for another lake's.
    """
    found = await charge_of(table)
    if found is None:
        raise StoreUnusable(f"{place} holds nothing of this lake", subject=place)
    refuse_other_lake(found, lake, place)
    if found.state is Charge.SERVES:
        return found
    state = LakeState(table)
    tables = await state.epoch_tables()
    if not tables or (found.state is Charge.LEFT and await repeated_in(table) is None):
        raise StoreUnusable(
            f"{place} has no copy of the lake's records: no release that makes one has led these names", subject=place
        )
    has_shards = SHARDS_KEY in newer or (await table.get(SHARDS_KEY)).entry is not None
    kind = ShardsChargeRecord if has_shards else ChargeRecord
    moving = kind(lake, Charge.MOVING, found.turn + _TURNS, new_id16())
    await _change(table, found, moving, [])
    for batch in batches(Put(key, value) for key, value in newer.items()):
        await table.transact([HasValue(CHARGE_KEY, encode(moving))], batch)
    generation = GcGeneration(await state.generation() + GENERATIONS_SKIPPED)
    tables = await state.epoch_tables()
    newest, packed = max(tables.items())
    newest_table = unpack(packed)
    await state.note_dirty(map(Partition, range(1 << newest_table.partition_bits)), newest)
    epoch = RingEpoch(max(newest, await state.epoch()) + EPOCHS_SKIPPED)
    served = msgspec.structs.replace(moving, state=Charge.SERVES)
    changes: list[Operation] = [
        Put(epoch_key(epoch), pack(replace(newest_table, ring_epoch=epoch))),
        Put(EPOCH_KEY, encode(EpochRecord(epoch))),
        Put(GENERATION_KEY, encode(GenerationRecord(generation))),
        Put(WALK_KEY, encode(WalkRecord())),
        Delete(REPEATED_KEY),
    ]
    await _change(table, moving, served, changes)
    return served


async def _change(table: Coordinator, known: ChargeRecord, record: ChargeRecord, changes: list[Operation]) -> None:
    compare = HasValue(CHARGE_KEY, encode(known))
    if not (await table.transact([compare], [Put(CHARGE_KEY, encode(record)), *changes])).succeeded:
        raise EngineBusy("another process changes the coordinator's table")
