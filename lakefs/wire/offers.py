"""Offers of a connection: the things that its engine shares with the client by memory, each by itself.

| offer | the client may |
|---|---|
| segments | read and map segments' files (OpenSegments, PinChunks) |
| slabs | copy from the DRAM tier (OpenSlabs, grants of MEDIUM_DRAM) |
| sources | send a file's descriptor to be read (SourceOpen) |
| lent memory | lend memory for puts and loads (LendMemory) |
| shared index, keyed index | look chunks and keys up without a request (OpenSharedIndex, OpenKeyedIndex) |
| key homes | look keys up at the members of a lake on this machine (OpenKeyHomes, OpenSegments) |
| stamps | repeat answers about names (OpenStamps) |

Descriptors must get through for all of them, so over TCP there are none; the reply to Hello names the others
(FEATURE_EACH).  What is not offered is not asked for.  RDMA has its own bit and its own way (`lakefs.fabric`).
"""

from __future__ import annotations

from typing import Final

from lakefs.wire.media import IN_FILES, IN_SLABS, MEDIA_OF_MACHINE
from lakefs.wire.session_messages import (
    FEATURE_EACH,
    FEATURE_KEY_HOMES,
    FEATURE_KEYED_INDEX,
    FEATURE_LENT_MEMORY,
    FEATURE_SEGMENTS,
    FEATURE_SHARED_INDEX,
    FEATURE_SLABS,
    FEATURE_SOURCES,
    FEATURE_STAMPS,
    SHARED_BY_ENGINES,
)

EVERYTHING: Final = SHARED_BY_ENGINES | FEATURE_STAMPS
"""Bits of all that goes by memory."""


class Offers:
    """The offers of the present connection; one object for a client's life, read at each use."""

    __slots__ = (
        "key_homes",
        "keyed_index",
        "lent_memory",
        "media",
        "places",
        "segments",
        "shared_index",
        "slabs",
        "sources",
        "stamps",
    )

    def __init__(self, features: int = 0, *, by_memory: bool = False) -> None:
        """See `take`; without arguments nothing is offered: there is no connection yet."""
        self.take(features, by_memory=by_memory)

    def take(self, features: int, *, by_memory: bool) -> None:
        """Note what the reply to Hello offers; `by_memory`: the connection carries descriptors both ways.

        An engine whose reply does not name each (an older one) is asked for everything, and refuses what it lacks.
        """
        if not by_memory:
            features = 0
        elif not features & FEATURE_EACH:
            features = EVERYTHING
        self.segments = bool(features & FEATURE_SEGMENTS)
        self.slabs = bool(features & FEATURE_SLABS)
        self.sources = bool(features & FEATURE_SOURCES)
        self.lent_memory = bool(features & FEATURE_LENT_MEMORY)
        self.shared_index = bool(features & FEATURE_SHARED_INDEX)
        self.keyed_index = bool(features & FEATURE_KEYED_INDEX)
        self.key_homes = bool(features & FEATURE_KEY_HOMES)
        self.stamps = bool(features & FEATURE_STAMPS)
        in_files, in_slabs = (IN_FILES if self.segments else frozenset()), (IN_SLABS if self.slabs else frozenset())
        self.places: frozenset[int] = in_files | in_slabs
        """Media of grants whose bytes this client reads itself."""
        self.media = MEDIA_OF_MACHINE if self.slabs else 0
        """Bits of the media that it understands beside segments and inline."""
