"""Modelled machines, disks, links and processors, with the source of each figure; and the lakes that are made of them.

What has a source is a figure of public data sheets and designs, so a lake on other hardware differs; what was measured
is of the machine that docs/benchmarks.md names, by the command beside it, and is a slow one.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import blake3

from lakefs.cluster.members import Member
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import Table
from lakefs.ids import MemberId

GB: Final = 1_000_000_000
GIB: Final = 1 << 30
MIB: Final = 1 << 20
KIB: Final = 1 << 10

DISK_BYTES: Final = 7_680 * GB
DISK_READ_BYTES_PER_S: Final = 6.5 * GB
DISK_WRITE_BYTES_PER_S: Final = 3.5 * GB
"""Samsung PM9A3, U.2, 7.68 TB, as it was announced (computerbase.de, heise.de, May 2020)."""
DISK_READ_S: Final = 85e-6
"""A random read of 4 KiB, typical: Samsung's specification of the PM983, revision 1.0."""
DISK_FULL: Final = 0.7
"""Share of a disk that has content."""

LINK_BYTES_PER_S: Final = 50.0 * GB
"""Two ports of 200 Gb/s a machine: NVIDIA's enterprise reference architecture for HGX H100, H200 and B200, its network
for storage.  Its switches block nothing, so no other link is modelled."""
ROUND_TRIP_S: Final = 20e-6
"""Assumed: two system calls and a wake on each side, and a switch or three."""

CORES: Final = 112
"""Processors of a machine: two Xeon 8480C of 56, as in NVIDIA's DGX H100."""


class Shape(NamedTuple):
    """A lake of equal machines."""

    machines: int
    devices: int = 32
    rack: int = 8
    """Machines in a rack."""
    protection: str = "4+2"

    def __str__(self) -> str:
        return f"{self.machines} machines of {self.devices}, {self.protection}"

    @property
    def members(self) -> int:
        """The number of members: one a device."""
        return self.machines * self.devices


SHAPES: Final = (Shape(48), Shape(96), Shape(96, protection="8+2"))


@cache
def members_of(shape: Shape) -> tuple[Member, ...]:
    """Return the members of a lake."""
    return tuple(
        Member(
            MemberId(blake3.blake3(f"{machine}/{device}".encode()).digest(length=16)),
            DISK_BYTES,
            f"machine {machine}",
            f"rack {machine // shape.rack}",
        )
        for machine in range(shape.machines)
        for device in range(shape.devices)
    )


@cache
def table_of(shape: Shape) -> Table:
    """Return a lake's first table: the one that the product makes."""
    return first_table(Protection.parse(shape.protection), members_of(shape))
