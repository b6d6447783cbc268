"""Counts of what a client knows about names, as users see them."""

from __future__ import annotations

from typing import NamedTuple


class KnownCounts(NamedTuple):
    """Counts of one client's known names, and of its answers from them."""

    names: int
    """Names that are known now."""
    held_bytes: int
    """Bytes that they take."""
    answered: int
    """Names that were answered without a request so far."""


NOTHING_KNOWN = KnownCounts(0, 0, 0)
