"""An engine and its clients over rxe0, as processes: the right bytes by RDMA, under faults, and what they cost."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakefs.client.connect import connect
from lakefs.content.verify import Check
from lakefs.errors import SessionLost
from lakefs.ids import data_chunk_id
from lakefs.transport.fabric import Remote
from lakefs.transport.rdma import open_fabric
from tests.lab.hardware import shell
from tests.lab.rdma_rig import Raw, Rig, Served, command, ended, forked

pytestmark = [pytest.mark.slow, pytest.mark.lab("rdma")]
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("engine")
    made = Rig(Served(folder))
    yield made
    assert made.served.end(signal.SIGTERM) == 0


def test_the_command_line_gets_and_puts_by_rdma(rig: Rig, tmp_path: Path) -> None:
    content = os.urandom(8 * MIB)
    rig.warm("lab/command", content)
    token = tmp_path / "token"
    token.write_text(rig.token)
    options = ("--server", rig.address, "--token-file", str(token))
    before = rig.rdma()["queue_pairs_made"]
    got = forked(lambda: command("get", "lab/command", str(tmp_path / "got"), *options))
    assert ended(got) == 0
    assert (tmp_path / "got").read_bytes() == content
    assert rig.rdma()["queue_pairs_made"] == before + 1
    (tmp_path / "given").write_bytes(given := os.urandom(9 * MIB))
    put = forked(lambda: command("put", str(tmp_path / "given"), "lab/given", *options))
    assert ended(put) == 0
    assert rig.rdma()["queue_pairs_made"] == before + 2
    with rig.lake(rdma=False) as client:
        assert client.get("lab/given") == given


@pytest.mark.parametrize("check", list(Check))
def test_reads_loads_and_puts_move_the_right_bytes(rig: Rig, check: Check) -> None:
    content = os.urandom(8 * MIB)
    rig.warm("lab/object", content)
    parts = [os.urandom(size) for size in (1, 4000, 64 * KIB, 300_000, 4 * MIB)]
    with rig.lake(check=check) as client, client.pool(size_bytes=16 * MIB) as pool:
        assert client.get("lab/object") == content
        assert client.rdma.chunks == 2
        put = os.urandom(5 * MIB)
        client.put("lab/put", put)
        for number, part in enumerate(parts):
            client.put(f"lab/{number}", part)
        offsets = [100, 5000, 10_000, 100_000, 1_000_000]
        client.load_many([data_chunk_id(part) for part in parts], pool, offsets)
        expected = bytearray(16 * MIB)
        for part, offset in zip(parts, offsets, strict=True):
            expected[offset : offset + len(part)] = part
        assert bytes(pool.buffer) == expected
        assert not client.rdma.reason
        assert client.rdma.bytes >= len(content) + len(put) + sum(map(len, parts))
    with rig.lake(rdma=False) as other:
        assert other.get("lab/put") == put


def test_cells_that_change_hands_all_the_time_give_no_wrong_byte(rig: Rig) -> None:
    """The tier has room for 15 of 24 objects: readers meet cells that are demoted and filled while they READ."""
    contents = {f"lab/churn-{number}": os.urandom(4 * MIB) for number in range(24)}
    with rig.lake(rdma=False) as client:
        for name, content in contents.items():
            client.put(name, content)
    moved: list[int] = []
    wrong: list[str] = []

    def read(seed: int) -> None:
        with rig.lake(check=Check.NONE) as client:
            for turn in range(20):
                name = f"lab/churn-{(seed * 7 + turn * (1 + seed)) % 24}"
                if client.get(name) != contents[name]:
                    wrong.append(name)
            moved.append(client.rdma.chunks)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(moved) > 0, "nothing was read by RDMA"


def test_keys_of_others_and_memory_that_is_gone_end_only_the_liar_s_queue_pair(rig: Rig) -> None:
    content = os.urandom(4 * MIB)
    with rig.lake(rdma=False) as client:
        client.put("lab/liar", content, create_bucket=True)
    chunk = data_chunk_id(content)
    one, other = Raw(rig), Raw(rig)
    with pytest.raises(SessionLost):
        one.load(chunk, other.region.remote_key, other.region.address)
    assert bytes(other.memory) == bytes(4 * MIB)
    one.connect()
    assert one.load(chunk, one.region.remote_key, one.region.address).lengths == [4 * MIB]
    assert bytes(one.memory) == content
    key, address = one.region.remote_key, one.region.address
    one.region.close()
    with pytest.raises(SessionLost):
        one.load(chunk, key, address)
    assert other.load(chunk, other.region.remote_key, other.region.address).lengths == [4 * MIB]
    one.close()
    other.close()


def test_a_link_that_goes_down_leaves_the_way_over_tcp(rig: Rig) -> None:
    content = os.urandom(4 * MIB)
    rig.warm("lab/down", content)
    with rig.lake() as client, client.pool(size_bytes=4 * MIB) as pool:
        assert client.get("lab/down") == content
        shell("ip link set v0 down")
        try:
            assert client.get("lab/down") == content
            client.load_many([data_chunk_id(content)], pool, [0])
            assert bytes(pool.buffer) == content
            given = os.urandom(5 * MIB)
            client.put("lab/down-put", given)
            assert client.get("lab/down-put") == given
            assert client.rdma.reason
        finally:
            shell("ip link set v0 up")
    with rig.lake() as client:
        assert client.get("lab/down") == content


def test_a_client_that_may_lock_64_kib_goes_over_tcp_with_the_reason(rig: Rig, tmp_path: Path) -> None:
    content = os.urandom(8 * MIB)
    rig.warm("lab/poor", content)
    token = rig.token

    def poor() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KIB, 64 * KIB))
        os.setgid(65534)
        os.setuid(65534)
        with connect(rig.address, token=token) as client, client.pool(size_bytes=8 * MIB) as pool:
            assert client.get("lab/poor") == content
            assert client.load_many(["lab/poor"], pool, [0]) == [len(content)]
            assert bytes(pool.buffer[: len(content)]) == content
            client.put("lab/poor-put", content + b"x")
            assert client.get("lab/poor-put") == content + b"x"
            assert client.rdma.bytes == 0
            assert client.rdma.reason

    assert ended(forked(poor)) == 0


def test_16_chunks_come_by_pool_grant_by_reads_and_over_tcp(rig: Rig) -> None:
    contents = [os.urandom(64 * KIB) for _ in range(16)]
    for number, content in enumerate(contents):
        rig.warm(f"lab/small-{number}", content)
    rig.warm("lab/opens", os.urandom(4 * MIB))
    chunks = [data_chunk_id(content) for content in contents]
    buffers = [bytearray(64 * KIB) for _ in chunks]
    offsets = [number * 64 * KIB for number in range(16)]
    with (
        rig.lake(check=Check.CRC32C) as client,
        rig.lake(check=Check.CRC32C, rdma=False) as tcp,
        client.pool(size_bytes=MIB) as pool,
        tcp.pool(size_bytes=MIB) as tcp_pool,
    ):
        client.get("lab/opens")
        before = client.rdma.chunks
        client.chunks.get_many_into(chunks, buffers)
        assert buffers == contents
        assert client.rdma.chunks == before + 16
        for _ in range(2):
            client.load_many(chunks, pool, offsets)
            tcp.load_many(chunks, tcp_pool, offsets)
            assert bytes(pool.buffer) == bytes(tcp_pool.buffer) == b"".join(contents)


def test_the_engine_registers_its_tier_and_64_mib_at_most(rig: Rig) -> None:
    found = rig.rdma()
    sys.stdout.write(f"registered: {found['registered_bytes'] / MIB:.0f} MiB, of a tier of 128 MiB\n")
    assert found["registered_bytes"] <= 128 * MIB + 64 * MIB


def test_addresses_of_regions_are_those_of_the_memory() -> None:
    fabric = open_fabric("rxe0")
    assert not isinstance(fabric, str), fabric
    memory = bytearray(8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    region = fabric.register((address, 8192), Remote.READ)
    assert region.address == address
    fabric.close()
