"""An engine that runs out of descriptors, memory or room.

It says so, keeps what it acknowledged, and goes on without a restart when there is enough again.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.host.failpoints import WRITE_POINTS
from lakefs.client.connect import connect
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, StoreFull
from tests.crash.small_engine import SmallEngine
from tests.e2e.small_disk import fill, tmpfs

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
MIB = 1 << 20
TORTURE = bool(os.environ.get("LAKE_TORTURE"))
Contents = dict[str, bytes]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="lake-") as name:
        yield Path(name)


def check_serves(engine: SmallEngine, stored: Contents) -> None:
    """Check that all is there, that the store takes more, and that it was never restarted."""
    with connect(engine.server) as client:
        client.gc()  # frees room that a killed engine had taken and not used
        client.put("bkt/afterwards", b"there is enough again", create_bucket=True)
        client.put("bkt/large-afterwards", bytes(300_000))
        for name, content in stored.items():
            assert client.get(name) == content, name
        assert client.status()["state"] == "serving"
        assert client.fsck(full=True)["damage"] == 0


def check_serves_soon(engine: SmallEngine, stored: Contents) -> None:
    """Like `check_serves`, once the engine has seen that the others are gone."""
    for _ in range(1000):
        with suppress(EngineBusy):
            check_serves(engine, stored)
            return
    raise AssertionError("an engine that nobody else uses stays busy")


def held_connections(stack: ExitStack, engine: SmallEngine, count: int) -> list[socket.socket]:
    """Open as many connections as the engine's queue takes, and send nothing on them."""
    held: list[socket.socket] = []
    for _ in range(count):
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(1.0)
        try:
            sock.connect(str(engine.socket))
        except OSError:  # the stopped engine accepts none, and its queue is full
            break
        held.append(sock)
    return held


def test_a_store_without_descriptors_goes_on_writing(folder: Path) -> None:
    engine = SmallEngine(folder)
    assert engine.process is not None
    chance = random.Random(1)
    stored: Contents = {}
    with connect(engine.server) as client, ExitStack() as stack:
        client.put("bkt/before", b"before", create_bucket=True)
        resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (120, 120))
        held_connections(stack, engine, 200)
        opened = Path(f"/proc/{engine.process.pid}/fd")
        while len(list(opened.iterdir())) < 120:
            pass
        for number in range(300):  # through several journal files, segments and checkpoints
            content = chance.randbytes(300_000 if number % 2 else 3_000)
            with suppress(EngineBusy):
                client.put(f"bkt/{number}", content)
                stored[f"bkt/{number}"] = content
        assert len(stored) > 100
        assert client.status()["state"] == "serving"
    check_serves_soon(engine, stored)
    engine.kill()
    engine.start()
    check_serves(engine, stored)
    assert engine.stop() == 0


def test_more_connections_than_the_descriptors_allow_are_refused_with_the_reason(folder: Path) -> None:
    engine = SmallEngine(folder / "first")
    engine.stop()
    engine.wrapped = lambda command: ["prlimit", "--nofile=256:256", *command]
    engine.start()
    with connect(engine.server) as client, ExitStack() as stack:
        client.put("bkt/x", b"content", create_bucket=True)
        held_connections(stack, engine, 100)
        with pytest.raises(EngineBusy, match="connections already"):
            connect(engine.server)
        client.put("bkt/y", bytes(200_000))
    check_serves_soon(engine, {"bkt/x": b"content", "bkt/y": bytes(200_000)})
    assert engine.stop() == 0


@pytest.mark.one_engine("a head has mapped its memory for payload before it serves")
def test_a_store_without_memory_refuses_what_it_cannot_hold_and_goes_on(folder: Path) -> None:
    """The engine gets 2 MiB of address space more.  It may die; then it starts again with all that it acknowledged."""
    engine = SmallEngine(folder)
    assert engine.process is not None
    stored: Contents = {"bkt/before": os.urandom(300_000)}
    refused: list[LakeError] = []
    with connect(engine.server) as client:
        client.put("bkt/before", stored["bkt/before"], create_bucket=True)
        status = Path(f"/proc/{engine.process.pid}/status").read_text().splitlines()
        has_kib = next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))
        resource.prlimit(engine.process.pid, resource.RLIMIT_AS, (1024 * has_kib + 2 * MIB, resource.RLIM_INFINITY))
        putting = [threading.Thread(target=put_large, args=(engine, number, stored, refused)) for number in range(4)]
        for thread in putting:
            thread.start()
        for thread in putting:
            thread.join()
    assert refused
    assert all(isinstance(error, (EngineBusy, EngineUnreachable)) for error in refused), refused
    if engine.process.poll() is None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(engine.process.pid, resource.RLIMIT_AS, unlimited)
        check_serves_soon(engine, stored)
        engine.kill()
    engine.start()
    check_serves(engine, stored)
    assert engine.stop() == 0


def put_large(engine: SmallEngine, number: int, stored: Contents, refused: list[LakeError]) -> None:
    """Put objects of several chunks; note what was acknowledged, and how the others failed."""
    chance = random.Random(number)
    try:
        with connect(engine.server) as client:
            for turn in range(12):
                content = chance.randbytes(9 * MIB)
                try:
                    client.put(f"bkt/{number}-{turn}", content, create_bucket=True)
                    stored[f"bkt/{number}-{turn}"] = content
                except EngineBusy as error:
                    refused.append(error)
    except LakeError as error:
        refused.append(error)


@pytest.mark.one_engine("a process is stopped at a step of its store: every member would be")
def test_a_disk_that_fills_at_any_step_of_a_write_keeps_all_and_goes_on(folder: Path) -> None:
    """The engine stops at a step, others fill the disk, the engine goes on.  `LAKE_TORTURE`: at every step."""
    reached: list[str] = []
    with tmpfs(folder, 96 * MIB) as disk:
        engine = SmallEngine(disk)
        stored: Contents = {}
        for point in WRITE_POINTS[:: 1 if TORTURE else 3]:
            engine.kill()
            assert engine.try_start(f"{point}:2:STOP"), point
            if fill_at_the_step(engine, disk, stored):
                reached.append(point)
            check_serves(engine, stored)
        engine.kill()
        engine.start()
        check_serves(engine, stored)
        assert engine.stop() == 0
    assert len(reached) > (len(WRITE_POINTS) // 2 if TORTURE else 2), reached


def fill_at_the_step(engine: SmallEngine, disk: Path, stored: Contents) -> bool:
    """Put until the engine stops at its step; fill the disk there, put on, and make room again."""
    assert engine.process is not None
    pid = engine.process.pid
    refusals: list[LakeError] = []
    ended = threading.Event()

    def put_some() -> None:
        chance = random.Random(engine.failpoint)
        try:
            with connect(engine.server) as client:
                for number in range(160):
                    content = chance.randbytes(70_000 if number % 40 == 0 else 8_000)
                    name = f"bkt/{number % 30}"
                    stored.pop(name, None)
                    try:
                        client.put(name, content, create_bucket=True)
                    except LakeError as error:
                        refusals.append(error)
                        if client.exists(name):  # whole, and either the new or the old content
                            stored[name] = client.get(name)
                    else:
                        stored[name] = content
        finally:
            ended.set()

    putting = threading.Thread(target=put_some)
    putting.start()
    is_stopped = False
    while not ended.is_set() and not is_stopped:
        is_stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None
    if is_stopped:
        fill(disk / "others")
        os.kill(pid, signal.SIGCONT)
    putting.join()
    (disk / "others").unlink(missing_ok=True)
    assert all(isinstance(error, StoreFull) for error in refusals), refusals[:3]
    return is_stopped
