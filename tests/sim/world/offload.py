"""Simulated threads: a call runs inline, at once or some simulated time later.

So calls of different tasks overlap in every order that a pool of threads could bring about, one at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import trio

from tests.sim.world.sim_time import pause

T = TypeVar("T")


class SimOffload:
    """`lakefs.ports.Offload`; how long a call waits and takes is drawn from `rng`."""

    def __init__(self, rng: random.Random, *, slowest_s: float) -> None:
        self._rng = rng
        self._slowest_s = slowest_s

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """Run a call; return its result or raise its exception.  Raises Cancelled only before it begins."""
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._pause()
        try:
            return call(*args)
        finally:
            await self._pause()

    async def _pause(self) -> None:
        choice = self._rng.randrange(4)
        if choice == 3:
            await pause(self._rng.uniform(0.0, self._slowest_s), shielded=True)
        for _ in range(choice):
            await trio.lowlevel.cancel_shielded_checkpoint()
