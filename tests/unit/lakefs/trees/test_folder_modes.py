"""Modes of folders: kept by a put of a tree and by a get of it, and without a request where they are usual."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import LakeError
from lakefs.names import Name
from lakefs.steps.steps import Send, Steps
from lakefs.trees.folder_modes import FetchedFolders, sent_mode
from lakefs.trees.get_file import GetOptions
from lakefs.trees.get_tree import get_tree
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.put_tree import PutOptions, put_tree
from lakefs.trees.walk import FileOutcome, Observer, Totals, Walk, WalkOptions
from lakefs.wire.messages import MakeFolder, SetAttributes


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    (tmp_path / "store").mkdir()
    with open_lake(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folders of many modes: with files, without, and with folders only."""
    root = tmp_path / "in"
    for name, mode in {"": 0o750, "shut": 0o500, "a": 0o755, "a/in": 0o770, "a/in/it": 0o700, "empty": 0o711}.items():
        (root / name).mkdir()
        if name and name != "empty":
            (root / name / "f").write_bytes(b"x")
        (root / name).chmod(mode)
    return root


def modes(root: Path) -> dict[str, int]:
    """Return the mode of each folder."""
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in folders}


def put(lake: Lake, root: Path, key: str = "k/") -> tuple[Totals, list[object]]:
    """Put a tree; return the totals and the requests about folders."""
    driver = driver_of(lake)
    sent: list[object] = []
    walk = Walk(str(root), key, WalkOptions(folders=True))
    steps = put_tree(driver.steps, [walk], "bkt", PutOptions(create_bucket=True), Observer())
    return driver.run(_watched(steps, sent)), sent


def _watched(steps: Steps[Totals], sent: list[object]) -> Steps[Totals]:
    """Run steps, and note the requests that make or change folders."""
    try:
        effect = next(steps)
        while True:
            inner = getattr(effect, "effect", effect)
            if isinstance(inner, Send) and isinstance(inner.request, (MakeFolder, SetAttributes)):
                sent.append(inner.request)
            try:
                answer = yield effect
            except LakeError as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(answer)
    except StopIteration as end:
        totals = end.value
        assert isinstance(totals, Totals)
        return totals


def get(lake: Lake, target: Path) -> list[FileOutcome]:
    """Get the tree; return the outcomes."""
    outcomes: list[FileOutcome] = []
    driver = driver_of(lake)
    driver.run(get_tree(driver.steps, Name("bkt", "k/"), str(target), GetOptions(), Observer(outcomes.append)))
    return outcomes


def test_folders_come_back_with_their_modes(lake: Lake, root: Path, tmp_path: Path) -> None:
    put(lake, root)
    get(lake, tmp_path / "out")
    assert modes(tmp_path / "out") == modes(root)
    assert lake.stat("bkt/k/a/in/").mode == 0o770
    assert [entry.key for entry in lake.ls("bkt") if entry.key.endswith("/")] == ["k/empty/"]


def test_a_mode_that_changed_here_or_there_is_put_right(lake: Lake, root: Path, tmp_path: Path) -> None:
    put(lake, root)
    get(lake, tmp_path / "out")
    (root / "shut").chmod(0o755)
    (tmp_path / "out" / "a" / "in").chmod(0o700)
    _, sent = put(lake, root)
    assert [request.key for request in sent if isinstance(request, SetAttributes)] == ["k/shut/"]
    get(lake, tmp_path / "out")
    assert modes(tmp_path / "out") == modes(root)


def test_folders_of_the_usual_mode_cost_no_request(lake: Lake, tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / "in" / f"d{index}" / "below").mkdir(parents=True)
        (tmp_path / "in" / f"d{index}" / "below" / "f").write_bytes(b"x")
    for path in (tmp_path / "in", *(tmp_path / "in").rglob("d*"), *(tmp_path / "in").rglob("below")):
        path.chmod(0o755)
    totals, sent = put(lake, tmp_path / "in")
    assert (sum(totals.files.values()), sent) == (20, [])


def test_a_bucket_keeps_its_own_mode_and_a_folder_that_was_there_too(lake: Lake, root: Path, tmp_path: Path) -> None:
    put(lake, root, "")
    assert lake.stat("bkt").mode == 0o755
    put(lake, root)
    (tmp_path / "out").mkdir(mode=0o711)
    get(lake, tmp_path / "out")
    assert modes(tmp_path / "out") == modes(root) | {".": 0o711}


def test_a_folder_whose_entries_are_all_skipped_is_no_error(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "in" / "links").mkdir(parents=True)
    (tmp_path / "in" / "links" / "l").symlink_to("nowhere")
    (tmp_path / "in" / "links").chmod(0o700)
    totals, sent = put(lake, tmp_path / "in")
    assert totals.first_error is None
    assert len(sent) == 1, "for the folder, which is not there"


def test_many_folders_get_their_modes_while_the_walk_goes_on(lake: Lake, tmp_path: Path) -> None:
    for index in range(300):
        (tmp_path / "in" / f"{index:03}").mkdir(parents=True)
        (tmp_path / "in" / f"{index:03}").chmod(0o700 | index % 8)
    put(lake, tmp_path / "in")
    get(lake, tmp_path / "out")
    assert modes(tmp_path / "out") == modes(tmp_path / "in")


def test_a_mode_that_cannot_be_set_is_named_and_the_folder_counts_as_missing(tmp_path: Path) -> None:
    folders = FetchedFolders()
    (tmp_path / "d").mkdir(mode=0o755)
    target = LocalTarget(str(tmp_path), ("d",), "")
    with target.folder() as descriptor:
        folders.note("d/", target, descriptor, 0o755)
        assert not folders.are_behind("x")
        folders.note("d/", target, descriptor, 0o700)
    assert not folders.are_behind("d/x")
    assert folders.are_behind("d0")
    (tmp_path / "d").rmdir()
    ((key, path, error),) = folders.leave("d0")
    assert (key, path) == ("d/", str(tmp_path / "d"))
    assert "No such file" in error.message
    assert folders.leave("") == []


@pytest.mark.parametrize(("mode", "wanted"), [(0o755, None), (0o4755, None), (0o700, 0o700), (0o1777, 0o777)])
def test_only_permission_bits_decide(mode: int, wanted: int | None) -> None:
    assert sent_mode(mode, None) == wanted


def test_a_walk_gives_folders_with_entries_only_on_demand(root: Path) -> None:
    def found(options: WalkOptions) -> list[tuple[str, bool]]:
        return [(entry.key, entry.is_left) for entry in Walk(str(root), "k/", options).next_batch(99)]

    left = [key for key, is_left in found(WalkOptions(folders=True)) if is_left]
    assert left == ["k/a/in/it/", "k/a/in/", "k/a/", "k/shut/", "k/"]
    assert not any(is_left for _, is_left in found(WalkOptions()))
