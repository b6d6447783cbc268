"""Names of the lake through fsspec: look-ups, folders, removal, moves, copies and times, and the errors of each."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings, strategies as st

from lakefs import errors
from lakefs.client.blocking import engine as blocking_engine
from lakefs.content.verify import Check
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from lakefs.plugins.fsspec.os_errors import os_error
from tests.e2e.served import Served


def _fill(fs: Any, bucket: str) -> None:
    for name in ("a/1", "a/2", "a/b/3", "a/b/c/4", "aa", "d/5"):
        fs.pipe(f"{bucket}/{name}", name.encode())
    fs.makedirs(f"{bucket}/empty/inner")


def test_the_scheme_is_registered_and_only_that(fs: LakeFileSystem) -> None:
    assert fsspec.get_filesystem_class("lake") is LakeFileSystem
    with pytest.raises(ImportError, match="lakefs-spec"):  # another project's
        fsspec.get_filesystem_class("lakefs")
    made, path = fsspec.url_to_fs("lake://bucket/key", server=fs.server)
    assert made is fs
    assert path == "bucket/key"
    assert fs.unstrip_protocol(path) == "lake://bucket/key"


@pytest.mark.parametrize("withdirs", [False, True])
@pytest.mark.parametrize("maxdepth", [None, 1, 2])
def test_find_walk_glob_and_du_are_those_of_fsspecs_own_memory(
    fs: LakeFileSystem, bucket: str, withdirs: bool, maxdepth: int | None
) -> None:
    model = MemoryFileSystem(skip_instance_cache=True)
    model.store, model.pseudo_dirs = {}, [""]
    model.mkdir(f"/{bucket}")
    _fill(fs, bucket)
    _fill(model, f"/{bucket}")

    def same(ask: Callable[[Any, str], Any]) -> None:
        asked = ask(model, f"/{bucket}")
        assert ask(fs, bucket) == _without_root(asked)

    same(lambda one, top: one.find(top, withdirs=withdirs, maxdepth=maxdepth))
    same(lambda one, top: one.find(f"{top}/a", withdirs=withdirs, maxdepth=maxdepth))
    same(lambda one, top: one.find(f"{top}/a/1", withdirs=withdirs, maxdepth=maxdepth))
    same(lambda one, top: one.find(f"{top}/nothing", withdirs=withdirs, maxdepth=maxdepth))
    same(lambda one, top: [(path, sorted(d), sorted(f)) for path, d, f in one.walk(top, maxdepth=maxdepth)])
    same(lambda one, top: one.du(top, total=False, withdirs=withdirs, maxdepth=maxdepth))
    same(lambda one, top: one.du(top, maxdepth=maxdepth))
    for pattern in ("*", "*/*", "**", "a/**", "a*", "?/[0-9]", "**/4", "a/b/"):
        same(partial(_globbed, pattern=pattern, maxdepth=maxdepth))


def _globbed(fs: Any, top: str, *, pattern: str, maxdepth: int | None) -> list[str]:
    return sorted(fs.glob(f"{top}/{pattern}", maxdepth=maxdepth))


def _without_root(answer: Any) -> Any:
    if isinstance(answer, str):
        return answer.lstrip("/")
    if isinstance(answer, dict):
        return {key.lstrip("/"): value for key, value in answer.items()}
    if isinstance(answer, (list, tuple)):
        return type(answer)(_without_root(one) for one in answer)
    return answer


def test_an_entry_says_what_the_lake_knows(fs: LakeFileSystem, bucket: str) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    fs.pipe(f"{bucket}/a/1", b"content")
    fs.pipe(f"{bucket}/a/2", b"content")
    entry = fs.info(f"lake://{bucket}/a/1")
    assert (entry["name"], entry["size"], entry["type"]) == (f"{bucket}/a/1", 7, "file")
    assert fs.ls(f"{bucket}/a") == [fs.info(f"{bucket}/a/1"), fs.info(f"{bucket}/a/2")]
    assert fs.find(bucket, detail=True)[f"{bucket}/a/1"] == entry
    assert before < fs.modified(f"{bucket}/a/1") <= fs.created(f"{bucket}/a/1") < datetime.now(UTC)
    assert before < fs.created(bucket) < datetime.now(UTC)
    assert fs.info(f"{bucket}/a")["type"] == fs.info(bucket)["type"] == fs.info("")["type"] == "directory"
    assert bucket in fs.ls("", detail=False)
    assert fs.ukey(f"{bucket}/a/1") == fs.ukey(f"{bucket}/a/2") == entry["blob"]
    assert fs.checksum(f"{bucket}/a/1") == fs.checksum(f"{bucket}/a/2")
    fs.pipe(f"{bucket}/a/2", b"other")
    assert fs.ukey(f"{bucket}/a/1") != fs.ukey(f"{bucket}/a/2")
    assert fs.checksum(f"{bucket}/a/1") != fs.checksum(f"{bucket}/a/2")
    with pytest.raises(NotImplementedError):
        fs.sign(f"{bucket}/a/1")
    with pytest.raises(NotImplementedError):
        fs.modified("")


def test_an_object_and_a_folder_may_have_one_name(fs: LakeFileSystem, bucket: str) -> None:
    fs.pipe({f"{bucket}/a": b"object", f"{bucket}/a/1": b"below"})
    assert fs.info(f"{bucket}/a")["type"] == "file"
    assert fs.ls(f"{bucket}/a", detail=False) == [f"{bucket}/a/1"]
    assert fs.cat(f"{bucket}/a") == b"object"
    for depth in (None, 1, 2):
        found = fs.find(bucket, maxdepth=depth, withdirs=True, detail=True)
        assert found[f"{bucket}/a"]["type"] == "file"
        assert (f"{bucket}/a/1" in found) == (depth != 1)
    assert fs.du(bucket) == len("object") + len("below")
    assert fs.cat(f"{bucket}/*") == {f"{bucket}/a": b"object"}
    assert fs.cat(bucket, recursive=True) == {f"{bucket}/a": b"object", f"{bucket}/a/1": b"below"}
    fs.cp(f"{bucket}/a", f"{bucket}/copy", recursive=True)
    assert fs.find(f"{bucket}/copy", withdirs=True) == [f"{bucket}/copy", f"{bucket}/copy/1"]
    fs.mv(f"{bucket}/copy", f"{bucket}/moved")
    assert fs.find(bucket) == [f"{bucket}/{name}" for name in ("a", "a/1", "copy/1", "moved")]
    fs.rm_file(f"{bucket}/a")
    assert fs.isdir(f"{bucket}/a")
    fs.pipe(f"{bucket}/a", b"again")
    fs.rm(f"{bucket}/a", recursive=True)
    assert fs.find(bucket) == [f"{bucket}/copy/1", f"{bucket}/moved"]


def test_a_name_with_the_signs_of_a_pattern_is_removed_and_moved_as_it_is(fs: LakeFileSystem, bucket: str) -> None:
    names = ("data[1].csv", "data1.csv", "what?", "whatx", "*", "z[a]/b", "za/b")
    fs.pipe({f"{bucket}/{name}": name.encode() for name in names})
    fs.mv(f"{bucket}/data[1].csv", f"{bucket}/moved")
    assert fs.cat_file(f"{bucket}/moved") == b"data[1].csv"
    fs.rm(f"{bucket}/*")
    fs.rm(f"{bucket}/z[a]", recursive=True)
    fs.rm([f"{bucket}/what?", f"{bucket}/moved"])
    assert fs.find(bucket) == [f"{bucket}/data1.csv", f"{bucket}/whatx", f"{bucket}/za/b"]
    fs.rm(f"{bucket}/what?")
    fs.rm([f"{bucket}/data[0-9].csv", f"{bucket}/za/b"])
    assert fs.ls(bucket) == []


def test_a_pattern_or_list_with_a_folder_and_names_in_it_is_removed(fs: LakeFileSystem, bucket: str) -> None:
    _fill(fs, bucket)
    with pytest.raises(FileNotFoundError):
        fs.rm([f"{bucket}/aa", f"{bucket}/nothing"])
    assert fs.exists(f"{bucket}/aa")
    fs.rm(f"{bucket}/a/**", recursive=True)
    assert fs.find(bucket) == [f"{bucket}/aa", f"{bucket}/d/5"]
    fs.rm([f"{bucket}/d/5", f"{bucket}/d", f"{bucket}/aa", f"{bucket}/aa"], recursive=True)
    assert fs.find(bucket) == []


def test_folders_stay_when_they_were_made_and_vanish_when_they_were_implied(fs: LakeFileSystem, bucket: str) -> None:
    fs.makedirs(f"{bucket}/made/inner")
    fs.pipe(f"{bucket}/implied/a", b"")
    fs.pipe(f"{bucket}/made/a", b"")
    fs.rm([f"{bucket}/implied/a", f"{bucket}/made/a"])
    assert fs.ls(bucket, detail=False) == [f"{bucket}/made"]
    with pytest.raises(OSError, match="not empty") as refused:
        fs.rmdir(f"{bucket}/made")
    assert refused.value.errno == errno.ENOTEMPTY
    fs.rmdir(f"{bucket}/made/inner")
    with pytest.raises(FileNotFoundError):
        fs.rmdir(f"{bucket}/made")
    fs.pipe(f"{bucket}/a", b"")
    with pytest.raises(NotADirectoryError):
        fs.rmdir(f"{bucket}/a")
    with pytest.raises(OSError, match=r"[Ee]mpty"):
        fs.rmdir(bucket)
    fs.rm(f"{bucket}/a")
    fs.rmdir(bucket)
    assert not fs.exists(bucket)


def test_folders_and_buckets_are_made_as_asked(fs: LakeFileSystem, bucket: str) -> None:
    other = f"{bucket}-other"
    with pytest.raises(FileNotFoundError):
        fs.mkdir(f"{other}/a", create_parents=False)
    with pytest.raises(FileNotFoundError):
        fs.mkdir(f"{bucket}/a/b", create_parents=False)
    assert not fs.exists(other)
    fs.makedirs(f"{other}/a/b")
    fs.makedirs(f"{other}/a/b", exist_ok=True)
    fs.makedirs(other, exist_ok=True)
    for taken in (other, f"{other}/a", f"{other}/a/b", ""):
        with pytest.raises(FileExistsError):
            fs.makedirs(taken)
        with pytest.raises(FileExistsError):
            fs.mkdir(taken)
    fs.pipe(f"{bucket}/object", b"")
    with pytest.raises(FileExistsError):
        fs.makedirs(f"{bucket}/object", exist_ok=True)
    fs.rm(other, recursive=True)
    assert not fs.exists(other)


def test_removal_needs_recursive_for_folders_and_says_what_is_missing(fs: LakeFileSystem, bucket: str) -> None:
    _fill(fs, bucket)
    with pytest.raises(IsADirectoryError):
        fs.rm(f"{bucket}/a")
    with pytest.raises(IsADirectoryError):
        fs.rm([f"{bucket}/aa", f"{bucket}/a"])
    with pytest.raises(IsADirectoryError):
        fs.rm_file(bucket)
    for recursive in (False, True):
        with pytest.raises(FileNotFoundError):
            fs.rm(f"{bucket}/nothing", recursive=recursive)
    assert len(fs.find(bucket)) == 6
    with pytest.raises(IsADirectoryError):
        fs.rm(f"{bucket}/a/*")
    assert len(fs.find(bucket)) == 6
    fs.rm(f"{bucket}/a/[0-9]")
    assert fs.find(bucket) == [f"{bucket}/a/b/3", f"{bucket}/a/b/c/4", f"{bucket}/aa", f"{bucket}/d/5"]
    fs.rm(f"{bucket}/a", recursive=True, maxdepth=2)
    assert fs.find(bucket) == [f"{bucket}/a/b/c/4", f"{bucket}/aa", f"{bucket}/d/5"]
    fs.rm([f"{bucket}/a", f"{bucket}/empty"], recursive=True)
    assert fs.find(bucket, withdirs=True) == [bucket, f"{bucket}/aa", f"{bucket}/d", f"{bucket}/d/5"]


def test_removal_of_more_names_than_one_request_has(fs: LakeFileSystem, bucket: str) -> None:
    fs.pipe({f"{bucket}/many/{number % 7}/{number}": b"" for number in range(2500)})
    assert len(fs.find(bucket)) == 2500
    fs.rm(f"{bucket}/many", recursive=True)
    assert fs.ls(bucket) == []


def test_moves_are_renames(fs: LakeFileSystem, bucket: str) -> None:
    _fill(fs, bucket)
    before = fs.lake.stat(f"{bucket}/a/b/c/4").node
    fs.mv(f"{bucket}/a", f"{bucket}/moved")
    assert fs.lake.stat(f"{bucket}/moved/b/c/4").node == before
    assert not fs.exists(f"{bucket}/a")
    fs.mv(f"{bucket}/moved/1", f"{bucket}/moved/2")
    assert fs.cat(f"{bucket}/moved/2") == b"a/1"
    fs.mv(f"{bucket}/moved", f"{bucket}/empty")
    assert fs.cat(f"{bucket}/empty/moved/b/3") == b"a/b/3"
    fs.mv(f"{bucket}/aa", f"{bucket}/new/")
    assert fs.cat(f"{bucket}/new/aa") == b"aa"
    fs.mv(f"{bucket}/empty/moved/b/*", f"{bucket}/d/", recursive=True)
    assert fs.cat(f"{bucket}/d/c/4") == b"a/b/c/4"
    fs.mv(f"{bucket}/d/5", f"lake://{bucket}/d/5")
    fs.mv(f"{bucket}/d", f"{bucket}/d")
    assert fs.cat(f"{bucket}/d/5") == b"d/5"


def test_moves_that_cannot_be_done_change_nothing(fs: LakeFileSystem, bucket: str) -> None:
    _fill(fs, bucket)
    found = fs.find(bucket, withdirs=True)
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{bucket}/nothing", f"{bucket}/new")
    with pytest.raises(FileExistsError):
        fs.mv(f"{bucket}/a", f"{bucket}/aa")
    with pytest.raises(OSError, match="itself"):
        fs.mv(f"{bucket}/a", f"{bucket}/a/below/it")
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{bucket}/aa", "no-such-bucket/aa")
    assert fs.find(bucket, withdirs=True) == found


def test_a_whole_bucket_is_moved_by_names(fs: LakeFileSystem, bucket: str) -> None:
    _fill(fs, bucket)
    fs.mv(bucket, f"{bucket}-moved", recursive=True)
    assert not fs.exists(bucket)
    assert len(fs.find(f"{bucket}-moved")) == 6
    fs.rm(f"{bucket}-moved", recursive=True)


def test_a_copy_has_the_same_content_and_no_new_bytes(fs: LakeFileSystem, bucket: str) -> None:
    fs.pipe(f"{bucket}/a", bytes(9 << 20))
    fs.cp(f"{bucket}/a", f"{bucket}/b")
    assert fs.ukey(f"{bucket}/a") == fs.ukey(f"{bucket}/b")
    with pytest.raises(FileNotFoundError):
        fs.cp(f"{bucket}/nothing", f"{bucket}/c")
    with pytest.raises(FileNotFoundError):
        fs.cp(f"{bucket}/a", "no-such-bucket/a")


def test_touch_empties_or_only_sets_the_time(fs: LakeFileSystem, bucket: str) -> None:
    path = f"{bucket}/a"
    fs.touch(path, truncate=False)
    assert fs.cat(path) == b""
    fs.pipe(path, b"content")
    before = fs.modified(path)
    fs.touch(path, truncate=False)
    assert fs.cat(path) == b"content"
    assert fs.modified(path) > before
    fs.touch(path)
    assert fs.cat(path) == b""
    with pytest.raises(FileNotFoundError):
        fs.touch("no-such-bucket/a")


@settings(max_examples=60)
@given(path=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12))
def test_any_path_exists_or_does_not(served: Served, path: str) -> None:
    """No path makes a look-up fail in another way than by absence."""
    fs = LakeFileSystem(server=served.server)
    if fs.exists(path):
        assert fs.info(path)["name"] == path.strip("/")
    else:
        with pytest.raises(FileNotFoundError):
            fs.ls(path)
    assert fs.exists(f"no-such-bucket/{path}") is False
    assert fs.isdir(path) == (path.strip("/") == "" or fs.exists(path))


def test_errors_of_the_lake_are_those_that_python_has_for_files() -> None:
    for kind, python in {
        errors.KeyNotFound: FileNotFoundError,
        errors.BucketNotFound: FileNotFoundError,
        errors.AlreadyExists: FileExistsError,
        errors.IsAFolder: IsADirectoryError,
        errors.NotAFolder: NotADirectoryError,
        errors.PermissionDenied: PermissionError,
        errors.EngineUnreachable: ConnectionError,
        errors.SessionLost: ConnectionError,
        errors.DeadlineExceeded: TimeoutError,
    }.items():
        made = os_error(kind("words", subject="b/k"))
        assert isinstance(made, python)
        assert "words" in str(made)
        assert made.filename == "b/k"
    assert os_error(errors.StoreFull("words")).errno == errno.ENOSPC


def test_failures_are_not_taken_for_absence(
    fs: LakeFileSystem, served: Served, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_engine, "ENGINE_WAIT_S", 0.1)
    fs.pipe(f"{bucket}/a", b"content")
    with pytest.raises(ConnectionRefusedError):
        LakeFileSystem(server="unix:/no/such/socket")
    served.stop()
    try:
        for ask in (fs.exists, fs.isdir, fs.isfile, fs.find, fs.cat, fs.info, fs.ls, fs.du):
            with pytest.raises(ConnectionError):
                ask(f"{bucket}/a")
        for answer in (lambda: fs.glob(f"{bucket}/*"), lambda: [*fs.walk(bucket)], lambda: fs.find(bucket, maxdepth=1)):
            with pytest.raises(ConnectionError):
                answer()
    finally:
        served.start()
    assert fs.cat(f"{bucket}/a") == b"content"


def test_odd_settings_are_refused(fs: LakeFileSystem) -> None:
    with pytest.raises(OSError, match="BLAKE3, CRC32C, NONE"):
        LakeFileSystem(server=fs.server, check="md5")  # type: ignore[arg-type]
    assert LakeFileSystem(server=fs.server, check=Check.CRC32C) is not fs
