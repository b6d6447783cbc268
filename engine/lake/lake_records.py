"""`lake.records` in each data folder of a machine: what finds a checkpoint of the names without any names.

                 bytes
    crc32c       4        of what follows, little-endian
    records      ...      msgpack: (version, lake, time in ns, {key: value})

The keys are the coordinator's: the lake, its members, its tables and generation, the number of its names shards, and
the checkpoints of each (`engine.lake.names_checkpoints`).  Each machine of a lake with etcd writes them when they have
changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
import trio
from crc32c import crc32c

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lasting import entries_of
from engine.coordinator.records import (
    CHECKPOINTS,
    EPOCH_KEY,
    EPOCHS,
    GENERATION_KEY,
    LAKE_KEY,
    MEMBERS,
    SHARDS_KEY,
    CheckpointsRecord,
    NamesCheckpoint,
    ShardsRecord,
    checkpoints_key,
    decode,
)
from engine.host.local_disk import LocalDisk
from engine.host.small_file import replace_small_file
from engine.lake.machine import give_to_owner
from engine.lake.plan import LakePlan
from lakefs.errors import LakeError
from lakefs.ids import NamesShard
from lakefs.ports import Clock, Offload

RECORDS_FILE: Final = "lake.records"
RECORDS_BYTES_MAX: Final = 64 << 20
"""Some hundred bytes a member, and four tables of at most 1 MiB."""
KEEP_EVERY_S: Final = 30.0
_VERSION: Final = 1
_CRC_BYTES: Final = 4
_SINGLE: Final = (LAKE_KEY, EPOCH_KEY, GENERATION_KEY, SHARDS_KEY)
_RANGES: Final = (MEMBERS, EPOCHS, CHECKPOINTS)
_log: Final = structlog.get_logger(__name__)


class LakeRecords(NamedTuple):
    """The coordinator's records, as a machine kept them at a time."""

    lake: bytes
    said_ns: int
    records: Mapping[bytes, bytes]

    @property
    def shards(self) -> int:
        """The number of names shards.  StoreUnusable for a later release's record."""
        value = self.records.get(SHARDS_KEY)
        return 1 if value is None else decode(ShardsRecord, value).count

    def checkpoints(self, shard: NamesShard) -> tuple[NamesCheckpoint, ...]:
        """Return the checkpoints of the names of a shard, the newest first.  StoreUnusable for a later release's."""
        value = self.records.get(checkpoints_key(shard))
        return () if value is None else decode(CheckpointsRecord, value).checkpoints


@asynccontextmanager
async def keeping_lake_records(
    plan: LakePlan, coordinator: Coordinator, offload: Offload, clock: Clock
) -> AsyncIterator[None]:
    """Let this machine's folders have the lake's records during the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_lake_records, plan, coordinator, offload, clock)
        yield
        nursery.cancel_scope.cancel()


async def keep_lake_records(plan: LakePlan, coordinator: Coordinator, offload: Offload, clock: Clock) -> None:
    """Let this machine's folders have the lake's records as they are, until cancelled."""
    written: dict[bytes, bytes] = {}
    while True:
        try:
            found = await _read(coordinator)
            if {**found, GENERATION_KEY: b""} != {**written, GENERATION_KEY: b""}:
                records = LakeRecords(plan.lake_id, clock.wall_ns(), found)
                folders = [folder for folder in plan.folders if plan.is_wanted(folder)]
                await offload.run(write_lake_records, folders, records)
                written = found
        except LakeError as error:
            _log.debug("the lake's records were not kept", reason=error.message)
        await trio.sleep(min(KEEP_EVERY_S, plan.names_checkpoint_s or KEEP_EVERY_S))


async def _read(coordinator: Coordinator) -> dict[bytes, bytes]:
    found = {}
    for key in _SINGLE:
        if (entry := (await coordinator.get(key)).entry) is not None:
            found[key] = entry.value
    for begin, end in _RANGES:
        found.update({entry.key: entry.value async for entry in entries_of(coordinator, begin, end)})
    return found


def write_lake_records(folders: Sequence[Path], records: LakeRecords) -> None:
    """Let folders have records; one that cannot be written to is logged.  Blocks."""
    body = msgspec.msgpack.encode((_VERSION, *records))
    content = crc32c(body).to_bytes(_CRC_BYTES, "little") + body
    for folder in folders:
        try:
            replace_small_file(LocalDisk(folder), RECORDS_FILE, content)
            give_to_owner(folder, RECORDS_FILE)
        except (LakeError, OSError) as error:
            _log.error("the lake's records could not be written", folder=str(folder), reason=str(error))


def lake_records_in(folders: Sequence[Path], lake: bytes) -> LakeRecords | None:
    """Return the newest records of a lake in some folders; None if none has any that can be read.  Blocks."""
    found: list[LakeRecords] = []
    for folder in folders:
        try:
            records = _records_in(folder)
        except (LakeError, OSError, ValueError) as error:  # msgspec's are of that kind
            _log.error("the lake's records are not used", folder=str(folder), reason=str(error))
            continue
        if records is not None and records.lake == lake:
            found.append(records)
    return max(found, key=lambda records: records.said_ns, default=None)


def _records_in(folder: Path) -> LakeRecords | None:
    disk = LocalDisk(folder)
    if not disk.exists(RECORDS_FILE):
        return None
    with closing(disk.open(RECORDS_FILE, read_only=True)) as file:
        content = bytearray(min(file.size(), RECORDS_BYTES_MAX))
        file.pread_into(memoryview(content), 0)
    body = bytes(content[_CRC_BYTES:])
    if crc32c(body) != int.from_bytes(content[:_CRC_BYTES], "little"):
        raise ValueError("it is damaged")
    version, lake, said_ns, records = msgspec.msgpack.decode(body, type=tuple[int, bytes, int, dict[bytes, bytes]])
    if version != _VERSION:
        raise ValueError(f"it has version {version}: it is of a later release")
    return LakeRecords(lake, said_ns, records)
