"""Every client of an engine that is stopped: its call ends with an error, and a later call is served again.

docs/python.md has the table that this walks.  Stopped by SIGSTOP: the connection stays open, and the engine silent.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from botocore.exceptions import ClientError
from fsspec import filesystem

import lakefs
from lakefs.errors import EngineUnreachable
from lakefs.limits import MIB
from lakefs.plugins.fsspec.connections import disconnect
from lakefs.plugins.kv import movers as moving
from lakefs.plugins.kv.block_moves import BlockMoves, Ended
from lakefs.plugins.kv.lmcache_connector import Completion, LakeConnector
from lakefs.plugins.kv.movers import Connection, Movers, SpaceSettings
from tests.e2e.gateways import gateway, new_key, s3_client
from tests.e2e.mount_rig import mount_rig
from tests.e2e.served import LAKE, WAIT_S, Served, environment, serving

pytestmark = pytest.mark.thorough

TIMEOUT_S = 1.0
IN_TIME_S = 15.0
"""Silence, connecting anew in vain, and a slow machine."""
BLOCK = 64 * 1024


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as served:
        served.good("put", "-", "bkt/a", stdin=b"a" * 1000)
        yield served


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, engine: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine's address; tokens and the short limit are in the environment, also of commands."""
    monkeypatch.setenv("LAKE_TIMEOUT", f"{TIMEOUT_S:g}")
    if request.param == "unix":
        return engine.server
    monkeypatch.setenv("LAKE_TOKEN", engine.token())
    [line] = [line for line in engine.printed if "tcp://" in line]
    return "tcp://" + line.split("tcp://")[1].split()[0]


@contextmanager
def stopped(engine: Served) -> Iterator[None]:
    assert engine.process is not None
    engine.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.process.send_signal(signal.SIGCONT)


def wait_for(condition: Callable[[], bool], limit_s: float = WAIT_S) -> None:
    """Wait until a condition holds, by looking at it again and again."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


def in_time(call: Callable[[], object]) -> float:
    """Run a call in a thread; it ends in time.  Returns its seconds, and raises its error."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(IN_TIME_S)
    assert not thread.is_alive(), "it waits for ever"
    if failure:
        raise failure[0]
    return time.monotonic() - began


# --- the table -------------------------------------------------------------------------------------------


def test_a_blocking_client_raises_and_connects_anew(engine: Served, address: str) -> None:
    with lakefs.connect(address) as client:
        assert client.get("bkt/a") == b"a" * 1000
        calls: list[Callable[[], object]] = [
            lambda: client.put("bkt/b", b"b" * 1000),
            lambda: client.put("bkt/c", os.urandom(12 * MIB)),
            lambda: list(client.ls("bkt/")),
            lambda: client.status(),
        ]
        for call in calls:
            with stopped(engine), pytest.raises(EngineUnreachable):
                in_time(call)
            assert client.get("bkt/a") == b"a" * 1000


def test_a_trio_client_raises_and_connects_anew(engine: Served, address: str) -> None:
    async def main() -> None:
        async with lakefs.connect_trio(address) as client:
            for content in (b"b" * 1000, os.urandom(12 * MIB)):
                with stopped(engine), trio.fail_after(IN_TIME_S), pytest.raises(EngineUnreachable):
                    await client.put("bkt/b", content)
                assert await client.get("bkt/a") == b"a" * 1000

    trio.run(main)


def test_a_forked_worker_raises_and_connects_anew(engine: Served, address: str) -> None:
    with lakefs.connect(address) as client:
        assert client.get("bkt/a")
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                client.get("bkt/a")
                os.write(tell, b"1")
                with pytest.raises(EngineUnreachable):
                    client.put("bkt/forked", b"f")
                os.write(tell, b"2")
                until = time.monotonic() + WAIT_S
                while not client.exists("bkt/continued"):
                    assert time.monotonic() < until
                    time.sleep(0.05)
                code = 0
            finally:
                os._exit(code)
        assert os.read(told, 1) == b"1"
        with stopped(engine):
            in_time(lambda: os.read(told, 1))
        client.put("bkt/continued", b"")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(told)
        os.close(tell)


def test_a_file_system_of_fsspec_raises_and_connects_anew(engine: Served, address: str) -> None:
    files = filesystem("lake", server=address, timeout=TIMEOUT_S, skip_instance_cache=True)
    try:
        assert files.cat("bkt/a") == b"a" * 1000
        with stopped(engine), pytest.raises(ConnectionError) as caught:
            in_time(lambda: files.pipe("bkt/d", b"d"))
        assert isinstance(caught.value.__cause__, EngineUnreachable)
        assert files.cat("bkt/a") == b"a" * 1000
    finally:
        disconnect()


def test_a_command_fails(engine: Served, address: str) -> None:
    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        variables = {name: os.environ[name] for name in ("LAKE_TIMEOUT", "LAKE_TOKEN") if name in os.environ}
        return subprocess.run(
            [*LAKE, *arguments], env=environment(address) | variables, input=stdin, capture_output=True, timeout=WAIT_S
        )

    with stopped(engine):
        began = time.monotonic()
        done = run("put", "-", "bkt/e", stdin=b"e")
        assert time.monotonic() - began < IN_TIME_S
    assert done.returncode == 69, done
    assert run("cat", "bkt/a").stdout == b"a" * 1000


@pytest.mark.fuse
def test_a_mount_fails_with_eio_and_lives_on(engine: Served, address: str) -> None:
    with mount_rig(LAKE, address) as rig:
        rig.env |= {name: os.environ[name] for name in ("LAKE_TIMEOUT", "LAKE_TOKEN") if name in os.environ}
        rig.mount("-o", "engine_wait=0.1,attr_timeout=0,entry_timeout=0")
        folder = rig.place / "bkt"
        assert (folder / "a").read_bytes() == b"a" * 1000
        with stopped(engine), pytest.raises(OSError) as caught:
            in_time(lambda: (folder / "made").mkdir())
        assert caught.value.errno == errno.EIO
        assert (folder / "a").read_bytes() == b"a" * 1000


def test_a_gateway_answers_503_and_serves_again(engine: Served, address: str, tmp_path: Path) -> None:
    config = tmp_path / "lake.toml"
    config.write_text(f'timeout = "{TIMEOUT_S:g}"\n')
    key = new_key(engine)
    with gateway(address, "--config", str(config), token=os.environ.get("LAKE_TOKEN", "")) as face:
        client = s3_client(face.printed_value("s3"), key)
        client.put_object(Bucket="bkt", Key="g", Body=b"g")
        with stopped(engine), pytest.raises(ClientError) as caught:
            in_time(lambda: client.put_object(Bucket="bkt", Key="h", Body=b"h"))
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503

        def serves() -> bool:
            try:
                return bool(client.get_object(Bucket="bkt", Key="g")["Body"].read() == b"g")
            except ClientError:
                return False

        wait_for(serves)


# --- plug-ins for KV caches ------------------------------------------------------------------------------


@pytest.fixture
def short_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "JOB_S", 1.5)


def one_end(moves: BlockMoves) -> Ended:
    """Wait for the end of a job."""
    ends: list[Ended] = []

    def has_ended() -> bool:
        ends.extend(moves.collect())
        return bool(ends)

    wait_for(has_ended, IN_TIME_S)
    (end,) = ends
    return end


@pytest.mark.usefixtures("short_jobs")
@pytest.mark.parametrize("is_lent", [True, False])
def test_jobs_of_blocks_fail_and_later_ones_are_done(engine: Served, address: str, is_lent: bool) -> None:
    keys = [b"block %d %d %d" % (is_lent, address.startswith("tcp"), index) for index in range(8)]
    settings = SpaceSettings(address, "blocks")
    region = os.memfd_create("host")
    os.ftruncate(region, 64 * BLOCK)
    movers = Movers("test", lambda: Connection(settings))
    memory = memoryview(mmap.mmap(region, 64 * BLOCK))
    moves = BlockMoves(movers, memory, BLOCK, region if is_lent and address.startswith("unix") else None)
    looks = Connection(settings)
    try:
        memory[:] = b"r" * len(memory)
        moves.store(1, keys[:4], range(4), [])
        assert one_end(moves).moved == keys[:4]
        with stopped(engine):
            moves.store(2, keys[4:], range(4, 8), [])
            assert one_end(moves).failed == keys[4:]
            moves.load(3, keys[:4], range(8, 12))
            one_end(moves)  # what is in memory needs no engine
            if address.startswith("tcp"):
                with pytest.raises(EngineUnreachable):
                    in_time(lambda: looks.use(lambda space: space.match(keys)))
        assert in_time(lambda: looks.use(lambda space: space.match(keys))) < IN_TIME_S
        moves.load(4, keys[:4], range(12, 16))
        assert one_end(moves).moved == keys[:4]
    finally:
        movers.close()
        moves.close()
        looks.close()
        os.close(region)


@pytest.mark.usefixtures("short_jobs")
def test_operations_of_lmcache_fail_and_later_ones_are_done(
    engine: Served, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakefs.plugins.kv.lmcache_connector.check_host", lambda *_: None)
    connector = LakeConnector(address, "lmcache")
    try:

        def done(number: int) -> Completion:
            ends: list[Completion] = []

            def has_ended() -> bool:
                ends.extend(end for end in connector.drain_completions() if end[0] == number)
                return bool(ends)

            wait_for(has_ended, IN_TIME_S)
            return ends[0]

        names = [f"{address}/{index}" for index in range(4)]
        buffers = [memoryview(bytearray(b"v" * 300_000)) for _ in names]
        assert done(connector.submit_batch_set(names, buffers))[1]
        with stopped(engine):
            others = [f"{name}/other" for name in names]
            assert not done(connector.submit_batch_set(others, buffers))[1]
            done(connector.submit_batch_exists(names))
            done(connector.submit_batch_get(names, buffers))
        assert done(connector.submit_batch_exists(names))[3] == [True] * 4
        assert done(connector.submit_batch_get(names, buffers))[3] == [True] * 4
    finally:
        connector.close()
