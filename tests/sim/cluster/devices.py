"""Devices of a simulated lake: disks that also break, and may work again."""

from __future__ import annotations

import random

from lakefs.errors import DiskFailed
from tests.sim.world.disk import SimDisk


class Device(SimDisk):
    """A disk of which nothing can be read or written while it `is_broken`; only the process sees that."""

    is_broken = False

    def check_alive(self) -> None:
        """Raise SimCrashed when the power is gone, DiskFailed while the device is broken."""
        super().check_alive()
        if self.is_broken:
            raise DiskFailed("the device does not work")


def new_device(rng: random.Random, capacity_bytes: int) -> Device:
    """Return an empty device, with a source of chance of its own."""
    return Device(random.Random(rng.getrandbits(64)), capacity_bytes=capacity_bytes)
