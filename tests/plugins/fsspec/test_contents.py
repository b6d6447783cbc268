"""Whole contents and ranges through fsspec: many at once, checked, and the same as one by one."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.callbacks import Callback
from hypothesis import given, settings, strategies as st

from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES, KIB, MIB
from lakefs.plugins.fsspec.connections import disconnect
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import serving
from tests.e2e.test_damage import flip, place_of, tcp_of
from tests.odd_names import put_odd
from tests.served_devices import HEALS

SIZES = {"none": 0, "one": 1, "inline": 5000, "granule": GRANULE_BYTES, "vector": 300 * KIB, "large": 9 * MIB + 5}
CONTENTS = {f"ranges/{name}": random.Random(name).randbytes(size) for name, size in SIZES.items()}


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, LakeFileSystem]]:
    """File systems of one engine, over its socket and over TCP, with `CONTENTS` stored."""
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as engine:
        token = engine.token()
        local = LakeFileSystem(server=engine.server)
        local.mkdir("ranges")
        for path, content in CONTENTS.items():
            local.pipe(path, content)
        yield {"unix": local, "tcp": LakeFileSystem(server=tcp_of(engine), token=token)}
        LakeFileSystem.clear_instance_cache()
        disconnect()


EDGES = [0, 1, -1, None, GRANULE_BYTES - 1, GRANULE_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 1 << 40]
_bounds = st.one_of(st.sampled_from(EDGES), st.integers(-(10 * MIB), 10 * MIB))


@settings(max_examples=60)
@given(
    wanted=st.lists(st.tuples(st.sampled_from(sorted(CONTENTS)), _bounds, _bounds), max_size=20),
    kind=st.sampled_from(["unix", "tcp"]),
)
def test_any_ranges_are_slices_of_the_contents(
    both: dict[str, LakeFileSystem], wanted: list[tuple[str, int | None, int | None]], kind: str
) -> None:
    paths, starts, ends = ([triple[at] for triple in wanted] for at in range(3))
    found = both[kind].cat_ranges(paths, starts, ends, on_error="raise")  # type: ignore[arg-type]
    assert [
        content == CONTENTS[path][start:end] for content, (path, start, end) in zip(found, wanted, strict=True)
    ] == ([True] * len(wanted))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_many_ranges_of_many_objects_in_few_requests(both: dict[str, LakeFileSystem], kind: str) -> None:
    fs, rng = both[kind], random.Random(8)
    content = CONTENTS["ranges/large"]
    starts = [rng.randrange(9 * MIB) for _ in range(1500)]
    ends = [start + 3000 for start in starts]
    found = fs.cat_ranges(["ranges/large"] * 1500, starts, ends)
    assert found == [content[start:end] for start, end in zip(starts, ends, strict=True)]


def test_a_range_that_fails_takes_only_its_own_place(fs: LakeFileSystem, bucket: str) -> None:
    fs.pipe(f"{bucket}/f/a", b"0123456789")
    paths = [
        f"{bucket}/f/a",
        f"{bucket}/nothing",
        f"{bucket}/f",
        "no-such-bucket/a",
        bucket,
        "",
        f"lake://{bucket}/f/a",
    ]
    found = fs.cat_ranges(paths, 2, [4] * len(paths))
    assert found[0] == found[-1] == b"23"
    assert [type(one) for one in found[1:4]] == [FileNotFoundError, IsADirectoryError, FileNotFoundError]
    assert all(isinstance(one, OSError) for one in found[4:6])
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths[:4], 2, 4, on_error="raise")
    with pytest.raises(ValueError, match="go together"):
        fs.cat_ranges(paths, [1], 4)
    with pytest.raises(TypeError):
        fs.cat_ranges("path", 1, 4)  # type: ignore[arg-type]


@pytest.mark.one_engine(HEALS)
def test_damaged_bytes_are_never_returned_and_fail_only_what_touches_them() -> None:
    content = random.Random(9).randbytes(300 * KIB)
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder)) as engine:
        fs = LakeFileSystem(server=engine.server)
        fs.mkdir("bkt")
        fs.pipe("bkt/a", content)
        engine.stop()
        path, offset = place_of(engine.data, content[:512])
        flip(path, offset + 250 * KIB)
        engine.start()
        starts = [10, 240 * KIB, 249 * KIB, 1000]
        found = fs.cat_ranges(["bkt/a"] * 4, starts, [start + 3000 for start in starts])
        assert found[0] == content[10:3010]
        assert found[3] == content[1000:4000]
        assert [isinstance(one, OSError) for one in found] == [False, True, True, False]
        with pytest.raises(OSError, match="bkt/a"):
            fs.cat("bkt/a")
        with pytest.raises(OSError, match="bkt/a"):
            fs.open("bkt/a").read()
        LakeFileSystem.clear_instance_cache()
        disconnect()


def test_cat_of_many_is_that_of_each(fs: LakeFileSystem, bucket: str) -> None:
    contents = {f"{bucket}/f/{number}": random.Random(number).randbytes(number * 37) for number in range(300)}
    contents[f"{bucket}/f/long"] = random.Random(1).randbytes(CHUNK_BYTES + 9)
    fs.pipe(contents)
    assert fs.cat(sorted(contents)) == contents
    assert fs.cat(f"{bucket}/f", recursive=True) == contents
    assert fs.cat(f"{bucket}/f/1?") == {f"{bucket}/f/{n}": contents[f"{bucket}/f/{n}"] for n in range(10, 20)}
    some = [f"{bucket}/f/1", f"{bucket}/nothing", f"{bucket}/f/2"]
    with pytest.raises(FileNotFoundError):
        fs.cat(some)
    assert fs.cat(some, on_error="omit") == {path: contents[path] for path in some if path in contents}
    returned = fs.cat(some, on_error="return")
    assert isinstance(returned, dict)
    assert isinstance(returned[some[1]], FileNotFoundError)
    with pytest.raises(IsADirectoryError):
        fs.cat(f"{bucket}/f")
    with pytest.raises(IsADirectoryError):
        fs.open(bucket)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_pipe_takes_what_has_bytes(both: dict[str, LakeFileSystem], kind: str) -> None:
    fs = both[kind]
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    values: dict[str, Any] = {
        f"ranges/{kind}/{at}": value
        for at, value in enumerate((b"x", bytearray(b"y"), memoryview(b"z"), array, bytes(CHUNK_BYTES + 1)))
    }
    fs.pipe(values)
    assert fs.cat(list(values)) == {path: memoryview(value).cast("B").tobytes() for path, value in values.items()}
    fs.rm(f"ranges/{kind}", recursive=True)
    with pytest.raises(TypeError):
        fs.pipe("ranges/a", "text")
    with pytest.raises(IsADirectoryError):
        fs.pipe("ranges", b"")


def test_a_failed_object_of_many_leaves_the_others_stored(fs: LakeFileSystem, bucket: str) -> None:
    with pytest.raises(FileNotFoundError):
        fs.pipe({f"{bucket}/a": b"a", "no-such-bucket/b": b"b", f"{bucket}/c": b"c"})
    assert fs.cat([f"{bucket}/a", f"{bucket}/c"]) == {f"{bucket}/a": b"a", f"{bucket}/c": b"c"}


class Noted(Callback):  # type: ignore[misc]
    """Notes the progress."""


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_files_go_there_and_back_whole(both: dict[str, LakeFileSystem], kind: str, tmp_path: Path) -> None:
    fs = both[kind]
    there, back = tmp_path / "there", tmp_path / "new/folder/back"
    content = random.Random(10).randbytes(9 * MIB)
    there.write_bytes(content)
    there.chmod(0o640)
    os.utime(there, ns=(10**18, 10**18))
    putting, getting = Noted(), Noted()
    fs.put_file(there, f"ranges/{kind}-file", callback=putting)
    fs.get_file(f"lake://ranges/{kind}-file", back, callback=getting)
    assert back.read_bytes() == content
    assert back.stat().st_mode & 0o777 == 0o640
    assert back.stat().st_mtime_ns == 10**18
    assert (putting.size, putting.value) == (getting.size, getting.value) == (len(content), len(content))
    memory = io.BytesIO()
    fs.get_file(f"ranges/{kind}-file", memory)
    assert memory.getvalue() == content
    with pytest.raises(FileExistsError):
        fs.put_file(there, f"ranges/{kind}-file", mode="create")
    with pytest.raises(FileNotFoundError) as missing:
        fs.put_file(tmp_path / "nothing", f"ranges/{kind}-file")
    assert str(missing.value.filename) == str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        fs.get_file("ranges/nothing", tmp_path / "not made")
    assert not (tmp_path / "not made").exists()
    fs.rm(f"ranges/{kind}-file")


def test_folders_go_there_and_back(fs: LakeFileSystem, bucket: str, tmp_path: Path) -> None:
    contents = {f"{n % 5}/{n % 3}/{n}": random.Random(n).randbytes(n) for n in range(60)}
    for name, content in contents.items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(content)
    (tmp_path / "there/empty").mkdir()
    fs.put(str(tmp_path / "there"), f"{bucket}/f", recursive=True)
    assert fs.cat(f"{bucket}/f", recursive=True) == {f"{bucket}/f/{name}": one for name, one in contents.items()}
    fs.get(f"{bucket}/f", str(tmp_path / "back"), recursive=True)
    back = {str(path.relative_to(tmp_path / "back")): path for path in (tmp_path / "back").rglob("*")}
    assert {name: path.read_bytes() for name, path in back.items() if path.is_file()} == contents
    assert back["empty"].is_dir()


def test_no_name_leads_out_of_the_local_folder(fs: LakeFileSystem, bucket: str, tmp_path: Path) -> None:
    for key in ("f/good", "f/../../../out", "f/x/../../../out"):
        put_odd(fs.lake, bucket, key, b"content")
    with pytest.raises(ValueError, match=r"\.\."):
        fs.get(f"{bucket}/f", str(tmp_path / "a/b/c"), recursive=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_archives_in_the_lake_and_caches_beside_it_are_read_through_fsspec(
    both: dict[str, LakeFileSystem], tmp_path: Path
) -> None:
    lake = both["unix"]
    with lake.open("ranges/a.zip", "wb") as stored:
        archive = fsspec.filesystem("zip", fo=stored, mode="w")
        archive.pipe("inner/b.txt", b"b" * 100_000)
        archive.close()
    remote = {"lake": {"server": lake.server}}
    with fsspec.open("zip://inner/b.txt::lake://ranges/a.zip", "rb", **remote) as inner:
        assert inner.read() == b"b" * 100_000
    for cache in ("simplecache", "filecache"):
        kept = {cache: {"cache_storage": str(tmp_path / cache)}}
        with fsspec.open(f"{cache}::lake://ranges/large", "rb", **remote, **kept) as whole:
            assert whole.read() == CONTENTS["ranges/large"]
