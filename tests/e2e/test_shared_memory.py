"""Shared memory between real processes: restarts of the engine, and clients that die or lie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import trio

import lakefs
from lakefs.client.connect_trio import connect_trio
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES
from lakefs.put.shared_memory import SharedMemory
from tests.e2e.served import ROOT, Served, environment

HOLDER = """
import sys, time, lakefs
with lakefs.connect() as lake, lake.shared_memory(8 << 20) as memory:
    lake.put("bkt/held", memory.allocate(5 << 20), create_bucket=True)
    print("held", flush=True)
    time.sleep(1000)
"""
SCRIBBLER = """
import os, sys
descriptor = int(sys.argv[1])
print("begun", flush=True)
number = 0
while True:
    number += 1
    os.pwrite(descriptor, number.to_bytes(8, "little") * 8192, number * 65536 % (4 << 20))
"""


def lent(pid: int) -> int:
    """Count the descriptors and mappings of shared memory that a process has."""
    count = Path(f"/proc/{pid}/maps").read_text().count("lake-memory")
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += "lake-memory" in os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue
    return count


def test_a_client_that_is_killed_leaves_nothing_of_its_memory_in_the_engine(served: Served) -> None:
    assert served.process is not None
    client = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environment(served.server), stdout=subprocess.PIPE, cwd=ROOT
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"held\n"
    assert lent(served.process.pid) > 0
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    with lakefs.connect(served.server) as lake:
        for _ in range(1000):
            if not lent(served.process.pid):
                break
            lake.exists("bkt/held")
        assert lent(served.process.pid) == 0
        assert lake.status()["lent_memory"] == {"count": 0, "bytes": 0}
        assert lake.get("bkt/held") == bytes(5 << 20)


def test_a_client_that_writes_while_it_is_read_harms_only_what_it_puts(served: Served) -> None:
    with lakefs.connect(served.server) as lake, lake.shared_memory(4 << 20) as memory:
        scribbler = subprocess.Popen(
            [sys.executable, "-c", SCRIBBLER, str(memory.descriptor)],
            pass_fds=[memory.descriptor],
            stdout=subprocess.PIPE,
        )
        assert scribbler.stdout is not None
        assert scribbler.stdout.readline() == b"begun\n"
        blobs = []
        for number in range(20):
            slots = [(f"bkt/torn-{number}-{part}", memory.slot(part << 20, 1 << 20)) for part in range(4)]
            blobs += [stat.blob for stat in lake.put_many(slots, create_bucket=True)]
            blobs.append(lake.put(f"bkt/torn-{number}", memory.slot(0, 4 << 20), create_bucket=True).stat.blob)
        scribbler.kill()
        scribbler.wait()
        scribbler.stdout.close()
        names = [f"bkt/torn-{number}{part}" for number in range(20) for part in ("-0", "-1", "-2", "-3", "")]
        for name, blob in zip(names, blobs, strict=True):
            assert data_chunk_id(lake.get(name)) == blob
        assert lake.fsck(full=True)["damage"] == 0


def test_memory_is_lent_anew_to_an_engine_that_came_back(folder: Path) -> None:
    served = Served(folder)
    content = os.urandom(2 * CHUNK_BYTES + 5)
    try:
        with lakefs.connect(served.server) as lake, lake.shared_memory(3 * CHUNK_BYTES) as memory:
            memory.buffer[: len(content)] = content
            whole, part = memory.slot(0, len(content)), memory.slot(3, 1000)
            lake.put("bkt/whole", whole, create_bucket=True)
            served.kill()
            served.start()
            # A read first: a request that changes names is not sent twice, whatever happened to the connection.
            assert lake.get("bkt/whole") == content
            lake.put("bkt/again", whole)
            assert lake.put("bkt/part", part).size_bytes == 1000
            assert served.process is not None
            assert lent(served.process.pid) > 0
            assert lake.get("bkt/again") == content
            assert lake.get("bkt/part") == content[3:1003]
    finally:
        served.stop()


def test_the_trio_client_puts_from_shared_memory_at_once(served: Served) -> None:
    async def main() -> None:
        async with connect_trio(served.server) as lake, lake.shared_memory(16 << 20) as memory:
            contents = [os.urandom(size) for size in (100, 70_000, 1 << 20, CHUNK_BYTES, CHUNK_BYTES + 1)]

            async def put(number: int) -> None:
                with memory.allocate(len(contents[number])) as slot:
                    slot.buffer[:] = contents[number]
                    await lake.put(f"bkt/trio-{number}", slot, create_bucket=True)

            async with trio.open_nursery() as nursery:
                for number in range(len(contents)):
                    nursery.start_soon(put, number)
            for number, content in enumerate(contents):
                assert await lake.get(f"bkt/trio-{number}") == content
            assert (await lake.status())["lent_memory"]["count"] == 1
            assert isinstance(memory, SharedMemory)

    trio.run(main)
