"""Counts of a client's use of RDMA, for people and scripts.  Imports nothing that RDMA itself needs."""

from __future__ import annotations

from typing import Final, NamedTuple


class FabricCounts(NamedTuple):
    """A client's use of RDMA: chunks and bytes that it read so, and why it does not, empty while it does or may."""

    chunks: int
    bytes: int
    reason: str


NO_RDMA: Final = FabricCounts(0, 0, "switched off, or the engine is not on TCP")
"""The counts of a client without RDMA."""
