"""`sync` by the methods of the clients: which side is which, what comes back, and what is raised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.errors import BucketNotFound, InvalidArgument, LocalFileError, SourceChanged
from lakefs.sync.report import Done, SyncOutcome
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, run
from tests.contract.test_lake_odd_arguments import outcome_of
from tests.contract.test_lake_trees import FILES, found_in, make


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """A lake in this process, with the bucket `bkt`."""
    with open_lake(tmp_path / "store") as opened:
        opened.create_bucket("bkt")
        yield opened


def test_a_folder_a_prefix_and_another_are_kept_in_step(kind: Kind) -> None:
    async def body(driven: Driven) -> None:
        lake: Any = driven.lake
        source, back = make(driven.engine.folder / "source"), driven.engine.folder / "back"
        moved: list[int] = []
        first = await outcome_of(
            lake, lambda lake: lake.sync(source, "bkt/a", progress=lambda done, _: moved.append(done))
        )
        assert (first.names[Done.COPIED], first.is_in_step) == (len(FILES), True)
        assert sum(moved) == sum(map(len, FILES.values()))
        again = await outcome_of(lake, lambda lake: lake.sync(source, "lake://bkt/a/"))
        assert (again.unchanged, again.names[Done.COPIED]) == (len(FILES), 0)
        (source / "a.bin").unlink()
        await outcome_of(lake, lambda lake: lake.sync(source, "bkt/a", delete=True))
        await outcome_of(lake, lambda lake: lake.sync("bkt/a", "bkt/b"))
        await outcome_of(lake, lambda lake: lake.sync("bkt/b", back))
        assert found_in(back) == {name: content for name, content in FILES.items() if name != "a.bin"}

    run(kind, body)


def test_nothing_is_done_in_a_dry_run_and_patterns_choose(lake: Lake, tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    ended: list[SyncOutcome] = []
    lake.sync(source, "bkt/a", dry_run=True, include=["*.bin"], exclude=["deep/**"], outcome=ended.append)
    assert [(one.path, one.done) for one in ended if one.done is Done.COPIED] != []
    assert list(lake.ls("bkt")) == []
    lake.sync(source, "bkt/a", exclude=["deep/**"])
    assert [entry.key for entry in lake.ls("bkt")] == ["a/a.bin", "a/é"]


def test_nothing_is_removed_for_a_source_without_files_and_the_counts_say_so(lake: Lake, tmp_path: Path) -> None:
    lake.put("bkt/a/x", b"kept")
    (tmp_path / "empty").mkdir()
    counts = lake.sync(tmp_path / "empty", "bkt/a", delete=True)
    assert not counts.is_in_step
    assert "no file" in counts.withheld
    assert lake.get("bkt/a/x") == b"kept"


def test_the_first_failure_is_raised_after_all_names_were_tried(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "source", {"a": b"1", "b": b"2", "c": b"3"})
    from lakefs.put.sources import FileSource

    verify = FileSource.verify_unchanged

    def changed(self: FileSource) -> None:
        if self.path.endswith("/b"):
            raise SourceChanged(f"{self.path} changed while it was read", subject=self.path)
        verify(self)

    monkeypatch.setattr(FileSource, "verify_unchanged", changed)
    with pytest.raises(SourceChanged) as raised:
        lake.sync(source, "bkt/t")
    assert raised.value.__notes__ == ["1 names failed"]
    assert [entry.key for entry in lake.ls("bkt")] == ["t/a", "t/c"]


def test_sides_that_cannot_be_are_refused(lake: Lake, tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    with pytest.raises(LocalFileError, match="No such file"):
        lake.sync(tmp_path / "none", "bkt/a")
    with pytest.raises(BucketNotFound):
        lake.sync("nowhere/a", tmp_path / "back")
    with pytest.raises(BucketNotFound):
        lake.sync(source, "nowhere/a")
    with pytest.raises(InvalidArgument, match="in the lake"):
        lake.sync(source, tmp_path / "back")
    with pytest.raises(InvalidArgument, match="inside"):
        lake.sync("bkt/a", "bkt/a/b")
    with pytest.raises(InvalidArgument, match="data folder"):
        lake.sync(tmp_path / "store", "bkt/a")
    assert lake.sync(source, "made/a", create_bucket=True).is_in_step
