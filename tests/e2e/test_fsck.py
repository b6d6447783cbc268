"""`lake fsck` as an operator uses it: on a damaged store, beside an engine, and killed in the middle of a repair."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.host.failpoints import REPAIR_POINTS, VARIABLE
from lakefs.client.connect import connect
from tests.e2e.served import LAKE, ROOT, Finished, Served, environment, lake, serving

CONTENTS = {f"bkt/{size}": random.Random(size).randbytes(size) for size in (0, 900, 70_000, 5_000_000)}
LARGE = "bkt/5000000"


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A store after two lives: its checkpoint has groups that no journal file has any more."""
    with TemporaryDirectory(prefix="lake-") as folder:
        with serving(Path(folder)) as served, connect(served.server) as client:
            for name, content in CONTENTS.items():
                client.put(name, content, create_bucket=True)
        data = Path(folder) / "store"
        assert lake("rm", "--data", data, "bkt/900").code == 0
        assert lake("put", "--data", data, "-", "bkt/900", stdin=CONTENTS["bkt/900"]).code == 0
        yield data


@pytest.fixture
def data(whole: Path) -> Iterator[Path]:
    """A copy of it, for a test to damage."""
    with TemporaryDirectory(prefix="lake-") as folder:
        shutil.copytree(whole, Path(folder) / "store", ignore=lambda *_: ["reserve"])
        yield Path(folder) / "store"


@contextmanager
def served(data: Path) -> Iterator[Served]:
    with serving(data.parent) as engine:
        yield engine


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def report(data: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = lake("fsck", "--data", data, "--json", *options)
    found = json.loads(done.out)
    assert isinstance(found, dict)
    assert found["format"] == 1
    return done.code, found


def check_contents(engine: Served) -> None:
    with connect(engine.server) as client:
        for name, content in CONTENTS.items():
            assert client.get(name) == content


def test_a_store_damaged_in_many_places_serves_again_after_one_repair(data: Path) -> None:
    (data / "superblock").unlink()
    checkpoint = only(data / "checkpoints", "*.checkpoint")
    flip(checkpoint, checkpoint.stat().st_size // 2)
    os.truncate(max((data / "journal").glob("*.journal")), 100)
    (data / "journal" / "00000000000000ff.journal.new").write_bytes(b"half")
    large = max((data / "segments").glob("*.large"), key=lambda path: path.stat().st_size)
    flip(large, large.read_bytes().find(CONTENTS[LARGE][:500]))

    refused = lake("serve", "--data", data, "--socket", data.parent / "s", "--admin", "off", "--s3", "off")
    assert refused.code == 1
    assert "lake fsck --data DIR --repair" in refused.err
    before, looked = report(data, "--full")
    assert (before, looked["outcome"], looked["repairs"]) == (1, "damaged", [])
    assert not (data / "superblock").exists(), "who only looks changes nothing"

    shown = lake("fsck", "--data", data, "--full", "--repair")
    assert shown.code == 1, shown
    for told in ("repaired: superblock", "repaired: checkpoints/", "repaired: journal/", f"damage: {LARGE}"):
        assert told in shown.text, shown.text
    for code in ("superblock-missing", "checkpoint-damaged", "file-half-written", "content-chunk-damaged"):
        assert f" [{code}]\n" in shown.text, shown.text
    assert "kept as set-aside/checkpoints." in shown.text
    assert len(list((data / "set-aside").iterdir())) == 2
    again, second = report(data, "--full", "--repair")
    assert (again, second["repairs"]) == (1, [])
    (damaged,) = second["quarantine"]
    assert (damaged["code"], damaged["objects"]) == ("chunk-damaged", [LARGE])
    assert {finding["code"] for finding in second["findings"]} >= {"chunk-quarantined", "content-chunk-damaged"}

    with served(data) as engine:
        assert engine("cat", LARGE).code == 1
        engine.good("put", "-", "bkt/again", stdin=CONTENTS[LARGE])
        check_contents(engine)
    last, clean = report(data, "--full")
    assert (last, clean["outcome"]) == (0, "clean")


def test_beside_an_engine_a_check_goes_through_it_and_a_repair_is_refused(data: Path) -> None:
    with served(data) as engine:
        checked = engine.good("fsck", "--full", "--json")
        assert json.loads(checked.out)["outcome"] == "clean"
        for options in (("--data", data), ("--data", data, "--repair")):
            refused = lake("fsck", "--json", *options)
            assert refused.code == 2, refused
            assert json.loads(refused.out)["outcome"] == "refused"
            assert "open in another process" in json.loads(refused.err)["message"]
        through = engine("fsck", "--repair")
        assert through.code == 2
        assert "stop the engine, and give --data" in through.err
        check_contents(engine)


def test_a_repair_without_a_store_makes_none(tmp_path: Path) -> None:
    refused = lake("fsck", "--data", tmp_path, "--repair")
    assert refused.code == 2, refused
    assert "there is no store" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_what_no_repair_can_tell_is_left_as_it_is_and_said(data: Path) -> None:
    shutil.rmtree(data / "index")
    checkpoint = only(data / "checkpoints", "*.checkpoint")
    flip(checkpoint, checkpoint.stat().st_size // 2)
    spoilt = checkpoint.read_bytes()
    for _ in range(2):
        code, found = report(data, "--repair")
        assert (code, found["outcome"], found["level"], found["repairs"]) == (1, "damaged", "files", [])
        assert {finding["object"] for finding in found["findings"]} >= {"index", f"checkpoints/{checkpoint.name}"}
        codes = {finding["code"] for finding in found["findings"]}
        assert codes == {"index-missing", "checkpoint-damaged", "journal-missing"}
    assert checkpoint.read_bytes() == spoilt
    flip(checkpoint, checkpoint.stat().st_size // 2)  # the file was put back
    code, found = report(data, "--repair")
    assert (code, found["outcome"]) == (3, "repaired")
    with served(data) as engine:
        check_contents(engine)


@pytest.mark.parametrize("point", REPAIR_POINTS)
def test_a_repair_killed_at_a_named_step_is_finished_by_the_next(data: Path, point: str) -> None:
    if point == "repair.index-rebuilt":
        shutil.rmtree(data / "index")
    else:
        checkpoint = only(data / "checkpoints", "*.checkpoint")
        flip(checkpoint, checkpoint.stat().st_size // 2)
        flip(data / "superblock", 40)
    killed = subprocess.run(
        [*LAKE, "fsck", "--data", str(data), "--repair"],
        env=environment() | {VARIABLE: f"{point}:1"},
        cwd=ROOT,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, Finished(killed.returncode, killed.stdout, killed.stderr.decode())
    code, found = report(data, "--repair", "--full")
    assert (code, found["damage"]) in ((3, 0), (0, 0)), found
    code, found = report(data, "--repair")
    assert (code, found["repairs"], found["checked"]["names"]) == (0, [], len(CONTENTS) + 1)
