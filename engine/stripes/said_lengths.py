"""Lengths of one chunk as members say them, each with its shard.  One of them may lie.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lakefs.limits import CHUNK_BYTES


def lengths_said(said: Iterable[int]) -> list[int]:
    """Return the lengths that a chunk can have, the one that is said most often first, of equals the longest."""
    counts = Counter(length for length in said if 0 < length <= CHUNK_BYTES)
    return sorted(counts, key=lambda length: (counts[length], length), reverse=True)
