"""The moments at which gc gives room back: in stretches after the sweep, and at once where the disk is nearly full."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from engine.upkeep import gc as gc_module
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB
from tests.sim.world.disk import SimDisk
from tests.sim.world.file import SimFile
from tests.store_rig import SMALL_SIZES, client_of, delete, gc, put, read, run, simulated_store

BATCHES_OF_FOUR: Final = replace(SMALL_SIZES, gc_batch=4)
PAYLOADS: Final = [bytes([number]) * (8 * KIB) for number in range(24)]
REMOVED: Final = 18


def punches_of_a_cycle(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """Run a cycle after most of a sealed segment was removed; return the lengths punched, and the bytes given back."""
    punched: list[int] = []
    punch = SimFile.punch

    def noted(self: SimFile, offset: int, length: int) -> None:
        punched.append(length)
        punch(self, offset, length)

    given_back = 0

    async def main() -> None:
        nonlocal given_back
        disk = SimDisk()
        async with simulated_store(disk, sizes=BATCHES_OF_FOUR) as store:
            for number, payload in enumerate(PAYLOADS):
                await put(client_of(store), f"{number}", payload)
            await delete(client_of(store), *map(str, range(REMOVED)))
        async with simulated_store(disk, sizes=BATCHES_OF_FOUR) as store:  # a start seals what was open
            client = client_of(store)
            with monkeypatch.context() as patched:
                patched.setattr(SimFile, "punch", noted)
                report = await gc(client)
            assert report["freed_chunks"] == REMOVED
            given_back = report["disk_bytes_before"] - report["disk_bytes_after"]
            for payload in PAYLOADS[REMOVED:]:
                assert await read(client, data_chunk_id(payload)) == payload

    run(main)
    return punched, given_back


def test_neighbours_that_were_freed_in_any_order_are_punched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    punched, given_back = punches_of_a_cycle(monkeypatch)
    assert len(punched) == 1
    assert given_back >= sum(map(len, PAYLOADS[: REMOVED - 1]))


def test_with_little_room_left_each_batch_gives_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_module, "_ROOM_SHARE", 0)
    punched, given_back = punches_of_a_cycle(monkeypatch)
    assert len(punched) > REMOVED // 4
    assert given_back >= sum(map(len, PAYLOADS[: REMOVED - 1]))
