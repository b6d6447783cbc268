"""One suite for every `IoQueue`: io_uring, threads, and inline on a simulated disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from engine.host.io_queue import OffloadQueue, opened_ring, running_ring_queue
from engine.host.local_disk import LocalDisk
from lakefs.errors import DiskFailed
from lakefs.host.offload import InlineOffload, ThreadOffload
from lakefs.limits import PAGE_BYTES, RING_ENTRIES
from lakefs.ports import Disk, DiskFile, FileRead, IoQueue
from tests.sim.world.disk import SimDisk

KINDS = ["ring", "ring of one", "threads", "simulated"]
CONTENT = b"".join(index.to_bytes(4, "big") for index in range(64 << 10))
Body = Callable[[IoQueue, Disk, DiskFile], Awaitable[None]]


@asynccontextmanager
async def queue_of(kind: str) -> AsyncIterator[IoQueue]:
    if kind == "simulated":
        yield OffloadQueue(InlineOffload())
        return
    async with ThreadOffload(3, "test") as offload:
        threads = OffloadQueue(offload)
        if kind == "threads":
            yield threads
            return
        ring = opened_ring(1 if kind == "ring of one" else RING_ENTRIES)
        if isinstance(ring, str):
            pytest.skip(ring)
        async with running_ring_queue(ring, threads) as queue:
            yield queue


def drive(kind: str, folder: Path, body: Body) -> None:
    disk: Disk = SimDisk(1) if kind == "simulated" else LocalDisk(folder)
    writing = disk.open("f", create=True)
    writing.pwrite(CONTENT, 0)
    writing.sync_data()
    writing.close()
    file = disk.open("f", read_only=True)
    if kind != "simulated":
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    async def main() -> None:
        with trio.fail_after(60):
            async with queue_of(kind) as queue:
                await body(queue, disk, file)

    trio.run(main)
    file.close()


def places(count: int, length: int = 100) -> list[tuple[int, bytearray]]:
    """Pieces spread over the file, in no order."""
    return [(index * 7919 * 13 % (len(CONTENT) - length), bytearray(length)) for index in range(count)]


def reads_of(file: DiskFile, wanted: list[tuple[int, bytearray]]) -> list[FileRead]:
    return [FileRead(file, memoryview(buffer), offset) for offset, buffer in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_each_buffer_gets_the_bytes_of_its_place(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        for length in (1, 100, 70_000):
            wanted = places(50, length)
            assert await queue.read_many(reads_of(file, wanted)) == [length] * 50
            assert all(buffer == CONTENT[offset : offset + length] for offset, buffer in wanted)
        assert await queue.read_many([]) == []

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_more_reads_than_the_queue_holds_are_all_done(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        wanted = places(3 * RING_ENTRIES + 5)
        assert await queue.read_many(reads_of(file, wanted)) == [100] * len(wanted)
        assert all(buffer == CONTENT[offset : offset + 100] for offset, buffer in wanted)

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_many_callers_at_once_each_get_their_own(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        async def one(caller: int) -> None:
            for step in range(5):
                offset = (caller * 5 + step) * 1000
                buffers = [(offset + piece * 10, bytearray(10)) for piece in range(30)]
                assert await queue.read_many(reads_of(file, buffers)) == [10] * 30
                assert all(buffer == CONTENT[at : at + 10] for at, buffer in buffers)

        async with trio.open_nursery() as nursery:
            for caller in range(40):
                nursery.start_soon(one, caller)

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_is_short_only_at_the_end_of_the_file(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        end = len(CONTENT)
        wanted = [(end - 3, bytearray(b"x" * 5)), (0, bytearray(4)), (end, bytearray(1)), (end + 9, bytearray(1))]
        assert await queue.read_many(reads_of(file, wanted)) == [3, 4, 0, 0]
        assert wanted[0][1] == CONTENT[-3:] + b"xx"

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_fails_harms_no_other(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        closed = disk.open("f", read_only=True)
        closed.close()
        found = [bytearray(8), bytearray(8)]
        first, failed, last = await queue.read_many(
            [
                FileRead(file, memoryview(found[0]), 0),
                FileRead(closed, memoryview(bytearray(8)), 0),
                FileRead(file, memoryview(found[1]), 8),
            ]
        )
        assert first == last == 8
        assert isinstance(failed, DiskFailed)
        assert found == [CONTENT[:8], CONTENT[8:16]]

    if kind == "simulated":
        pytest.skip("a simulated file that is closed is a bug of its user")
    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_one_memory_is_filled_with_places_one_behind_the_other(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        places = [(file, index * 7919 * 13 % 200_000, 1 + index % 100) for index in range(2 * RING_ENTRIES)]
        wanted = b"".join(CONTENT[offset : offset + length] for _, offset, length in places)
        memory = memoryview(bytearray(len(wanted)))
        assert await queue.read_packed(places, memory) == [True] * len(places)
        assert memory == wanted
        assert await queue.read_packed([], memory[:0]) == []
        end = len(CONTENT)
        memory = memoryview(bytearray(7))
        assert await queue.read_packed([(file, 4, 2), (file, end - 1, 2), (file, 8, 3)], memory) == [True, False, True]
        assert memory[:2] == CONTENT[4:6]
        assert memory[4:] == CONTENT[8:11]

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_cannot_be_read_harms_no_other(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        closed = disk.open("f", read_only=True)
        closed.close()
        memory = memoryview(bytearray(6))
        places = [(file, 0, 2), (closed, 0, 2), (file, 9, 2)]
        assert await queue.read_packed(places, memory) == [True, False, True]
        assert bytes(memory[:2]) + bytes(memory[4:]) == CONTENT[:2] + CONTENT[9:11]

    if kind == "simulated":
        pytest.skip("a simulated file that is closed is a bug of its user")
    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_caller_begins_no_read(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        buffer = bytearray(8)
        with trio.CancelScope() as scope:
            scope.cancel()
            await queue.read_many([FileRead(file, memoryview(buffer), 4)])
        assert scope.cancelled_caught
        assert buffer == bytes(8)

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_cancelled_meanwhile_has_its_bytes_and_the_buffer_is_its_own_again(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        wanted = places(2 * RING_ENTRIES)
        told: list[object] = []

        async def caller() -> None:
            told.extend(await queue.read_many(reads_of(file, wanted)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert told in ([], [100] * len(wanted)), "not begun, or whole"
        for offset, buffer in wanted:
            assert buffer in (bytes(100), CONTENT[offset : offset + 100])
            buffer.append(0)  # BufferError while the kernel holds it

        packed = [(file, offset, 100) for offset, _ in wanted]
        memory = bytearray(100 * len(packed))

        async def packer() -> None:
            await queue.read_packed(packed, memoryview(memory))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(packer)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert memory in (bytes(len(memory)), b"".join(CONTENT[at : at + 100] for _, at, _ in packed))
        memory.append(0)

    drive(kind, tmp_path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_reads_past_the_page_cache_fill_aligned_memory(kind: str, tmp_path: Path) -> None:
    async def body(queue: IoQueue, disk: Disk, file: DiskFile) -> None:
        direct = disk.open("f", read_only=True, direct=True)
        pages = memoryview(mmap.mmap(-1, 8 * PAGE_BYTES))
        reads = [
            FileRead(direct, pages[index * PAGE_BYTES : (index + 1) * PAGE_BYTES], (7 - index) * PAGE_BYTES)
            for index in range(8)
        ]
        assert await queue.read_many(reads) == [PAGE_BYTES] * 8
        for _, buffer, offset in reads:
            assert buffer == CONTENT[offset : offset + PAGE_BYTES]
        direct.close()

    drive(kind, tmp_path, body)
