"""A lake in the workers of a data loader: a fork has its own connection; a spawned one is pickled and connects."""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import lakefs
from engine.process.embedded import open_lake
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable, InvalidArgument
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.put.shared_memory import SharedMemory
from tests.descriptors import open_descriptors
from tests.e2e.served import WAIT_S, Served, environment, serving
from tests.served_devices import DEVICES

pytestmark = pytest.mark.thorough

ONE_CHUNK, LARGE = 100 * KIB, 12 * MIB
PARENT = """
from lakefs.client.facade import driver_of
import os, sys, time, lakefs
lake = lakefs.connect()
opened = lake.open("bkt/large")
opened.read(1)
if not os.fork():
    time.sleep(60)
print("forked", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def objects(served: Served) -> None:
    with lakefs.connect(served.server) as lake:
        for name, size in (("small", 100), ("chunk", ONE_CHUNK), ("large", LARGE)):
            lake.put(f"bkt/{name}", content(name, size), create_bucket=True)


def content(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


def in_child(work: Callable[[], object], fork: Callable[[], int] = os.fork, *, limit_s: int = 30) -> int:
    """Do the work in a child; return the child's id."""
    child = fork()
    if child:
        return child
    signal.alarm(limit_s)  # ends a child that waits for a lock which no thread of its own holds
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - nothing of the test's frames goes on in the child
        traceback.print_exception(error)
        os._exit(1)
    os._exit(0)


def ended_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def read_all_ways(lake: lakefs.Lake) -> None:
    """Read by name, by chunk and into a pool, and put something."""
    chunk = content("chunk", ONE_CHUNK)
    identifier = bytes(data_chunk_id(chunk))
    assert lake.get("bkt/small") == content("small", 100)
    assert lake.get_many(["bkt/large", "bkt/chunk"]) == [content("large", LARGE), chunk]
    for _ in range(2):  # first by a request, then by the shared index
        assert lake.chunks.get(identifier) == chunk
    with lake.pool(size_bytes=ONE_CHUNK) as pool:
        for _ in range(2):
            assert lake.load_many([identifier], pool, [0]) == [ONE_CHUNK]
            assert pool.buffer[:ONE_CHUNK] == chunk
    lake.put(f"bkt/of-{os.getpid()}", content("large", 3 * MIB), create_bucket=True)


def open_segments(served: Served) -> int:
    """Count the descriptors of this store's segments, of which a lake gives none; earlier tests may have left some."""
    folder = f":{served.data.resolve()}/segments/"
    return sum(folder in descriptor for descriptor in open_descriptors())


def alone(lake: lakefs.Lake) -> dict[str, int]:
    """Return the engine's figures of clients, once it has noticed that no other is left."""
    until = time.monotonic() + WAIT_S
    while (found := lake.status()["clients"])["connections"] > 1:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return dict(found)


@pytest.mark.parametrize("check", list(Check))
def test_a_forked_child_has_a_lake_of_its_own_and_the_parents_goes_on(served: Served, check: Check) -> None:
    with lakefs.connect(served.server, check=check) as lake:
        read_all_ways(lake)
        lake.put("bkt/fresh", os.urandom(ONE_CHUNK), create_bucket=True)  # not in the DRAM tier yet
        lake.get("bkt/fresh")
        assert open_segments(served) or DEVICES
        driver = driver_of(lake)
        mapping = nullcontext() if DEVICES else lake.map("bkt/large")
        with lake.open("bkt/large") as opened, mapping as mapped:
            assert opened.read(10) == content("large", LARGE)[:10]

            def work() -> None:
                assert open_segments(served) == 0
                assert driver.epoch > 1
                if mapped is not None:
                    assert not mapped.is_pinned()
                    assert mapped.view == content("large", LARGE)
                assert opened.read() == content("large", LARGE)[10:]
                read_all_ways(lake)
                assert ended_well(in_child(lambda: read_all_ways(lake)))
                lake.close()
                with pytest.raises(EngineUnreachable, match="closed"):
                    lake.get("bkt/small")

            child = in_child(work)
            assert ended_well(child)
            assert mapped is None or mapped.is_pinned()
            assert opened.read() == content("large", LARGE)[10:]
        assert lake.get(f"bkt/of-{child}") == content("large", 3 * MIB)
        assert driver.epoch == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_children_of_a_lake_that_other_threads_are_at_wait_for_none_of_them(served: Served) -> None:
    """They do not wait for a thread that imports a module for the first time, either."""

    def parent() -> None:
        for name in ("blocking_chunks", "blocking_loads"):
            sys.modules.pop(f"lakefs.client.{name}", None)
        done = threading.Event()
        with lakefs.connect(served.server) as lake:

            def read_on() -> None:
                while not done.is_set():
                    read_all_ways(lake)

            readers = [threading.Thread(target=read_on) for _ in range(3)]
            for reader in readers:
                reader.start()
            children = []
            for _ in range(20):
                children.append(in_child(lambda: read_all_ways(lake)))
                time.sleep(0.01)
            ends = [ended_well(child) for child in children]
            done.set()
            for reader in readers:
                reader.join()
            assert all(ends)
            assert driver_of(lake).epoch == 1

    assert ended_well(in_child(parent, limit_s=90))


def test_a_pool_is_of_one_process_and_stays_lent(served: Served) -> None:
    chunk = content("chunk", ONE_CHUNK)
    wanted = [bytes(data_chunk_id(chunk))]
    with lakefs.connect(served.server) as lake, lake.pool(size_bytes=ONE_CHUNK) as pool:
        driver = driver_of(lake)
        driver.run(driver.steps.load_many(wanted, pool, [0]))
        lent = pool.number

        def work() -> None:
            with pytest.raises(InvalidArgument, match="another process"):
                lake.load_many(wanted, pool, [0])
            with pytest.raises(InvalidArgument, match="another process"):
                driver.run(driver.steps.load_many(wanted, pool, [0]))
            driver.run(driver.steps.return_pool(pool))

        assert ended_well(in_child(work))
        pool.buffer[:] = bytes(ONE_CHUNK)
        driver.run(driver.steps.load_many(wanted, pool, [0]))
        assert pool.buffer == chunk
        assert pool.number == lent


def test_room_of_shared_memory_is_given_in_a_child_whoever_was_at_it_before() -> None:
    memory = SharedMemory(MIB)
    with memory._lock:
        assert ended_well(in_child(lambda: memory.allocate(10)))
    memory.close()


def test_an_operation_in_whose_midst_was_forked_is_the_parents(served: Served) -> None:
    children: list[int] = []

    def fork_once(done: int, present: int) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(30)

    with lakefs.connect(served.server) as lake:
        try:
            lake.put("bkt/forked", io.BytesIO(content("large", LARGE)), progress=fork_once, create_bucket=True)
        except EngineUnreachable as error:
            os._exit(0 if "midst" in error.message and lake.get("bkt/small") else 1)
        if children == [0]:
            os._exit(1)
        assert ended_well(children[0])
        assert lake.get("bkt/forked") == content("large", LARGE)
        assert driver_of(lake).epoch == 1


def test_a_lake_that_was_closed_is_so_in_a_child_too(served: Served) -> None:
    lake = lakefs.connect(served.server)
    lake.close()

    def work() -> None:
        with pytest.raises(EngineUnreachable, match="closed"):
            lake.get("bkt/small")
        lake.close()

    assert ended_well(in_child(work))


def test_a_store_that_the_parent_has_open_is_not_asked_by_a_child(folder: Path) -> None:
    with open_lake(folder / "store") as lake:
        lake.put("bkt/small", b"content", create_bucket=True)

        def work() -> None:
            with pytest.raises(EngineUnreachable, match="forked"):
                lake.get("bkt/small")
            lake.close()

        assert ended_well(in_child(work))
        assert lake.get("bkt/small") == b"content"


def test_a_fork_that_python_does_not_see_is_refused(served: Served) -> None:
    with lakefs.connect(served.server) as lake:

        def work() -> None:
            with pytest.raises(InvalidArgument, match="another process"):
                lake.get("bkt/small")
            lake.close()

        assert ended_well(in_child(work, ctypes.PyDLL(None).fork))
        assert lake.get("bkt/small") == content("small", 100)
        assert driver_of(lake).epoch == 1


def test_what_a_process_held_ends_with_it_though_a_child_lives_on(served: Served) -> None:
    with lakefs.connect(served.server) as lake:
        before = alone(lake)
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            env=environment(served.server),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"forked\n"
            assert lake.status()["clients"] != before
            parent.kill()
            parent.wait()
            assert alone(lake) == before
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
            if parent.stdout is not None:
                parent.stdout.close()


def _read_in_worker(lake: lakefs.Lake) -> int:
    read_all_ways(lake)
    return driver_of(lake).epoch


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_pool_are_given_a_lake(served: Served, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with lakefs.connect(served.server, check=Check.CRC32C) as lake, multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_read_in_worker, [lake]) == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_lakes_that_nobody_closes_leave_nothing_behind(served: Served) -> None:
    with lakefs.connect(served.server) as lake:
        for number in range(3):  # each is read only once, so the DRAM tier takes none
            lake.put(f"bkt/fresh-{number}", os.urandom(ONE_CHUNK), create_bucket=True)
        pickled, before = pickle.dumps(lake), alone(lake)

        def work(number: int) -> None:
            other = pickle.loads(pickled)
            other.get(f"bkt/fresh-{number}")
            assert open_segments(served) or DEVICES

        def nothing_is_left() -> None:
            for number in range(3):
                work(number)
            gc.collect()
            assert open_segments(served) == 0

        assert ended_well(in_child(nothing_is_left))
        assert alone(lake) == before


def test_a_pickle_has_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder, "--native", "127.0.0.1:0") as served:
        token = served.token()
        (address,) = [line.split()[1] for line in served.printed if "tcp://" in line]
        with lakefs.connect(address, token=token, check=Check.CRC32C) as lake:
            pickled = pickle.dumps(lake)
        assert token.encode() not in pickled
        with pytest.raises(lakefs.LakeError, match="token"):
            pickle.loads(pickled)
        monkeypatch.setenv("LAKE_TOKEN", token)
        with pickle.loads(pickled) as other:
            assert (other.address, driver_of(other).steps.check) == (address, Check.CRC32C)
            assert other.buckets() == []
