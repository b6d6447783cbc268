"""Grants, which say where chunks are; requests that pin chunks to their places; the request for the shared index."""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import Done, Message, Request

# Media: how a client reads a granted chunk's bytes.  Entries of the shared index use the same numbers as their tier.
MEDIUM_NONE: Final = 0
"""No bytes: the store does not have the chunk."""
MEDIUM_SEGMENT: Final = 1
"""Bytes are read from the segment's file, whose descriptor the engine sends (`lakefs.grants.descriptors`)."""
MEDIUM_INLINE: Final = 2
"""Bytes are in this frame's body, at `offset`."""
MEDIUM_DRAM: Final = 3
"""Bytes are copied from the DRAM tier: `segment` is the slab, `epoch` the slot's generation
(`lakefs.grants.dram_slabs`)."""
MEDIA_DRAM: Final = 1
"""Bit of a request's `media`: the client understands grants of `MEDIUM_DRAM`."""


class Grant(Message, frozen=True, gc=False):
    """The place of a chunk's bytes; `medium` is one of the media above.

    `crc` is the CRC of the payload (if it is one granule), or of the vector of granule CRCs that follows the payload.
    `epoch` lets a reader notice a moved chunk; correctness rests on the check of the bytes (`lakefs.content.verify`).
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
    """A grant for each chunk, in order; MEDIUM_NONE for one that does not exist and was not pinned."""

    grants: list[Grant]


class PinChunks(Request, frozen=True):
    """Keep chunks at their places: neither gc nor compaction punches or unlinks them, whatever happens to their names.

    For readers with mappings of their own.  Pins are counted: a chunk that this connection has pinned already stays at
    its place and gets one more pin.  Pins end with UnpinChunks, or with the connection.  PermissionDenied over TCP;
    EngineBusy when too much is pinned.
    """

    OP = 45
    REPLY = Pinned
    chunks: list[bytes]


class UnpinChunks(Request, frozen=True):
    """Remove one pin of each chunk; a chunk that is not pinned is ignored."""

    OP = 46
    REPLY = Done
    chunks: list[bytes]


class SharedIndexOpened(Message, frozen=True):
    """A read-only descriptor of the shared index, sent with this frame.  It has room for `entries` chunks."""

    entries: int


class OpenSharedIndex(Request, frozen=True):
    """Get the shared index: the table of chunks' places, which a client maps and reads.  See `docs/format.md`.

    PermissionDenied over TCP; UnsupportedVersion when this engine shares none.  A table whose magic has become
    zeros was replaced by a larger one: send this request again.
    """

    OP = 47
    REPLY = SharedIndexOpened
