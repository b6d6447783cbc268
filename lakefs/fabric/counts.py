"""Counts of a client's use of RDMA, for people and scripts.  Imports nothing that RDMA itself needs."""

from __future__ import annotations

from typing import Final, NamedTuple


class FabricCounts(NamedTuple):
    """A client's use of RDMA: chunks and bytes moved so, and why no more are; empty while they are, or may be."""

    chunks: int
    bytes: int
    reason: str


NO_RDMA: Final = FabricCounts(0, 0, "switched off, or the engine is not on TCP")
"""The counts of a client without RDMA."""
