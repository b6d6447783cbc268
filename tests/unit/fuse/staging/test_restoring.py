"""Restoring a leftover to the store: as it was written, over what it was written over, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from fuse.staging.folder import Base, StagingFolder
from fuse.staging.leftovers import Leftover, claimed, find_leftovers, forget, is_in_use
from fuse.staging.restore import Standing, restore_to_store, standing
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import (
    BucketNotFound,
    EngineUnreachable,
    KeyNotFound,
    LocalFileError,
    PreconditionFailed,
    StoreLocked,
)
from lakefs.names import Name
from lakefs.steps.steps import Step, Steps
from lakefs.wire.messages import ObjectStat

LIMIT = 1 << 30
NAME = Name("bkt", "file")


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """Open a store with a bucket."""
    (tmp_path / "store").mkdir(mode=0o700)
    with open_lake(tmp_path / "store") as opened:
        opened.create_bucket("bkt")
        yield opened


def left(folder: Path, base: ObjectStat | None, *pieces: tuple[int, bytes], name: str = str(NAME)) -> Leftover:
    """Return the leftover of a mount that has written these pieces over stored content."""
    staging = StagingFolder(folder / "staging", LIMIT)
    file = staging.new(name, None if base is None else Base(base.size_bytes, base.node, base.blob))
    for offset, piece in pieces:
        file.write(offset, piece)
    staging.close()
    return find_leftovers(folder / "staging")[-1]


def put(lake: Lake, content: bytes) -> ObjectStat:
    lake.put(str(NAME), content)
    return lake.stat(str(NAME))


def how(lake: Lake, leftover: Leftover) -> Standing:
    driver = driver_of(lake)
    return standing(leftover, driver.run(driver.steps.stat_many([NAME]))[0])


def test_an_edit_is_stored_over_what_it_was_made_on_and_keeps_what_the_name_carries(lake: Lake, tmp_path: Path) -> None:
    lake.put(str(NAME), b"0123456789", content_type="text/x")
    leftover = left(tmp_path, lake.stat(str(NAME)), (3, b"abc"), (12, b"end"))
    assert how(lake, leftover) is Standing.READY
    driver = driver_of(lake)
    stored = driver.run(restore_to_store(driver.steps, leftover, NAME))
    assert lake.get(str(NAME)) == b"012abc6789\0\0end"
    assert (stored.content_type, stored.mtime_ns) == ("text/x", leftover.time_ns)


def test_the_same_content_put_again_is_what_it_was_made_on(lake: Lake, tmp_path: Path) -> None:
    leftover = left(tmp_path, put(lake, b"0123456789"), (0, b"X"))
    put(lake, b"other")
    assert how(lake, leftover) is Standing.INCOMPLETE
    put(lake, b"0123456789")
    assert how(lake, leftover) is Standing.READY
    driver = driver_of(lake)
    driver.run(restore_to_store(driver.steps, leftover, NAME))
    assert lake.get(str(NAME)) == b"X123456789"


def test_a_new_file_is_its_owner_s_alone_and_its_bucket_is_made_again(lake: Lake, tmp_path: Path) -> None:
    leftover = left(tmp_path, None, (0, b"new"), name="gone/file")
    driver = driver_of(lake)
    with pytest.raises(BucketNotFound, match="create_bucket"):
        driver.run(restore_to_store(driver.steps, leftover, Name("typo", "file")))
    stored = driver.run(restore_to_store(driver.steps, leftover, Name("gone", "file")))
    assert (lake.get("gone/file"), stored.mode) == (b"new", 0o600)


def test_an_empty_object_in_the_place_of_a_new_file_is_replaced_and_another_is_not(lake: Lake, tmp_path: Path) -> None:
    leftover = left(tmp_path, None, (0, b"new"))
    put(lake, b"x")
    assert how(lake, leftover) is Standing.CHANGED
    driver = driver_of(lake)
    with pytest.raises(PreconditionFailed, match="has other content"):
        driver.run(restore_to_store(driver.steps, leftover, NAME))
    put(lake, b"")
    assert how(lake, leftover) is Standing.READY
    driver.run(restore_to_store(driver.steps, leftover, NAME))
    assert lake.get(str(NAME)) == b"new"


def test_a_name_that_changes_at_the_last_moment_is_left_alone(lake: Lake, tmp_path: Path) -> None:
    leftover = left(tmp_path, put(lake, b"base"), (0, b"staged"))

    driver = driver_of(lake)

    def meanwhile(steps: Steps[ObjectStat]) -> Steps[ObjectStat]:
        """Take the same steps, with another client's put after the first answer."""
        answer: object = None
        first = True
        while True:
            try:
                step: Step = steps.send(answer)
            except StopIteration as end:
                found: ObjectStat = end.value
                return found
            answer = yield step
            if first and answer is not None and hasattr(answer, "message"):
                first = False
                yield from driver.steps.put(str(NAME), b"newer")

    with pytest.raises(PreconditionFailed):
        driver.run(meanwhile(restore_to_store(driver.steps, leftover, NAME)))
    assert lake.get(str(NAME)) == b"newer"


def test_what_the_engine_stored_after_all_is_not_stored_again(lake: Lake, tmp_path: Path) -> None:
    leftover = left(tmp_path, put(lake, b"0123456789"), (3, b"abc"))
    stored = put(lake, b"012abc6789")
    assert how(lake, leftover) is Standing.INCOMPLETE
    driver = driver_of(lake)
    assert driver.run(restore_to_store(driver.steps, leftover, NAME)).node == stored.node
    for other in (b"012abX6789", b"012abc678", b"012abc67890"):
        put(lake, other)
        with pytest.raises(PreconditionFailed):
            driver.run(restore_to_store(driver.steps, leftover, NAME))


def test_bytes_that_are_nowhere_are_missed_or_zeros(lake: Lake, tmp_path: Path) -> None:
    leftover = left(tmp_path, put(lake, b"0123456789"), (3, b"abc"))
    lake.remove(str(NAME))
    assert how(lake, leftover) is Standing.INCOMPLETE
    driver = driver_of(lake)
    with pytest.raises(KeyNotFound, match="3 of 10 bytes are here"):
        driver.run(restore_to_store(driver.steps, leftover, NAME))
    assert not lake.exists(str(NAME))
    driver.run(restore_to_store(driver.steps, leftover, NAME, zeros=True))
    assert lake.get(str(NAME)) == b"\0\0\0abc\0\0\0\0"


def test_nothing_is_known_without_an_engine_nor_without_a_name(tmp_path: Path) -> None:
    leftover = left(tmp_path, None, (0, b"new"))
    assert standing(leftover, EngineUnreachable("gone")) is Standing.UNKNOWN
    [sidecar] = (tmp_path / "staging").glob("*.json")
    sidecar.write_bytes(b"{")
    [leftover] = find_leftovers(tmp_path / "staging")
    assert standing(leftover, KeyNotFound("nothing")) is Standing.UNNAMED


def test_a_file_of_a_running_mount_is_nobody_else_s_until_the_mount_gives_it_up(tmp_path: Path) -> None:
    staging = StagingFolder(tmp_path / "staging", LIMIT)
    file = staging.new(str(NAME), None)
    file.write(0, b"x")
    [leftover] = find_leftovers(tmp_path / "staging")
    assert is_in_use(leftover)
    with pytest.raises(StoreLocked, match="bkt/file is open in a running mount"), claimed(leftover):
        pass
    file.keep_for_recovery()
    with claimed(leftover):
        assert is_in_use(leftover)
    assert not is_in_use(leftover)
    forget(leftover)
    with pytest.raises(LocalFileError), claimed(leftover):
        pass
    staging.close()
