"""Checkpoints: all tables at one sequence, whole or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine.format.layouts import StoreIdentity, Table
from engine.journal.reader import journal_path, list_journal
from engine.journal.writer import start_journal
from engine.metadata.checkpoint import (
    CheckpointReader,
    checkpoint_path,
    newest_checkpoint,
    read_checkpoint,
    remove_superseded,
    write_checkpoint,
)
from lakefs.errors import DiskFailed, IndexDamaged, StoreDamaged, StoreUnusable
from lakefs.ids import BootId, Sequence
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk

STORE = b"s" * 16
IDENTITY = StoreIdentity(STORE, BootId(b"b" * 16))
Records = dict[Table, list[tuple[bytes, bytes]]]


class Source:
    """Tables in memory, dumped as a snapshot of the index would be."""

    def __init__(self, records: Records, sequence: int = 7) -> None:
        self.applied = Sequence(sequence)
        self._records = records

    def records(self, table: Table, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return (record for record in self._records.get(table, []) if record[0] > after)


def new_disk(seed: int = 0) -> SimDisk:
    disk = SimDisk(seed)
    for folder in ("journal", "checkpoints"):
        disk.make_folder(folder)
    disk.sync_folder("")
    return disk


def some_records(count: int = 500, value_bytes: int = 60) -> Records:
    rng = random.Random(count)
    return {
        table: [(b"%06d" % n, rng.randbytes(rng.randrange(value_bytes))) for n in range(count)]
        for table in (Table.CHUNKS, Table.NAMES, Table.QUARANTINE)
    }


def loaded(reader: CheckpointReader) -> Records:
    found: Records = {}
    for table, key, value in reader.records():
        found.setdefault(table, []).append((key, value))
    reader.close()
    return found


@pytest.mark.parametrize(
    "records",
    [{}, some_records(), some_records(3, 70_000), some_records(30_000, 90), {Table.NODES: [(b"k", bytes(3 << 20))]}],
    ids=["empty", "small", "large values", "many", "very compressible"],
)
def test_a_checkpoint_reads_back_as_it_was_dumped(records: Records) -> None:
    disk = new_disk()
    written = write_checkpoint(disk, IDENTITY, Source(records))
    assert newest_checkpoint(disk) == written
    reader = read_checkpoint(disk, written.path, STORE)
    assert reader.sequence == 7
    assert reader.record_count == sum(map(len, records.values()))
    assert loaded(reader) == records


def test_every_flipped_bit_is_found_before_a_record_is_used() -> None:
    disk = new_disk()
    written = write_checkpoint(disk, IDENTITY, Source(some_records(40)))
    for offset in range(written.file_bytes):
        disk.flip_bit(written.path, offset, offset % 8)
        with pytest.raises((StoreDamaged, StoreUnusable)):
            read_checkpoint(disk, written.path, STORE)
        disk.flip_bit(written.path, offset, offset % 8)
    read_checkpoint(disk, written.path, STORE).close()


def test_every_shortened_checkpoint_is_refused() -> None:
    disk = new_disk()
    written = write_checkpoint(disk, IDENTITY, Source(some_records(40)))
    file = disk.open(written.path)
    for size in range(written.file_bytes - 1, -1, -97):
        file.truncate(size)
        with pytest.raises(StoreDamaged):
            read_checkpoint(disk, written.path, STORE)


def test_a_checkpoint_of_another_store_or_under_another_name_is_refused() -> None:
    disk = new_disk()
    written = write_checkpoint(disk, IDENTITY, Source({}))
    with pytest.raises(StoreUnusable):
        read_checkpoint(disk, written.path, b"o" * 16)
    disk.rename(written.path, checkpoint_path(Sequence(9)))
    with pytest.raises(StoreUnusable):
        read_checkpoint(disk, checkpoint_path(Sequence(9)), STORE)


def test_a_damaged_index_gives_no_checkpoint_and_the_old_one_stays() -> None:
    class Damaged(Source):
        def records(self, table: Table, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
            yield from super().records(table, after)
            if table is Table.NAMES:
                raise IndexDamaged("a record does not match its checksum")

    disk = new_disk()
    old = write_checkpoint(disk, IDENTITY, Source(some_records(), sequence=3))
    with pytest.raises(IndexDamaged):
        write_checkpoint(disk, IDENTITY, Damaged(some_records(), sequence=5))
    assert newest_checkpoint(disk) == old
    assert disk.list_folder("checkpoints") == [old.path.rpartition("/")[2]]


@pytest.mark.parametrize("operation", ["pwrite", "sync_data", "rename", "sync_folder"])
def test_a_checkpoint_that_cannot_be_written_can_be_tried_again(operation: str) -> None:
    disk = new_disk()
    disk.fail_next(operation, DiskFailed("once"), path="checkpoints")
    with pytest.raises(DiskFailed):
        write_checkpoint(disk, IDENTITY, Source(some_records()))
    written = write_checkpoint(disk, IDENTITY, Source(some_records()))
    assert loaded(read_checkpoint(disk, written.path, STORE)) == some_records()


@pytest.mark.parametrize("seed", range(10))
def test_a_power_loss_at_any_operation_leaves_the_old_or_the_new_checkpoint(seed: int) -> None:
    for crash_at in range(1, 12):
        disk = new_disk(seed)
        write_checkpoint(disk, IDENTITY, Source(some_records(), sequence=3))
        disk.crash_at = disk.operation_count + crash_at
        with suppress(SimCrashed):
            written = write_checkpoint(disk, IDENTITY, Source(some_records(), sequence=5))
            remove_superseded(disk, STORE, written)
        disk = disk.crash()
        found = newest_checkpoint(disk)
        assert found is not None
        assert found.sequence in (3, 5)
        assert loaded(read_checkpoint(disk, found.path, STORE)) == some_records()


def test_only_files_whose_groups_are_all_in_the_checkpoint_are_removed() -> None:
    disk = new_disk()
    journal = start_journal(disk, IDENTITY, SimClock(), end_sequence=Sequence(0), carried=None, files=())
    for first in (4, 9, 12):
        journal.begin_file(Sequence(first))
    write_checkpoint(disk, IDENTITY, Source({}, sequence=2))
    written = write_checkpoint(disk, IDENTITY, Source({}, sequence=9))
    remove_superseded(disk, STORE, written)
    assert disk.list_folder("checkpoints") == ["0000000000000009.checkpoint"]
    # The file from 9 on ends with group 11: it holds 10 and 11.
    assert [file.first_sequence for file in list_journal(disk, STORE)] == [9, 12]
    remove_superseded(disk, STORE, write_checkpoint(disk, IDENTITY, Source({}, sequence=50)))
    assert [file.path for file in list_journal(disk, STORE)] == [journal_path(Sequence(12))]
