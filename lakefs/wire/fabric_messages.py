"""Messages about RDMA: queue pairs of a connection, and memory that one side may READ or WRITE at the other.

Both sides tell the ends of their queue pairs over the connection, which stays the control path.  Keys and queue pairs
belong to the connection, and end with it.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from lakefs.wire.base import Message, Request
from lakefs.wire.fabric_end import FabricEnd as FabricEnd


class FabricOpened(Message, frozen=True):
    """The engine's end; it is ready to receive."""

    end: FabricEnd


class FabricOpen(Request, frozen=True):
    """Connect a queue pair of this connection with one of the client's; a second request replaces the first pair.

    UnsupportedVersion when the engine uses no RDMA (HelloReply lacks FEATURE_FABRIC); InvalidArgument for an end that
    cannot be, or of another kind; EngineBusy when the engine has no queue pair left, or cannot connect.
    """

    OP = 59
    REPLY = FabricOpened
    end: FabricEnd


class FabricMemory(Message, frozen=True):
    """Memory of the client, registered for the engine's WRITEs or READs over the connection's queue pair."""

    key: int
    address: int
    size_bytes: int
