"""Bounds of gc over a lake: memory of one cycle, and the time for which its lock outlives its process."""

from __future__ import annotations

from typing import Final

MARKS_PENDING_MAX: Final = 1 << 20
"""Chunks in batches of marks that are filled for members, all together; twice as many are under way.  A chunk that
waits for six members is 82 bytes and six places: 3 x 2^20 places of 8 bytes, and a sixth of 82: 64 MiB."""
MANIFESTS_SEEN_MAX: Final = 1 << 19
"""Manifests that a walk remembers, about 130 bytes each: 65 MiB.  A file of more than 4 MiB has one or more."""
LAKE_GC_LOCK_S: Final = 30
"""Lease of the cycle that is under way: a lake's next cycle waits so long for one whose process died."""
ROOTS_PAGE: Final = 4096
"""Roots of one answer of another names shard's leader: 33 bytes and an owner of up to 20 each, 240 KiB."""
REBOUND_MAX: Final = 1 << 17
"""Blobs that are noted for a walk through another shard's names, until they are asked for: 130 bytes each, 17 MiB."""
