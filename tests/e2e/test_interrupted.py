"""Ctrl-C, at any moment: the command ends with 130, no name is half there, no part file is left, no room is lost."""

from __future__ import annotations

import gc
import linecache
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import BucketNotFound, LakeError
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES
from tests.crash.quiet_store import inspect
from tests.e2e.served import WAIT_S, Served, environment
from tests.served_devices import CYCLES, DEVICES

pytestmark = pytest.mark.thorough

MIB = 1 << 20
LARGE_BYTES = 192 * MIB
LINES_TRIED = 300 if os.environ.get("LAKE_TORTURE") else 25
INTERRUPTED = (130, -signal.SIGINT)
"""Exit codes; the second is that of a command which has not begun: Python's own start takes its time."""


@pytest.fixture
def engine() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as name:
        served = Served(Path(name))
        try:
            yield served
        finally:
            if served.process is not None and served.process.poll() is None:
                served.kill()


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """A large file, a small one, and many small ones."""
    with TemporaryDirectory(prefix="lake-") as name:
        folder = Path(name)
        generator = random.Random(3)
        (folder / "large").write_bytes(b"".join(generator.randbytes(MIB) for _ in range(LARGE_BYTES // MIB)))
        (folder / "small").write_bytes(generator.randbytes(10_000))
        (folder / "many").mkdir()
        for number in range(3000):
            (folder / "many" / f"{number}").write_bytes(generator.randbytes(20_000))
        yield folder


def interrupt_when(command: subprocess.Popen[bytes], reached: Callable[[], bool]) -> tuple[int, bytes]:
    """Send SIGINT when the condition holds; return exit code and stderr."""
    while command.poll() is None and not reached():
        pass
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=WAIT_S)
    return command.returncode, out + err


def begin(engine: Served, *args: str | Path) -> subprocess.Popen[bytes]:
    return engine.begin(*args, output=subprocess.PIPE)


def written_by(engine: Served, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the bytes that the engine's process has written, by the kernel's count.

    At a lake members write; there it is the number of chunks that puts under way have stored, of this length.
    """
    assert engine.process is not None
    if DEVICES:
        with connect(engine.server) as client:
            return int(client.status()["head"]["chunks_of_puts"]) * chunk_bytes
    lines = Path(f"/proc/{engine.process.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def has_many_names(engine: Served) -> bool:
    with suppress(BucketNotFound), connect(engine.server) as client:
        return len(list(islice(client.ls("bkt/"), 500))) == 500
    return False


def connections(engine: Served) -> int:
    with connect(engine.server) as client:
        return int(client.status()["clients"]["connections"])


def check_nothing_leaked(engine: Served, names: dict[str, bytes]) -> None:
    """Check that the names are whole, and that after gc nothing else takes room."""
    with connect(engine.server) as client:
        for name, content in names.items():
            assert not client.exists(name) or client.get(name) == content
        assert client.status()["clients"]["sessions"] == 0
    if DEVICES:
        check_whole_lake(engine)
    assert engine.stop() == 0
    if not DEVICES:
        left = inspect(engine.data)
        assert left.fsck["damage"] == 0, left.fsck
        assert left.fsck["notes"] == 0, left.fsck
        assert left.leaked_bytes <= 0, left


def check_whole_lake(engine: Served) -> None:
    """Check that after gc members have the shards of named chunks, at home, and no others."""
    with connect(engine.server) as client:
        for _ in range(CYCLES):
            client.gc()
        found = client.fsck(full=True)
        assert (found["damage"], found["notes"]) == (0, 0), found
        names = [f"{bucket.name}/{entry.key}" for bucket in client.buckets() for entry in client.ls(f"{bucket.name}/")]
        blobs = {stat.blob: stat for stat in map(client.stat, names)}.values()
        assert found["checked"]["shards"] == sum(shards_of(stat.size_bytes, stat.chunk_count) for stat in blobs), found


def shards_of(size_bytes: int, chunk_count: int) -> int:
    """Return the shards of a blob at 4+2: short chunks, as manifests are, have three."""
    if chunk_count > 1:
        return 6 * chunk_count + 3
    return 3 if size_bytes <= GRANULE_BYTES else 6


def test_an_interrupted_put_of_a_large_file_leaves_nothing(engine: Served, tree: Path) -> None:
    command = begin(engine, "put", tree / "large", "bkt/large")
    code, said = interrupt_when(command, lambda: written_by(engine) > 48 * MIB)
    assert code == 130, said
    assert b"Traceback" not in said
    with connect(engine.server) as client:
        assert not client.exists("bkt/large")
        # The put's session has ended with the put: what it stored is garbage at once.
        assert client.status()["clients"]["sessions"] == 0
        assert DEVICES or client.gc()["live_bytes"] == 0
    check_nothing_leaked(engine, {})


def test_an_interrupted_put_of_stdin_leaves_nothing(engine: Served, tree: Path) -> None:
    with (tree / "large").open("rb") as source:
        command = engine.begin("put", "-", "bkt/large", stdin=source, output=subprocess.PIPE)
        code, said = interrupt_when(command, lambda: written_by(engine) > 48 * MIB)
    assert code == 130, said
    with connect(engine.server) as client:
        assert not client.exists("bkt/large")
    check_nothing_leaked(engine, {})


def test_an_interrupted_put_of_a_tree_leaves_whole_files_only(engine: Served, tree: Path) -> None:
    command = begin(engine, "put", "-r", tree / "many", "bkt/many")
    code, said = interrupt_when(command, lambda: has_many_names(engine) if DEVICES else written_by(engine) > 10 * MIB)
    assert code == 130, said
    assert b"Traceback" not in said
    with connect(engine.server) as client:
        names = [entry.key for entry in client.ls("bkt/")]
        assert 0 < len(names) < 3000
        for key in names:
            assert client.get(f"bkt/{key}") == (tree / key).read_bytes()
    check_nothing_leaked(engine, {})


@pytest.mark.parametrize("moment", range(3))
def test_a_small_put_is_whole_or_absent_whenever_it_is_interrupted(engine: Served, tree: Path, moment: int) -> None:
    command = begin(engine, "put", tree / "small", "bkt/small")
    assert engine.process is not None
    descriptors = Path(f"/proc/{engine.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    moments: list[Callable[[], bool]] = [
        lambda: b"cli.main" in Path(f"/proc/{command.pid}/cmdline").read_bytes(),
        lambda: connections(engine) > 1 if DEVICES else len(list(descriptors.iterdir())) > before,  # it is connected
        lambda: written_by(engine, 10_001) > 10_000,
    ]
    code, said = interrupt_when(command, moments[moment])
    assert code in (0, *INTERRUPTED), said
    check_nothing_leaked(engine, {"bkt/small": (tree / "small").read_bytes()})


def test_an_interrupted_get_leaves_the_old_file_and_no_part(engine: Served, tree: Path) -> None:
    engine.good("put", tree / "large", "bkt/large")
    with TemporaryDirectory(prefix="lake-") as name:
        target = Path(name) / "target"
        target.write_bytes(b"old")
        command = begin(engine, "get", "bkt/large", target)

        def is_under_way() -> bool:
            parts = [entry for entry in target.parent.iterdir() if entry.name.endswith(".lake-part")]
            return any(entry.stat().st_blocks * 512 > 16 * MIB for entry in parts)

        code, said = interrupt_when(command, is_under_way)
        assert code == 130, said
        assert b"Traceback" not in said
        assert [entry.name for entry in target.parent.iterdir()] == ["target"]
        assert target.read_bytes() == b"old"
        with connect(engine.server) as client:
            assert client.status()["clients"]["leases"] == 0


def test_an_interrupted_get_of_a_tree_leaves_whole_files_only(engine: Served, tree: Path) -> None:
    engine.good("put", "-r", tree / "many", "bkt/many")
    with TemporaryDirectory(prefix="lake-") as name:
        target = Path(name) / "out"
        command = begin(engine, "get", "-r", "bkt/many", target)
        code, said = interrupt_when(command, lambda: target.exists() and len(list(target.iterdir())) > 100)
        assert code == 130, said
        for entry in target.iterdir():
            assert not entry.name.endswith(".lake-part")
            assert entry.read_bytes() == (tree / "many" / entry.name).read_bytes()


def test_an_interrupted_engine_finishes_what_it_has_begun_and_exits_with_0(engine: Served, tree: Path) -> None:
    command = begin(engine, "put", tree / "large", "bkt/large")
    while written_by(engine) < 48 * MIB and command.poll() is None:
        pass
    assert engine.interrupt() == 0
    _, said = command.communicate(timeout=WAIT_S)
    # Either the put was not done when its engine ended, and says so; or it was done in time.
    assert command.returncode in (0, 69, 75), said
    assert b"Traceback" not in said
    assert not engine.socket.exists()
    if DEVICES:
        engine.start()
        check_whole_lake(engine)
        return
    left = inspect(engine.data)
    assert left.fsck["damage"] == 0, left.fsck
    assert left.leaked_bytes <= 0, left


# --- in a lock of Python's library ------------------------------------------------------------------------

IN_A_LOCK = """
import sys

at = int(sys.argv.pop(1))

def traced(frame, event, _):
    global at
    if not frame.f_code.co_filename.endswith("/threading.py"):
        return None
    if event == "return" and frame.f_code.co_name == "__enter__":  # the lock is taken, and nobody yet gives it back
        at -= 1
        if not at:
            raise KeyboardInterrupt
    return traced

from cli.main import main

sys.settrace(traced)
main()
"""
"""A command that is interrupted when its main thread has entered so many locks of Python's library."""


@pytest.mark.parametrize("what", ["put -r", "get -r", "put", "get"])
def test_an_interrupt_inside_a_lock_of_pythons_library_ends_the_command(engine: Served, tree: Path, what: str) -> None:
    few = tree / "few"
    if not few.exists():
        few.mkdir()
        for number in range(100):
            (few / f"{number}").write_bytes((tree / "many" / f"{number}").read_bytes())
    engine.good("put", "-r", few, "bkt/few")
    engine.good("put", tree / "large", "bkt/large")
    with TemporaryDirectory(prefix="lake-") as name:
        for at in (1, 2, 3, 5, 8, 20, 50, 100):
            away, beside = str(Path(name) / f"{at}"), f"bkt/{at}"
            local, there = (str(few), "bkt/few") if "-r" in what else (str(tree / "large"), "bkt/large")
            sides = (local, beside) if what.startswith("put") else (there, away)
            command = [sys.executable, "-c", IN_A_LOCK, str(at), "--server", engine.server, *what.split(), *sides]
            done = subprocess.run(command, capture_output=True, env=environment(), timeout=WAIT_S, check=False)
            assert done.returncode in (0, 130), (at, done)
            assert b"Traceback" not in done.stderr, done.stderr


# --- at every line ------------------------------------------------------------------------------------------


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line of `lakefs` that the main thread runs, as the handler would.

    Or at the next one when that is the line of a `with`: a trace event also happens between the end of its block and
    its exit, where Python takes no signal.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        self.lines = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if "/lakefs/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            self._left -= 1
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if self._left <= 0 and not self.where and not line.lstrip().startswith("with "):
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(operation: Callable[[], object], at: int) -> Interrupter:
    """Run an operation and interrupt it at a line; only KeyboardInterrupt may leave it."""
    tracer = Interrupter(at)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        operation()
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        raise AssertionError(f"interrupted at {tracer.where}: {error!r}") from error
    finally:
        sys.settrace(before)
    return tracer


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect the test's garbage while its filters of warnings stand."""
    yield
    gc.collect()


# An interrupt between opening a socket and keeping it leaves the closing to Python's garbage collector.
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", ["put a buffer", "put a file", "put a stream", "get", "get a file"])
def test_an_interrupt_at_any_line_of_the_client_is_only_an_interrupt(engine: Served, tmp_path: Path, what: str) -> None:
    content = os.urandom(9 * MIB)
    (tmp_path / "file").write_bytes(content)
    chance = random.Random(what)

    def operate(lake: Lake) -> None:
        if what == "put a buffer":
            lake.put("bkt/x", content)
        elif what == "put a file":
            lake.put("bkt/x", tmp_path / "file")
        elif what == "put a stream":
            with (tmp_path / "file").open("rb") as stream:
                lake.put("bkt/x", stream)
        elif what == "get":
            lake.get("bkt/there")
        else:
            lake.get_file("bkt/there", tmp_path / "out")

    with connect(engine.server) as watcher, connect(engine.server) as lake:
        watcher.put("bkt/there", content, create_bucket=True)
        lines = interrupted(lambda: operate(lake), 1 << 30).lines
        assert lines > 100
        for at in sorted(chance.sample(range(1, lines), min(lines - 1, LINES_TRIED))):
            watcher.remove("bkt/x")
            (tmp_path / "out").unlink(missing_ok=True)
            tracer = interrupted(lambda: operate(lake), at)
            where = f"at line {at} of {lines}, {tracer.where}"
            assert not watcher.exists("bkt/x") or watcher.get("bkt/x") == content, where
            assert not (tmp_path / "out").exists() or (tmp_path / "out").read_bytes() == content, where
            assert [entry.name for entry in tmp_path.iterdir() if "part" in entry.name] == [], where
            # The same client goes on, with a new connection if the old one was in doubt.
            try:
                assert lake.get("bkt/there") == content, where
            except LakeError as error:
                raise AssertionError(f"{where}: {error!r}") from error
    if DEVICES:
        check_whole_lake(engine)
        return
    assert engine.stop() == 0
    left = inspect(engine.data)
    assert (left.fsck["damage"], left.fsck["notes"]) == (0, 0), left.fsck
    assert left.leaked_bytes <= 0, left
