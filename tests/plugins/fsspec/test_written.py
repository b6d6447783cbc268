"""Objects written through `open`: whole and at once when they are closed, and not at all after an error."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings, strategies as st

from lakefs.client.blocking.object_writer import STORED_AT_ONCE_BYTES
from lakefs.limits import CHUNK_BYTES
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import ROOT, Served, environment

OLD = b"the old content"
LONG = STORED_AT_ONCE_BYTES + CHUNK_BYTES + 17


class Planned(Exception):
    """An error of a test's own."""


def _in_own_block(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with fs.open(path, "wb") as file:
        file.write(content)
        raise Planned


def _in_text_block(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with fs.open(path, "w", encoding="latin1") as file:
        file.write(content.decode("latin1"))
        raise Planned


def _in_compressed_block(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with fs.open(path, "wb", compression="gzip") as file:
        file.write(content)
        raise Planned


def _in_block_of_fsspec(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with fsspec.open(f"lake://{path}", "wb", server=fs.server) as file:
        file.write(content)
        raise Planned


def _in_text_block_of_fsspec(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with fsspec.open(f"lake://{path}", "w", encoding="latin1", compression="gzip", server=fs.server) as file:
        file.write(content.decode("latin1"))
        raise Planned


def _in_exit_stack(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with ExitStack() as stack:
        file = stack.enter_context(closing(fs.open(path, "wb")))
        file.write(content)
        raise Planned


def _in_transaction(fs: LakeFileSystem, path: str, content: bytes) -> None:
    with fs.transaction:
        with fs.open(path, "wb") as file:
            file.write(content)
        raise Planned


@pytest.mark.parametrize("length", [5, LONG])
@pytest.mark.parametrize(
    "write",
    [
        _in_own_block,
        _in_text_block,
        _in_compressed_block,
        _in_block_of_fsspec,
        _in_text_block_of_fsspec,
        _in_exit_stack,
        _in_transaction,
    ],
)
def test_an_error_in_the_block_leaves_the_old_object(
    fs: LakeFileSystem, bucket: str, write: Callable[[LakeFileSystem, str, bytes], None], length: int
) -> None:
    path = f"{bucket}/a"
    fs.pipe(path, OLD)
    with pytest.raises(Planned):
        write(fs, path, random.Random(1).randbytes(length))
    assert fs.cat(path) == OLD
    assert _sessions(fs) == 0


def _sessions(fs: LakeFileSystem) -> int:
    """Return the number of puts in progress in the engine."""
    count: int = fs.lake.status()["clients"]["sessions"]
    return count


@pytest.mark.parametrize("mode", ["w", "wb"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_file_closed_while_an_error_is_handled_is_stored(
    fs: LakeFileSystem, bucket: str, mode: str, compression: str | None
) -> None:
    """The error does not end the block that closes the file, so the content is whole."""
    path = f"{bucket}/a"
    try:
        raise Planned
    except Planned:
        with fs.open(path, mode, compression=compression) as file:
            file.write("whole" if mode == "w" else b"whole")
        other = fs.open(f"{bucket}/b", "wb")
        other.write(b"whole")
        other.close()
    assert fs.open(path, "rb", compression=compression).read() == b"whole"
    assert fs.cat(f"{bucket}/b") == b"whole"


class Reporting:
    """A block at whose end a report is stored, whatever left it."""

    def __init__(self, fs: LakeFileSystem, path: str, *, opened_by: str) -> None:
        self._fs, self._path, self._opened_by = fs, path, opened_by

    def __enter__(self) -> None:
        return None

    def __exit__(self, *left_by: object) -> None:
        if self._opened_by == "fsspec":
            with fsspec.open(f"lake://{self._path}", "w", server=self._fs.server) as text:
                text.write(repr(left_by[1]))
        elif self._opened_by == "block":
            with self._fs.open(self._path, "w") as text:
                text.write(repr(left_by[1]))
        else:
            file = self._fs.open(self._path, "wb")
            file.write(repr(left_by[1]).encode())
            file.close()


@pytest.mark.parametrize("opened_by", ["fsspec", "block", "hand"])
def test_a_report_of_an_error_is_stored_while_the_error_leaves_another_block(
    fs: LakeFileSystem, bucket: str, opened_by: str
) -> None:
    with pytest.raises(Planned), Reporting(fs, f"{bucket}/report", opened_by=opened_by):
        raise Planned
    assert fs.cat(f"{bucket}/report") == b"Planned()"


@pytest.mark.parametrize("length", [5, LONG])
def test_nothing_is_visible_before_the_close(fs: LakeFileSystem, bucket: str, length: int) -> None:
    path, content = f"{bucket}/a", random.Random(2).randbytes(length)
    file = fs.open(path, "wb")
    file.write(content)
    file.flush()
    assert not fs.exists(path)
    assert fs.ls(bucket) == []
    file.close()
    assert fs.cat(path) == content


def test_a_file_that_is_never_closed_stores_nothing_and_warns(fs: LakeFileSystem, bucket: str) -> None:
    files = [fs.open(f"{bucket}/a", "wb")]
    files[0].write(bytes(LONG))
    with pytest.warns(ResourceWarning, match="never closed"):
        files.clear()
    assert not fs.exists(f"{bucket}/a")
    assert _sessions(fs) == 0


@settings(max_examples=25)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 4095, 1 << 20, CHUNK_BYTES - 1, CHUNK_BYTES, STORED_AT_ONCE_BYTES, LONG]), max_size=5
    ),
    seed=st.integers(0, 1000),
)
def test_any_writes_make_the_same_object_as_one_put(served: Served, sizes: list[int], seed: int) -> None:
    fs = LakeFileSystem(server=served.server)
    if not fs.exists("any-writes"):
        fs.mkdir("any-writes")
    content = random.Random(seed).randbytes(sum(sizes))
    with fs.open("any-writes/a", "wb") as file:
        at = 0
        for size in sizes:
            assert file.write(memoryview(content)[at : at + size]) == size
            at += size
            assert file.tell() == at
    fs.pipe("any-writes/b", content)
    assert fs.cat("any-writes/a") == content
    assert fs.ukey("any-writes/a") == fs.ukey("any-writes/b")
    assert fs.open("any-writes/a").read() == content


def test_appending_adds_behind_the_old_content(fs: LakeFileSystem, bucket: str) -> None:
    path, rng = f"{bucket}/a", random.Random(3)
    content = b""
    for length in (0, 10, CHUNK_BYTES, 5, LONG, 2 * CHUNK_BYTES - LONG % CHUNK_BYTES, 1):
        more = rng.randbytes(length)
        with fs.open(path, "ab") as file:
            assert file.tell() == len(content)
            file.write(more)
        content += more
        assert fs.cat(path) == content
    assert _sessions(fs) == 0


def test_appending_to_an_object_that_was_replaced_fails(fs: LakeFileSystem, bucket: str) -> None:
    path = f"{bucket}/a"
    fs.pipe(path, OLD)
    file = fs.open(path, "ab")
    file.write(b"more")
    fs.pipe(path, b"other")
    with pytest.raises(OSError, match="ETag"):
        file.close()
    assert fs.cat(path) == b"other"


def test_exclusive_creation_is_decided_when_the_file_is_closed(fs: LakeFileSystem, bucket: str) -> None:
    path = f"{bucket}/a"
    first, second = fs.open(path, "xb"), fs.open(path, "xb")
    first.write(b"first")
    second.write(b"second")
    first.close()
    with pytest.raises(FileExistsError):
        second.close()
    assert fs.cat(path) == b"first"


def test_a_transaction_shows_its_files_when_it_ends(fs: LakeFileSystem, bucket: str) -> None:
    contents = {f"{bucket}/{length}": random.Random(length).randbytes(length) for length in (0, 5, LONG)}
    with fs.transaction:
        for path, content in contents.items():
            with fs.open(path, "wb") as file:
                file.write(content)
        assert fs.find(bucket) == []
    assert {path: fs.cat(path) for path in contents} == contents
    assert _sessions(fs) == 0


def test_a_compressed_file_is_whole_after_its_close(fs: LakeFileSystem, bucket: str) -> None:
    with fs.open(f"{bucket}/a.gz", "wb", compression="infer") as file:
        file.write(OLD)
    assert gzip.decompress(fs.cat_file(f"{bucket}/a.gz")) == OLD
    assert fs.open(f"{bucket}/a.gz", "r", compression="infer").read() == OLD.decode()


def test_an_engine_that_was_killed_during_the_write_leaves_the_old_object(
    fs: LakeFileSystem, served: Served, bucket: str
) -> None:
    path = f"{bucket}/a"
    fs.pipe(path, OLD)
    file = fs.open(path, "wb")
    file.write(bytes(LONG))
    served.kill()
    served.start()
    with pytest.raises(ConnectionResetError):
        file.close()
    assert fs.cat(path) == OLD


def test_a_writer_that_is_killed_leaves_the_old_object(fs: LakeFileSystem, bucket: str) -> None:
    path = f"{bucket}/a"
    fs.pipe(path, OLD)
    program = f"""
        from lakefs.plugins.fsspec.file_system import LakeFileSystem
        file = LakeFileSystem().open({path!r}, "wb")
        file.write(bytes({LONG}))
        print("written", flush=True)
        import time
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env=environment(fs.server), stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    assert fs.cat(path) == OLD


def test_a_forked_child_does_not_end_its_parents_write(fs: LakeFileSystem, bucket: str) -> None:
    path, content = f"{bucket}/a", random.Random(4).randbytes(LONG)
    file = fs.open(path, "wb")
    file.write(content)
    child = os.fork()
    if child == 0:
        try:
            file.write(bytes(LONG))
        except OSError:
            file.discard()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    file.close()
    assert fs.cat(path) == content


def test_writers_cannot_be_sought_in_read_or_used_after_their_close(fs: LakeFileSystem, bucket: str) -> None:
    file = fs.open(f"{bucket}/a", "wb")
    assert file.writable()
    assert not file.readable()
    assert not file.seekable()
    for refused in (lambda: file.seek(0), file.read, file.fileno):
        with pytest.raises((OSError, io.UnsupportedOperation)):
            refused()
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


def test_writing_without_a_bucket_fails_and_makes_none(fs: LakeFileSystem) -> None:
    with pytest.raises(FileNotFoundError), fs.open("no-such-bucket/a", "wb") as file:
        file.write(b"x")
    with pytest.raises(FileNotFoundError), fs.open("no-such-bucket/a", "wb") as file:
        file.write(bytes(LONG))
    with pytest.raises(IsADirectoryError):
        fs.open("no-such-bucket", "wb")
    assert not fs.exists("no-such-bucket")
    with pytest.raises(NotImplementedError):
        fs.open("no-such-bucket/a", "r+b")


def test_a_reader_keeps_its_version(fs: LakeFileSystem, bucket: str) -> None:
    path, content = f"{bucket}/a", random.Random(5).randbytes(LONG)
    fs.pipe(path, content)
    with fs.open(path) as file:
        head = file.read(10)
        fs.pipe(path, b"other")
        assert head + file.read() == content
        assert file.size == LONG
        assert file.info()["size"] == LONG
        assert file.full_name == f"lake://{path}"


def test_a_pickled_reader_continues_where_it_was_if_the_content_is_the_same(fs: LakeFileSystem, bucket: str) -> None:
    path = f"{bucket}/a"
    fs.pipe(path, OLD)
    with fs.open(path) as file:
        file.seek(4)
        pickled = pickle.dumps(file)
        with pickle.loads(pickled) as other:
            assert other.read() == file.read() == OLD[4:]
        fs.pipe(path, b"other")
        with pytest.raises(OSError, match="replaced"):
            pickle.loads(pickled)


@settings(max_examples=30)
@given(moves=st.lists(st.tuples(st.integers(0, LONG + 9), st.integers(-1, 3 << 20)), max_size=8))
def test_any_reads_are_those_of_a_file_in_memory(served: Served, moves: list[tuple[int, int]]) -> None:
    fs = LakeFileSystem(server=served.server)
    content = random.Random(6).randbytes(LONG)
    if not fs.exists("any-reads/a"):
        fs.mkdir("any-reads")
        fs.pipe("any-reads/a", content)
    model: Any = io.BytesIO(content)
    with fs.open("any-reads/a") as file:
        for position, length in moves:
            assert file.seek(position) == model.seek(position)
            assert file.read(length) == model.read(length)
            assert file.tell() == model.tell()
            assert file.readline() == model.readline()
            memory, expected = bytearray(max(0, length)), bytearray(max(0, length))
            assert file.readinto(memory) == model.readinto(expected)
            assert memory == expected
            assert file.tell() == model.tell()
