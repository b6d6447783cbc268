"""The heap is given back after a cycle of gc."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.sim.world.disk import SimDisk
from tests.store_rig import client_of, gc, put, run, simulated_store

GIVING_BACK = """
from engine.host.memory_limits import give_back_free_heap

def private_kib():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("RssAnon")]
    return int(line.split()[1])

kept = [bytes(4096) for _ in range(8000)][::100]  # between them all is free
before = private_kib()
give_back_free_heap()
print(before - private_kib())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_is_free_between_what_is_in_use_goes_back_to_the_machine() -> None:
    done = subprocess.run([sys.executable, "-c", GIVING_BACK], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20_000


def test_it_is_given_back_once_behind_each_cycle_of_gc() -> None:
    async def main() -> None:
        async with simulated_store(SimDisk()) as store:
            called: list[int] = []
            store.after_collecting = lambda: called.append(store.collected.cycles)
            await put(client_of(store), "name", b"content")
            await gc(client_of(store))
            await gc(client_of(store))
            assert called == [1, 2]

    run(main)
