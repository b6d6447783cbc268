"""Small payloads that wait for room in memory: all of them get an answer, whatever happens to the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import trio

from engine.segments import small as small_segments
from lakefs.errors import DiskFailed, StoreReadOnly
from lakefs.host.offload import InlineOffload
from lakefs.limits import KIB
from lakefs.wire import messages as m
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, change, client_of, put, run, simulated_store

T = TypeVar("T")


class Stalling(InlineOffload):
    """Appends no group while `stalled` is not set."""

    def __init__(self) -> None:
        self.stalled = trio.Event()

    async def run(self, call: Callable[..., T], *args: object) -> T:
        if getattr(call, "__name__", "") == "_append_blocking":
            await self.stalled.wait()
        return await super().run(call, *args)


def test_a_failed_batch_answers_all_who_wait_for_room_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_segments, "SMALL_UNWRITTEN_BYTES_MAX", 64 * KIB)

    async def main() -> None:
        disk, offload = SimDisk(), Stalling()
        offload.stalled.set()
        async with simulated_store(disk, offload=offload) as store:
            client = client_of(store)
            await put(client, "first", b"x")
            offload.stalled = trio.Event()
            disk.fail_next("sync_data", DiskFailed("planted"), path="small")
            refused: list[int] = []

            async def writer(tag: int) -> None:
                with pytest.raises(StoreReadOnly):
                    await put(client, f"{tag}", bytes([tag]) * 40_000)
                refused.append(tag)

            with trio.move_on_after(60):
                async with trio.open_nursery() as nursery:
                    for tag in range(6):
                        nursery.start_soon(writer, tag)
                    await trio.sleep(1)
                    offload.stalled.set()
            assert sorted(refused) == list(range(6))

    run(main)


def test_what_waits_to_be_written_keeps_no_memory_of_what_was_there_already() -> None:
    there = [bytes([tag]) * 60_000 for tag in range(4)]
    names = [change(f"{tag}") for tag in range(5)]

    async def main() -> None:
        offload = Stalling()
        offload.stalled.set()
        async with simulated_store(offload=offload) as store:
            client = client_of(store)
            for tag, payload in enumerate(there):
                await put(client, f"{tag}", payload)
            offload.stalled = trio.Event()
            request = m.PutObjects([1, *map(len, there)], names, durable=False)
            await ask(client, request, m.NameResults, b"x", *there)
            kept = list(store.segments.small.unwritten.values())
            assert [len(payload) for payload in kept] == [1]
            assert [memoryview(memoryview(payload).obj).nbytes for payload in kept] == [1]
            offload.stalled.set()

    run(main)
