"""Room for the metadata: growth is refused while there is still room for removals and for the next checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.format.layouts import Table
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.metadata.metadata_store import Metadata
from lakefs.errors import StoreFull
from lakefs.limits import KIB, MIB, PAGE_BYTES
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import contents, opened, put, run, wait_applied

SMALL = MetadataSizes(journal_file=MIB, journal_fill=64 * KIB, checkpoint_journal=MIB)
RECORD_BYTES = 300


async def grow(metadata: Metadata, number: int) -> None:
    """Add one record, as a request for a name does."""
    key = number.to_bytes(8, "big")
    _, sequence = await metadata.commit(lambda txn: txn.insert(Table.NAMES, key, key * (RECORD_BYTES // 8)), grows=True)
    await metadata.wait_durable(sequence)


def test_what_grows_is_refused_before_what_removes_lacks_room() -> None:
    async def body() -> None:
        disk = SimDisk(capacity_bytes=4 * MIB)
        async with opened(disk, sizes=SMALL, headroom_bytes=256 * KIB) as metadata:
            stored = 0
            with pytest.raises(StoreFull, match=r"lake.gc"):
                while True:
                    await grow(metadata, stored)
                    stored += 1
            assert stored > 100
            assert disk.free_bytes() > metadata.owed_bytes()
            with pytest.raises(StoreFull):
                await grow(metadata, stored)
            for number in range(stored):
                await put(metadata, (Table.NAMES, number.to_bytes(8, "big"), None))
            assert metadata.failed is None
            await wait_applied(metadata)
            await metadata.checkpoint()
            await grow(metadata, stored)
        async with opened(disk, sizes=SMALL) as metadata:
            assert len(contents(metadata)) == 1

    run(body)


def test_a_checkpoint_takes_no_more_than_was_left_for_it() -> None:
    async def body() -> None:
        disk = SimDisk()
        async with opened(disk, sizes=SMALL) as metadata:
            number = 0
            for count in (1, 40, 400):
                for _ in range(count):
                    await grow(metadata, number)
                    number += 1
                await wait_applied(metadata)
                owed, free = metadata.owed_bytes(), disk.free_bytes()
                await metadata.checkpoint()
                assert free - disk.free_bytes() <= owed

    run(body)


def test_a_small_disk_has_a_small_journal() -> None:
    assert DEFAULT_SIZES.fitted(4 << 40) == DEFAULT_SIZES
    small = DEFAULT_SIZES.fitted(64 * MIB)
    assert small == replace(DEFAULT_SIZES, journal_file=2 * MIB, journal_fill=256 * KIB, checkpoint_journal=2 * MIB)
    assert DEFAULT_SIZES.fitted(0).journal_fill % PAGE_BYTES == 0
    assert DEFAULT_SIZES.fitted(0).journal_fill > 0
