"""The ring of keys: the member that keeps each key of a space, and each member's share of all keys.

    position of a key   8 bytes of keyed BLAKE3 over the space's number (8 bytes, little-endian) and the key, big-endian
    home of a key       the member of the first vnode at or behind that position; past the last vnode, of the first

Rules kept here:
- A key has one home among the members that get places.  All processes with one table have the same ring.
- A key moves only to a member that came, or from one that left (`lakefs.cluster.ring`).
- Shares of a quota are in proportion to the keys that a member is home of, and together are at most the quota.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import blake3

from lakefs.cluster.members import Member
from lakefs.cluster.ring import POSITION_BITS, Ring
from lakefs.ids import MemberId

HASH_KEY: Final = blake3.blake3(b"", derive_key_context="lakefs-appliance 2026-11 ring key v1").digest()
"""Key of the hash of keys; deriving it each time would cost half as much again."""
_SPACE: Final = struct.Struct("<Q")


class KeyRing:
    """Homes of keyed blobs: one member for each key of a space.  Made by `Table.key_ring`."""

    def __init__(self, members: Sequence[Member], vnode_room_bytes: int) -> None:
        ring = Ring(members, vnode_room_bytes)
        self._positions = ring.positions
        self._homes = [members[index].id for index in ring.owners]
        self._arcs = dict.fromkeys(self._homes, 0)
        first = ring.positions[-1] - (1 << POSITION_BITS)
        for (before, position), home in zip(pairwise([first, *ring.positions]), self._homes, strict=True):
            self._arcs[home] += position - before
        self._homes.append(self._homes[0])

    @property
    def members(self) -> Sequence[MemberId]:
        """The members that keep keys."""
        return list(self._arcs)

    @property
    def vnodes(self) -> list[tuple[int, MemberId]]:
        """The position and the member of each vnode, ascending."""
        return list(zip(self._positions, self._homes, strict=False))

    def home(self, space: int, key: bytes) -> MemberId:
        """Return the member that keeps this key of that space."""
        digest = blake3.blake3(_SPACE.pack(space) + key, key=HASH_KEY).digest(length=8)
        return self._homes[bisect_left(self._positions, int.from_bytes(digest, "big"))]

    def share(self, member: MemberId, quota_bytes: int) -> int:
        """Return a member's share of a quota, at least 1 byte; 0, for none, if there is no quota."""
        return quota_bytes and max(1, quota_bytes * self._arcs[member] >> POSITION_BITS)
