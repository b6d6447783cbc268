"""The lake's records in a machine's folders: the newest that can be read count, and only those of the lake."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from engine.coordinator.records import CHECKPOINTS_KEY, CheckpointsRecord, NamesCheckpoint, encode
from engine.format.group_parts import FIRST_SHARD
from engine.lake.lake_records import RECORDS_FILE, LakeRecords, lake_records_in, write_lake_records
from lakefs.ids import EMPTY_BLOB, Sequence

LAKE, OTHER = b"L" * 16, b"O" * 16
MADE = CheckpointsRecord((NamesCheckpoint(EMPTY_BLOB, Sequence(7), 1000, 5),))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    return folders


def test_the_newest_records_of_the_lake_are_found(folders: list[Path]) -> None:
    assert lake_records_in(folders, LAKE) is None
    older = LakeRecords(LAKE, 10, {b"lake": b"older"})
    newer = LakeRecords(LAKE, 20, {b"lake": b"newer", CHECKPOINTS_KEY: encode(MADE)})
    write_lake_records(folders[:1], older)
    assert lake_records_in(folders, LAKE) == older
    assert older.checkpoints(FIRST_SHARD) == ()
    write_lake_records(folders[1:2], newer)
    write_lake_records(folders[2:], LakeRecords(OTHER, 30, {}))
    assert lake_records_in(folders, LAKE) == newer
    assert newer.checkpoints(FIRST_SHARD) == MADE.checkpoints
    write_lake_records([*folders, folders[0] / "missing"], older)
    assert lake_records_in(folders, LAKE) == older, "a folder that is not there keeps the others from nothing"


def test_records_that_cannot_be_read_are_passed_over(folders: list[Path]) -> None:
    good = LakeRecords(LAKE, 10, {b"lake": b"good"})
    write_lake_records(folders, LakeRecords(LAKE, 20, {b"lake": b"newer"}))
    write_lake_records(folders[2:], good)
    for folder, change in zip(folders[:2], (flipped, of_a_later_release), strict=True):
        path = folder / RECORDS_FILE
        path.write_bytes(change(path.read_bytes()))
    assert lake_records_in(folders, LAKE) == good


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def of_a_later_release(content: bytes) -> bytes:
    _, *rest = msgspec.msgpack.decode(content[4:])
    body = msgspec.msgpack.encode((2, *rest))
    return crc32c(body).to_bytes(4, "little") + body
