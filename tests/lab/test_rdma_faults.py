"""An engine and its clients over rxe0 when things go wrong: lies, deaths, queue pairs in error, links that go down."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import EngineUnreachable, FabricFailed, SessionLost
from lakefs.get.pools import Pool
from lakefs.ids import data_chunk_id
from lakefs.transport.fabric import Piece, Remote
from lakefs.transport.fabric_mover import Mover
from lakefs.transport.rdma import open_fabric
from lakefs.wire import messages as m
from lakefs.wire.fabric_messages import FabricMemory
from lakefs.wire.media import MEDIA_FABRIC, MEDIUM_FABRIC
from tests.lab.hardware import shell, wait_for
from tests.lab.rdma_rig import Raw, Rig, Served, command, ended, forked

pytestmark = [pytest.mark.slow, pytest.mark.lab("rdma")]
KIB, MIB = 1 << 10, 1 << 20
TIER = 128 * MIB
CAP_IPC_LOCK = 14  # of linux/capability.h
CAPABILITIES_VERSION = 0x20080522
Transfer = Callable[[Lake, Pool], object]
TRANSFERS: dict[str, Transfer] = {
    "get": lambda client, pool: client.get("lab/victim"),
    "load": lambda client, pool: client.load_many(["lab/victim"], pool, [0]),
    "put": lambda client, pool: client.put("lab/victim-put", os.urandom(8 * MIB)),
}
each_way = pytest.mark.parametrize("way", TRANSFERS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(Served(tmp_path_factory.mktemp("engine")))
    yield made
    assert made.served.end(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def victim(rig: Rig) -> bytes:
    """The content of lab/victim, which the tier has."""
    content = os.urandom(8 * MIB)
    rig.warm("lab/victim", content)
    return content


def serves_by_rdma(rig: Rig, content: bytes) -> None:
    """Check that a new client gets the victim, loads it and puts it by RDMA."""
    with rig.lake() as client, client.pool(size_bytes=len(content)) as pool:
        assert client.get("lab/victim") == content
        client.load_many(["lab/victim"], pool, [0])
        assert bytes(pool.buffer) == content
        given = os.urandom(2 * MIB)
        client.put("lab/victim-check", given)
        assert client.get("lab/victim-check") == given
        assert not client.rdma.reason
        assert client.rdma.bytes >= 2 * len(content) + len(given)


# --- keys and memory -------------------------------------------------------------------------------------


def granted(raw: Raw, content: bytes) -> m.Grant:
    """Return a grant to READ a chunk."""
    located = raw.engine.call(m.Locate([data_chunk_id(content)], MEDIA_FABRIC)).message
    assert isinstance(located, m.Located)
    assert located.grants[0].medium == MEDIUM_FABRIC
    return located.grants[0]


def read(raw: Raw, address: int, key: int) -> bytes:
    """READ 4 MiB over the client's queue pair; nothing is touched when it fails."""
    raw.memory[:] = bytes(4 * MIB)
    Mover(raw.link).move([Piece(raw.region, 0, address, key, 4 * MIB)], 30.0)
    return bytes(raw.memory)


def test_a_client_reads_nothing_but_slabs_and_only_while_it_is_connected(rig: Rig, victim: bytes) -> None:
    content = victim[: 4 * MIB]
    raw, other = Raw(rig), Raw(rig)
    grant = granted(raw, content)
    assert read(raw, grant.offset, grant.segment) == content
    for address, key in (
        (grant.offset + TIER, grant.segment),
        (grant.offset - TIER, grant.segment),
        (grant.offset, grant.segment ^ 0x100),
        (other.region.address, other.region.remote_key),
    ):
        with pytest.raises(FabricFailed):
            read(raw, address, key)
        assert bytes(raw.memory) == bytes(4 * MIB)
        raw.connect()
    assert read(raw, grant.offset, grant.segment) == content
    pairs = rig.rdma()["queue_pairs"]
    raw.engine.close()
    wait_for(lambda: rig.rdma()["queue_pairs"] == pairs - 1, "the queue pair outlives its connection")
    with pytest.raises(FabricFailed):
        read(raw, grant.offset, grant.segment)
    assert bytes(raw.memory) == bytes(4 * MIB)
    assert read(other, grant.offset, grant.segment) == content
    raw.close()
    other.close()


def test_memory_that_is_announced_for_a_put_and_given_up_stores_nothing(rig: Rig) -> None:
    raw, other = Raw(rig), Raw(rig)
    opened = raw.engine.call(m.SessionOpen()).message
    assert isinstance(opened, m.SessionOpened)

    def store(memory: FabricMemory) -> Any:
        return raw.engine.call(m.StoreSlots(opened.session, 0, [0], [4 * MIB], memory)).message

    other.memory[:] = os.urandom(4 * MIB)
    with pytest.raises(SessionLost):
        store(FabricMemory(other.region.remote_key, other.region.address, 4 * MIB))
    raw.connect()
    gone = FabricMemory(raw.region.remote_key, raw.region.address, 4 * MIB)
    raw.region.close()
    with pytest.raises(SessionLost):
        store(gone)
    raw.connect()
    raw.memory[:] = os.urandom(4 * MIB)
    raw.region = raw.fabric.register(raw.memory, Remote.READ)
    stored = store(FabricMemory(raw.region.remote_key, raw.region.address, 4 * MIB))
    assert stored.chunks == [data_chunk_id(raw.memory)]
    raw.close()
    other.close()


# --- queue pairs and links -------------------------------------------------------------------------------


def put_in_error(client: Lake) -> None:
    """Put the client's queue pair in the state of errors: it READs what is not there."""
    fabric = driver_of(client).steps.fabric
    assert fabric is not None
    assert fabric.link is not None
    link = fabric.link.mover._link
    region = fabric._device().register(bytearray(4096), Remote.NONE)
    link.post(1, [Piece(region, 0, 1 << 20, 0x77, 64)])


@pytest.mark.parametrize("way", ["get", "put"])
def test_a_queue_pair_in_error_is_made_anew_once_then_bytes_go_over_tcp(way: str, rig: Rig, victim: bytes) -> None:
    with rig.lake() as client, client.pool(size_bytes=len(victim)) as pool:
        client.put("lab/opens", os.urandom(2 * MIB))
        before = rig.rdma()["queue_pairs_made"]
        for turn in range(3):
            if turn < 2:
                put_in_error(client)
            TRANSFERS[way](client, pool)
            assert client.get("lab/victim") == victim
            client.load_many(["lab/victim"], pool, [0])
            assert bytes(pool.buffer) == victim
            assert rig.rdma()["queue_pairs_made"] == before + 1
        assert client.rdma.reason


def test_a_link_that_goes_down_in_a_get_of_the_command_line_leaves_the_way_over_tcp(
    rig: Rig, victim: bytes, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(rig.token)
    options = ("--server", rig.address, "--token-file", str(token))
    names = [f"lab/down/{number}" for number in range(4)]
    contents = [os.urandom(8 * MIB) for _ in names]
    with rig.lake(rdma=False) as client:
        for name, content in zip(names, contents, strict=True):
            client.put(name, content)
    before = rig.rdma()["queue_pairs_made"]
    got = forked(lambda: command("get", "-r", "lab/down/", str(tmp_path / "got"), *options))
    wait_for(lambda: rig.rdma()["queue_pairs_made"] > before, "no queue pair was made")
    shell("ip link set v0 down")
    try:
        assert ended(got) == 0
    finally:
        shell("ip link set v0 up")
        wait_for(lambda: not isinstance(open_fabric("rxe0"), str), "rxe0 has not come back")
    found = {path.name: path.read_bytes() for path in (tmp_path / "got").rglob("*") if path.is_file()}
    assert found == {name.removeprefix("lab/down/"): content for name, content in zip(names, contents, strict=True)}
    serves_by_rdma(rig, victim)


# --- deaths ----------------------------------------------------------------------------------------------


@each_way
def test_a_client_killed_in_a_transfer_leaves_the_engine_whole(way: str, rig: Rig, victim: bytes) -> None:
    begun, told = os.pipe()

    def transfer() -> None:
        with rig.lake() as client, client.pool(size_bytes=len(victim)) as pool:
            while True:
                TRANSFERS[way](client, pool)
                os.write(told, b".")

    pid = forked(transfer)
    os.read(begun, 1)
    time.sleep(0.3)  # in the middle of the next
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    os.close(begun)
    os.close(told)
    wait_for(lambda: rig.rdma()["queue_pairs"] == 0, "the killed client's queue pair stays")
    serves_by_rdma(rig, victim)


@pytest.mark.parametrize("way", ["get", "load"])
def test_an_engine_killed_in_a_transfer_is_used_again_when_it_is_back(way: str, rig: Rig, victim: bytes) -> None:
    with rig.lake() as client, client.pool(size_bytes=len(victim)) as pool:
        TRANSFERS[way](client, pool)
        failures: list[object] = []

        def move() -> None:
            try:
                for _ in range(1000):
                    TRANSFERS[way](client, pool)
            except EngineUnreachable as error:
                failures.append(error)

        thread = threading.Thread(target=move)
        thread.start()
        time.sleep(0.5)
        rig.served.end(signal.SIGKILL)
        thread.join()
        assert failures
        rig.served.start()
        assert client.get("lab/victim") == victim
        client.load_many(["lab/victim"], pool, [0])
        assert bytes(pool.buffer) == victim
        assert not client.rdma.reason


# --- limits ----------------------------------------------------------------------------------------------


def may_lock_64_kib() -> None:
    """Let this process lock 64 KiB, without the capability to lock more."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KIB, 64 * KIB))
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert not libc.capget(header, sets)
    for which in (0, 1):  # effective, permitted
        sets[which] &= ~(1 << CAP_IPC_LOCK)
    assert not libc.capset(header, sets)


def test_an_engine_that_may_lock_64_kib_serves_over_tcp_with_the_reason(tmp_path: Path) -> None:
    poor = Rig(Served(tmp_path, 7778, may_lock_64_kib))
    content = os.urandom(8 * MIB)
    poor.warm("lab/object", content)
    with poor.lake() as client, client.pool(size_bytes=8 * MIB) as pool:
        for _ in range(2):
            assert client.get("lab/object") == content
            client.load_many(["lab/object"], pool, [0])
            assert bytes(pool.buffer) == content
            given = os.urandom(5 * MIB)
            client.put("lab/given", given)
            assert client.get("lab/given") == given
        assert client.rdma.bytes == 0
        assert "registered" in client.rdma.reason
    assert "ulimit -l" in poor.rdma()["reason"]
    assert poor.served.end(signal.SIGTERM) == 0


# --- what is on disk alone, and many small objects -------------------------------------------------------


def test_what_is_on_disk_alone_is_got_by_rdma_and_many_objects_are_put_by_it(rig: Rig) -> None:
    objects = {f"lab/many-{number}": os.urandom(100_000 + number) for number in range(40)}
    content = os.urandom(10 * MIB + 5)
    with rig.lake() as client:
        client.put_many(list(objects.items()), create_bucket=True)
        assert client.rdma.bytes == sum(map(len, objects.values()))
        client.put("lab/disk", content)
        before = client.rdma.bytes
        assert client.get("lab/disk") == content
        assert client.rdma.bytes == before + len(content)
        assert not client.rdma.reason
        assert {name: client.get(name) for name in objects} == objects


# --- numbers: of one boot, in comparison only ------------------------------------------------------------


def test_the_engine_s_loop_pauses_no_longer_than_over_tcp(rig: Rig) -> None:
    """The middle of each way's rounds counts: what else runs on the machine stops both."""
    content = os.urandom(4 * MIB)
    rig.warm("lab/pause", content)
    pauses: dict[bool, list[float]] = {False: [], True: []}
    with (
        rig.lake(rdma=False) as tcp,
        rig.lake() as rdma,
        tcp.pool(size_bytes=4 * MIB) as tcp_pool,
        rdma.pool(size_bytes=4 * MIB) as pool,
    ):
        rdma.load_many(["lab/pause"], pool, [0])
        for turn in range(10):
            by_rdma = bool(turn % 2)
            client, memory = (rdma, pool) if by_rdma else (tcp, tcp_pool)
            rig.served.longest_pause_s()
            assert client.get("lab/pause") == content
            client.load_many(["lab/pause"], memory, [0])
            client.put("lab/pause-put", os.urandom(4 * MIB))
            pauses[by_rdma].append(rig.served.longest_pause_s())
        assert not rdma.rdma.reason
    over_tcp, by = statistics.median(pauses[False]), statistics.median(pauses[True])
    sys.stdout.write(f"longest pause of the loop: RDMA {by * 1e3:.1f} ms, TCP {over_tcp * 1e3:.1f} ms\n")
    assert by <= 2 * over_tcp, pauses
