"""Media: how the bytes of a granted chunk are read.  All that depends on a medium's number is in the table here.

Places in the shared index have the same numbers, as their tier; so have the cases of native code
(`lakefs/granules/place.h`).  A new medium is a line of the table.  Readers ask the sets made from it: a medium that is
read as another one is needs no more in Python; one that is read in a new way is a new column, and a case in
`lakefs.grants.grant_reads` and `lakefs.direct.chunk_reads`.

Whatever the medium, the reader checks the bytes: they are a hint until then.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Medium(NamedTuple):
    """One medium.  It is in one of the ways of reading."""

    number: int
    bit: int = 0
    """Bit of a request's `media`, with which a client says that it understands such grants; 0: every client does."""
    in_file: bool = False
    """Read from a segment's file, whose descriptor the engine sends: by `pread`, natively, and mapped while pinned.

    The page cache keeps such bytes, so they can be read ahead, and dropped.
    """
    in_slab: bool = False
    """Copied from memory that the engine shares and the client maps; the cell's generation says if it was in time."""
    by_fabric: bool = False
    """READ over the connection's queue pair: the key ends with the connection."""
    in_frame: bool = False
    """Sent with the answer that has the grant, which names no place."""
    by_request: bool = False
    """Sent for a request: the grant names no place, only the chunk's length."""


MEDIUM_NONE: Final = 0
"""No bytes: the store does not have the chunk.  No medium, so it is not in the table."""
MEDIUM_SEGMENT: Final = 1
"""Bytes are read from the segment's file, whose descriptor the engine sends (`lakefs.grants.descriptors`)."""
MEDIUM_INLINE: Final = 2
"""Bytes are in this frame's body, at `offset`."""
MEDIUM_DRAM: Final = 3
"""Copied from the DRAM tier: `segment` is the slab, `epoch` the cell's generation (`lakefs.grants.dram_slabs`)."""
MEDIUM_FABRIC: Final = 4
"""READ over the connection's queue pair: `segment` is the remote key, `offset` the address in the engine's memory."""
MEDIUM_STREAMED: Final = 5
"""Bytes are asked for with ReadChunks, by a client with descriptors too: a head of a lake has no segments."""
MEDIA_DRAM: Final = 1
"""Bit of a request's `media`: the client understands grants of `MEDIUM_DRAM`."""
MEDIA_FABRIC: Final = 2
"""Bit of a request's `media`: the client reads grants of `MEDIUM_FABRIC` over its queue pair."""

TABLE: Final = (
    Medium(MEDIUM_SEGMENT, in_file=True),
    Medium(MEDIUM_INLINE, in_frame=True),
    Medium(MEDIUM_DRAM, MEDIA_DRAM, in_slab=True),
    Medium(MEDIUM_FABRIC, MEDIA_FABRIC, by_fabric=True),
    Medium(MEDIUM_STREAMED, by_request=True),
)

IN_FILES: Final = frozenset(medium.number for medium in TABLE if medium.in_file)
IN_SLABS: Final = frozenset(medium.number for medium in TABLE if medium.in_slab)
BY_FABRIC: Final = frozenset(medium.number for medium in TABLE if medium.by_fabric)
IN_FRAMES: Final = frozenset(medium.number for medium in TABLE if medium.in_frame)
BY_REQUEST: Final = frozenset(medium.number for medium in TABLE if medium.by_request)
PLACES: Final = IN_FILES | IN_SLABS | BY_FABRIC | BY_REQUEST
"""Media whose grants say how the bytes are read later."""
MEDIA_OF_MACHINE: Final = sum(medium.bit for medium in TABLE if medium.in_slab)
"""Bits of the media that a client on the engine's machine can read."""
