"""Bounds of a mirrored disk, with their arithmetic."""

from __future__ import annotations

from typing import Final

from lakefs.limits import MIB

COPIES_MAX: Final = 4
"""Good copies of one mirrored disk: m + 1, and one that takes another's place; m is 2 at 4+2 and at 8+2.

That no stale copy opens by itself is known for up to four: see `engine.mirror.list_choice`.
"""
LISTED_MAX: Final = 8
"""Room for copies in the file of a list."""
ANCESTORS: Final = 64
"""Tags of earlier lists in a list of good copies: 512 bytes.  Two processes that did not know of each other are ahead
of their common list by one or two."""
PIECE_BYTES: Final = MIB
"""Bytes copied at a time to a new copy; writers wait that long, about a millisecond."""
