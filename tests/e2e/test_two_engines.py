"""One store, one engine, even when the lock file, the folder or the journal are changed under it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cli.main import run
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.journal.reader import find_end, list_journal
from engine.journal.writer import start_journal
from engine.superblock.superblock import read_superblock
from lakefs.client.connect import connect
from lakefs.ids import BootId, Sequence, new_id16
from tests.e2e.served import Served, lake, serving

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    """One engine for all tests; each test leaves a whole store in its place."""
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder)) as served:
        yield served


@pytest.fixture
def here(engine: Served, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys, engine.server)


@dataclass
class Here:
    """Runs commands in this process, beside the engine's."""

    capsys: pytest.CaptureFixture[str]
    server: str

    def __call__(self, *arguments: str | Path) -> tuple[int, str]:
        """Run a command; return exit code and both outputs."""
        self.capsys.readouterr()
        where = [] if "--data" in arguments else ["--server", self.server]
        code = run([*map(str, arguments), *where])
        return code, "".join(self.capsys.readouterr())


def begin_as_another_engine_would(data: Path) -> None:
    """Begin a journal file without the lock, like an engine that believes this one was killed."""
    disk = LocalDisk(data)
    found = read_superblock(disk)
    other = replace(found, boot_id=BootId(new_id16()), boot_before=found.boot_id).identity
    files = list_journal(disk, found.store_id)
    end = find_end(disk, files, Sequence(0))
    start_journal(disk, other, SystemClock(), end_sequence=end.sequence, carried=end.last, files=end.files).close()


def test_a_store_whose_lock_file_was_removed_stays_locked(engine: Served, here: Here) -> None:
    data = engine.data
    with connect(engine.server) as client:
        client.put("bkt/x", b"content", create_bucket=True)
    (data / "lock").unlink()
    second = lake("serve", "--data", data, "--socket", data.parent / "t", "--admin", "off", "--s3", "off")
    assert second.code == 75, second
    assert "open in another process" in second.err
    for code, arguments in (
        (75, ["put", __file__, "bkt/y"]),
        (75, ["ls"]),
        (75, ["gc"]),
        (75, ["scrub"]),
        (75, ["status"]),
        (75, ["key", "create"]),
        (2, ["fsck"]),
        (2, ["fsck", "--repair"]),
        (2, ["fsck", "--rebuild"]),
    ):
        got, told = here(*arguments, "--data", data)
        assert (got, "open in another process" in told) == (code, True), (arguments, got, told)
    assert not (data / "lock").exists(), "a refused process has made a lock file"
    code, told = here("status")
    assert (code, "/lock was removed or replaced" in told) == (74, True), told
    assert here("put", __file__, "bkt/late")[0] == 74
    assert engine.stop() == 0
    engine.start()
    with connect(engine.server) as client:
        assert client.get("bkt/x") == b"content"
        assert [entry.key for entry in client.ls("bkt")] == ["x"]
        assert client.fsck(full=True)["damage"] == 0


def test_an_engine_that_finds_another_ones_journal_file_stops_writing(engine: Served, here: Here) -> None:
    acknowledged = [f"bkt/{number}" for number in range(5)]
    with connect(engine.server) as client:
        for name in acknowledged:
            client.put(name, name.encode(), create_bucket=True)
        begin_as_another_engine_would(engine.data)
        code, told = here("put", __file__, "bkt/late")
        assert (code, "another process has begun" in told) == (74, True), told
        code, told = here("status")
        assert (code, "read-only" in told, "another process has begun" in told) == (74, True, True), told
        assert client.get("bkt/4") == b"bkt/4"
    engine.stop()
    code, told = here("fsck", "--data", engine.data)
    assert (code, "two engines had the store open" in told) == (0, True), told
    engine.start()
    with connect(engine.server) as client:
        assert [client.get(name) for name in acknowledged] == [name.encode() for name in acknowledged]
        assert client.fsck(full=True)["damage"] == 0


def test_an_engine_whose_folder_was_moved_stops_writing_and_leaves_what_is_there_alone(
    engine: Served, here: Here, tmp_path: Path
) -> None:
    data, moved = engine.data, engine.data.with_name("moved")
    with connect(engine.server) as client:
        client.put("bkt/x", b"before", create_bucket=True)
    data.rename(moved)
    code, told = here("put", __file__, "bkt/late")
    assert (code, "moved, removed or replaced" in told) == (74, True), told
    assert not data.exists()
    code, told = here("status")
    assert (code, "moved, removed or replaced" in told) == (74, True), told
    assert here("ls", "--data", moved)[0] == 75
    assert here("put", __file__, "other/y", "--data", data)[0] == 0
    shutil.copytree(data, tmp_path / "as it was")
    assert here("put", __file__, "bkt/later")[0] == 74
    assert engine.stop() == 0
    assert files_in(data) == files_in(tmp_path / "as it was")
    shutil.rmtree(data)
    moved.rename(data)
    engine.start()
    with connect(engine.server) as client:
        assert client.get("bkt/x") == b"before"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
