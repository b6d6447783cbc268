"""Private memory that upkeep takes for a moment: it must be small, since the heap keeps what it once grew by."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.format.layouts import StoreIdentity, Table
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.host.zeros import zeros
from engine.journal.writer import start_journal
from engine.metadata.checkpoint import read_checkpoint, write_checkpoint
from lakefs.ids import BootId, Sequence
from lakefs.limits import JOURNAL_FILL_BYTES, MIB

IDENTITY = StoreIdentity(b"s" * 16, BootId(b"b" * 16))
RECORDS = 30_000


class Records:
    """A table that makes its records when they are asked for."""

    applied = Sequence(7)

    def records(self, table: Table, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        if table is Table.CHUNKS:
            yield from ((b"%036d" % number, b"%060d" % number) for number in range(RECORDS))


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that Python's objects took at once during a call."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_checkpoint_takes_little_memory_however_many_records_there_are(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_folder("checkpoints")
    assert peak_bytes(lambda: write_checkpoint(disk, IDENTITY, Records())) < MIB
    [name] = disk.list_folder("checkpoints")
    reader = read_checkpoint(disk, f"checkpoints/{name}", IDENTITY.store_id)
    assert list(reader.records()) == [(Table.CHUNKS, *record) for record in Records().records(Table.CHUNKS)]
    reader.close()


def test_the_journal_writes_zeros_ahead_without_memory_for_them(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_folder("journal")
    journal = start_journal(disk, IDENTITY, SystemClock(), end_sequence=Sequence(0), carried=None, files=())
    assert peak_bytes(lambda: journal.append_blocking(Sequence(1), b"", 0)) < MIB
    [name] = disk.list_folder("journal")
    assert disk.stat(f"journal/{name}").size_bytes == JOURNAL_FILL_BYTES
    journal.close()


@pytest.mark.parametrize("count", [0, 1, MIB - 1, MIB, MIB + 1, 4 * MIB])
def test_zeros_are_as_many_as_were_asked_for(count: int) -> None:
    assert b"".join(zeros(count)) == bytes(count)
