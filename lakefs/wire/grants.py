"""Grants, which say where chunks are, and the requests that keep chunks there or tell of them at large."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request


class Grant(Message, frozen=True, gc=False):
    """Where a chunk's bytes are.  medium 0: not there; 1: segment file; 2: in this frame's body at `offset`; 3: in the
    DRAM tier, `segment` being the slab and `epoch` the slot's generation (see `lakefs.slabs`).

    `crc` is the payload's (one granule) or its vector's, which lies behind the payload.  `epoch` lets a reader
    notice a moved chunk; correctness rests on the check of the bytes.
    """

    medium: int
    segment: int = 0
    offset: int = 0
    stored_bytes: int = 0
    logical_bytes: int = 0
    codec: int = 0
    crc: int = 0
    epoch: int = 0


class Pinned(Message, frozen=True):
    """A grant for each chunk, in order; medium 0 for one that is not there and was not pinned."""

    grants: list[Grant]


class PinChunks(Request, frozen=True):
    """Keep chunks at their places: neither gc nor compaction punches or unlinks them, whatever happens to their names.

    For readers with mappings of their own.  What this connection has pinned already stays at the place it has, and
    is counted; so is each pin of a chunk.  Pins end with UnpinChunks, or with the connection.  PermissionDenied (over
    TCP), EngineBusy when too much is pinned.
    """

    OP = 45
    REPLY = Pinned
    chunks: list[bytes]


class UnpinChunks(Request, frozen=True):
    """Take back one pin of each chunk; one that is not pinned is ignored."""

    OP = 46
    REPLY = Done
    chunks: list[bytes]


class HotIndexOpened(Message, frozen=True):
    """A read-only descriptor of the hot index comes with this frame; `entries`: chunks that it has room for."""

    entries: int


class OpenHotIndex(Request, frozen=True):
    """Get the table of where chunks are, to be mapped and read without asking (`docs/format.md`, Hot index).

    PermissionDenied over TCP; UnsupportedVersion when this engine shares none.  A table whose magic has become
    zeros was replaced by a larger one: ask again.
    """

    OP = 47
    REPLY = HotIndexOpened
