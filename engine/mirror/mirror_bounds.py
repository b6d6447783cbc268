"""Bounds of a mirrored disk, with their arithmetic."""

from __future__ import annotations

from typing import Final

from lakefs.limits import MIB

COPIES_MAX: Final = 3
"""Good copies of one mirrored disk: m + 1; m is 2 at 4+2 and at 8+2.

A fourth would not be safe.  Let {a, b, c} be followed by {a, b, c, d}, which a never gets: c and d, half of the second,
could go on by it; then a and b open by the first, since a shows that the second was never finished.
"""
LISTED_MAX: Final = 8
"""Room for copies in the file of a list."""
ANCESTORS: Final = 64
"""Tags of earlier lists in a list of good copies: 512 bytes.  Two processes that did not know of each other are ahead
of their common list by one or two."""
PIECE_BYTES: Final = MIB
"""Bytes copied at a time to a new copy; writers wait that long, about a millisecond."""
COPY_BYTES_PER_S: Final = 64 * MIB
"""Rate at which a new copy is made: a checkpoint of 10 million names, 2 GB, in half a minute."""
PATIENCE_S: Final = 20.0
"""A device may be silent so long after another has answered.  Clients take an engine for lost after 30 s
(ENGINE_SILENCE_S), so their requests are answered before that; a disk in order answers within a few."""
