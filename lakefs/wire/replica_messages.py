"""Messages by which a replica of a lake's names begins anew from the checkpoint of another one.

Only names that lead answer them.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from lakefs.wire.base import Message, Request


class CheckpointOpened(Message, frozen=True):
    """The checkpoint that is read: its last group, and its length in bytes."""

    sequence: int
    file_bytes: int


class OpenCheckpoint(Request, frozen=True):
    """Write a checkpoint of the names as they are, and keep it for this connection, in place of one that was kept.

    Answered when it is durable: after minutes, where there are many names.
    """

    OP = 126
    REPLY = CheckpointOpened


class CheckpointPiece(Message, frozen=True):
    """Bytes of the checkpoint, in the body."""


class ReadCheckpoint(Request, frozen=True):
    """Read bytes of the checkpoint that is kept for this connection: at most 1 MiB, and less at its end.

    SessionLost if none is kept; InvalidArgument for a place outside of it.
    """

    OP = 127
    REPLY = CheckpointPiece
    offset: int
    length: int
