"""Grants, which say where chunks are, and the requests that keep chunks there or tell of them at large."""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import Done, Message, Request

# Media: how a client has a granted chunk's bytes.  The shared index says the same of its entries, as their tier.
MEDIUM_NONE: Final = 0
"""Not at all: the store does not have the chunk."""
MEDIUM_SEGMENT: Final = 1
"""Read from the segment's file, whose descriptor the engine sends (`lakefs.grants.descriptors`)."""
MEDIUM_INLINE: Final = 2
"""Taken out of this frame's body, at `offset`."""
MEDIUM_DRAM: Final = 3
"""Copied from the DRAM tier: `segment` is the slab, `epoch` the cell's generation (`lakefs.grants.dram_slabs`)."""
MEDIA_DRAM: Final = 1
"""Bit of a request's `media`: grants of `MEDIUM_DRAM` are understood."""


class Grant(Message, frozen=True, gc=False):
    """Where a chunk's bytes are; `medium` is one of those above.

    `crc` is the payload's (one granule) or its vector's, which lies behind the payload.  `epoch` lets a reader
    notice a moved chunk; correctness rests on the check of the bytes (`lakefs.content.verify`).
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
    """A grant for each chunk, in order; MEDIUM_NONE for one that is not there and was not pinned."""

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


class SharedIndexOpened(Message, frozen=True):
    """A read-only descriptor of the shared index comes with this frame; `entries`: chunks that it has room for."""

    entries: int


class OpenSharedIndex(Request, frozen=True):
    """Get the table of where chunks are, to be mapped and read without asking (`docs/format.md`, Shared index).

    PermissionDenied over TCP; UnsupportedVersion when this engine shares none.  A table whose magic has become
    zeros was replaced by a larger one: ask again.
    """

    OP = 47
    REPLY = SharedIndexOpened
