"""One file system in many threads, processes and event loops: pickled, forked, spawned, wrapped, cached."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.spec import AbstractFileSystem

from lakefs.plugins.fsspec.connections import CONNECTIONS_PER_ADDRESS, disconnect
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import ROOT, Served, environment, serving
from tests.e2e.test_damage import tcp_of

WORKERS = 3


def _read(fs: LakeFileSystem, path: str, count: int) -> list[bytes]:
    return [fs.cat(f"{path}/{number}") for number in range(count)]  # type: ignore[misc]


@pytest.fixture
def folder(fs: LakeFileSystem, bucket: str) -> str:
    """A folder of 20 objects, which say their number."""
    fs.pipe({f"{bucket}/f/{number}": str(number).encode() for number in range(20)})
    return f"{bucket}/f"


NUMBERS = [str(number).encode() for number in range(20)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_with_the_file_system_of_their_parent(fs: LakeFileSystem, folder: str, method: str) -> None:
    fs.cat(f"{folder}/0")
    with multiprocessing.get_context(method).Pool(WORKERS) as pool:
        assert pool.starmap(_read, [(fs, folder, 20)] * WORKERS) == [NUMBERS] * WORKERS
    assert _read(fs, folder, 20) == NUMBERS


def test_a_pickle_has_the_address_and_no_secret(fs: LakeFileSystem) -> None:
    assert pickle.loads(pickle.dumps(fs)) is fs
    assert AbstractFileSystem.from_json(fs.to_json()) is fs
    assert json.loads(fs.to_json())["server"] == fs.server


def test_the_token_is_needed_over_tcp_and_is_not_in_the_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, "--native", "127.0.0.1:0") as engine:
        address, token = tcp_of(engine), engine.token()
        with pytest.raises(PermissionError):
            LakeFileSystem(server=address, token="wrong")
        fs = LakeFileSystem(server=address, token=token)
        fs.mkdir("bkt")
        for text in (pickle.dumps(fs), fs.to_json().encode(), repr(fs.storage_options).encode()):
            assert token.encode() not in text
        pickled = pickle.dumps(fs)
        LakeFileSystem.clear_instance_cache()
        disconnect()
        with pytest.raises(PermissionError):
            pickle.loads(pickled)
        monkeypatch.setenv("LAKE_TOKEN", token)
        assert pickle.loads(pickled).exists("bkt")
        LakeFileSystem.clear_instance_cache()
        disconnect()


def test_file_systems_are_shared_by_the_address_of_their_engine(
    fs: LakeFileSystem, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKE_SERVER", served.server)
    assert fsspec.filesystem("lake") is fsspec.filesystem("lake", server=served.server) is fs
    with serving(tmp_path) as other:
        monkeypatch.setenv("LAKE_SERVER", other.server)
        second = fsspec.filesystem("lake")
        assert second is not fs
        assert second != fs
        assert second.fsid != fs.fsid
        second.mkdir("only-here")
        assert not fs.exists("only-here")


def test_threads_work_side_by_side_over_few_connections(fs: LakeFileSystem, served: Served, folder: str) -> None:
    before = fs.lake.status()["clients"]["connections"]
    barrier = threading.Barrier(12)

    def work(number: int) -> list[bytes]:
        own: LakeFileSystem = LakeFileSystem(server=served.server)
        barrier.wait()
        for round_ in range(5):
            with own.open(f"{folder}-{number}", "wb") as file:
                file.write(bytes([number, round_]))
            assert own.cat(f"{folder}-{number}") == fs.cat(f"{folder}-{number}") == bytes([number, round_])
        return _read(own, folder, 20)

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(work, range(12))) == [NUMBERS] * 12
    assert fs.lake.status()["clients"]["connections"] <= before + CONNECTIONS_PER_ADDRESS


def test_a_file_system_connects_again_after_its_connections_were_closed(fs: LakeFileSystem, folder: str) -> None:
    disconnect()
    assert _read(fs, folder, 20) == NUMBERS


def test_fsspecs_wrapper_makes_it_asynchronous(fs: LakeFileSystem, bucket: str) -> None:
    wrapped = AsyncFileSystemWrapper(fs, asynchronous=False)
    wrapped.pipe({f"{bucket}/a": b"a", f"{bucket}/b": b"b"})
    assert wrapped.cat([f"{bucket}/a", f"{bucket}/b"]) == {f"{bucket}/a": b"a", f"{bucket}/b": b"b"}
    assert wrapped.cat_ranges([f"{bucket}/a"] * 2, [0, 0], [1, 0]) == [b"a", b""]
    assert sorted(wrapped.find(bucket)) == [f"{bucket}/a", f"{bucket}/b"]
    assert wrapped.info(f"{bucket}/a") == fs.info(f"{bucket}/a")
    wrapped.mv(f"{bucket}/a", f"{bucket}/c")
    assert not fs.exists(f"{bucket}/a")
    with pytest.raises(FileNotFoundError):
        wrapped.cat(f"{bucket}/nothing")


def test_the_plug_in_ends_with_its_process_without_a_word(fs: LakeFileSystem, bucket: str) -> None:
    program = f"""
        import fsspec
        with fsspec.open("lake://{bucket}/a", "w") as file:
            file.write("text")
        reader = fsspec.filesystem("lake").open("{bucket}/a")
        print(reader.read())
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(program)],
        env=environment(fs.server),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'text'\n", "")


def test_the_core_imports_neither_the_plug_in_nor_fsspec() -> None:
    program = (
        "import sys, lakefs, cli.main; lakefs.connect; lakefs.Lake; print([n for n in sys.modules if 'fsspec' in n])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
