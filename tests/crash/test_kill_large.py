"""Puts of hundreds of MiB, killed in the middle: the client, the engine, or both; no name, no damage, no leak."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.connect import connect
from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from tests.crash.quiet_store import inspect
from tests.e2e.served import Served

pytestmark = pytest.mark.thorough

MIB = 1 << 20
LARGE_BYTES = 256 * MIB


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
def source() -> Iterator[Path]:
    with TemporaryDirectory(prefix="lake-") as name:
        path = Path(name) / "large"
        path.write_bytes(b"".join(random.Random(i).randbytes(MIB) for i in range(LARGE_BYTES // MIB)))
        yield path


def wait_written(engine: Served, size_bytes: int, put: subprocess.Popen[bytes]) -> None:
    """Wait until the engine has written that many bytes of a put, by the kernel's counters."""
    assert engine.process is not None
    while put.poll() is None:
        counters = Path(f"/proc/{engine.process.pid}/io").read_text().splitlines()
        written = next(int(line.split()[1]) for line in counters if line.startswith("wchar:"))
        if written >= size_bytes:
            return
    raise AssertionError(f"the put ended with {put.returncode} before it could be killed")


@pytest.mark.parametrize("victim", ["client", "engine", "both"])
@pytest.mark.parametrize("from_stdin", [False, True], ids=["by descriptor", "by body"])
def test_a_large_put_that_is_killed_leaves_no_name_no_damage_and_no_leak(
    engine: Served, source: Path, victim: str, from_stdin: bool
) -> None:
    small = os.urandom(70_000)
    engine.good("put", "-", "bkt/before", stdin=small)
    with source.open("rb") as content:
        put = engine.begin("put", "-" if from_stdin else source, "bkt/large", stdin=content, output=subprocess.PIPE)
        wait_written(engine, 64 * MIB, put)
        if victim != "engine":
            put.kill()
        if victim != "client":
            engine.kill()
        _, said = put.communicate()
    if victim == "engine":
        assert put.returncode in (69, 75), said
        assert b"engine" in said
    if victim == "client":
        with connect(engine.server) as client:
            assert not client.exists("bkt/large")
            assert client.get("bkt/before") == small
        assert engine.stop() == 0
    left = inspect(engine.data)
    assert left.fsck["damage"] == 0, left.fsck
    assert left.gc.live_bytes < MIB, left
    assert left.leaked_bytes <= 0, left
    engine.start()
    with connect(engine.server) as client:
        assert not client.exists("bkt/large")
        assert client.get("bkt/before") == small


def test_a_put_outlives_an_engine_that_is_killed_and_started_again(engine: Served) -> None:
    """The put may fail with an error instead; the name then has all its bytes, or does not exist."""
    content = random.Random(2).randbytes(96 * MIB)
    with connect(engine.server) as client, connect(engine.server) as watcher:
        outcome: list[LakeError | None] = []

        def put() -> None:
            try:
                client.put("bkt/x", content, create_bucket=True)
            except LakeError as error:
                outcome.append(error)
            else:
                outcome.append(None)

        thread = threading.Thread(target=put)
        thread.start()
        while thread.is_alive() and watcher.status()["clients"]["sessions"] == 0:
            pass
        engine.kill()
        engine.start()
        thread.join()
        found = client.get("bkt/x") if client.exists("bkt/x") else None
        assert found in (None, content)
        assert outcome[0] is not None or found == content
        assert outcome[0] is None or isinstance(outcome[0], (EngineUnreachable, SessionLost))
