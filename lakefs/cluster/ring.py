"""The ring: members' virtual nodes in the order of their hashes.

    position of a vnode       8 bytes of BLAKE3 output (extended to 8 x count bytes) over the member's id, big-endian
    position of a partition   its number in the highest bits: 4,096 or 16,384 positions, equally far apart

Rules kept here:
- A member has one vnode for each `vnode_room_bytes` of its room, at least one.  The unit is a 150th of the mean room
  when the first table is made, and stays while the mean member has 75 to 300 vnodes.  So a member that is added or
  removed changes no other's vnodes, and a key moves only to or from that member.
- A member's first vnodes stay where they are when it gets more.
- Equal positions are ordered by the member's place in the table, which is that of its id.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import blake3

from lakefs.cluster.members import Member, Standing

VNODES_MEAN: Final = 150
"""Vnodes of a member of mean room: shares of the ring vary by about 1/sqrt(150) = 8%."""
_MEMBER_CONTEXT: Final = "lakefs-appliance 2026-11 ring member v1"
POSITION_BITS: Final = 64


def vnode_room(members: Sequence[Member], last_bytes: int = 0) -> int:
    """Return the room that one vnode stands for: the last table's, or another when that fits no more."""
    rooms = [member.room_bytes for member in members if member.state is Standing.IN]
    if last_bytes and VNODES_MEAN // 2 * last_bytes <= sum(rooms) // len(rooms) <= 2 * VNODES_MEAN * last_bytes:
        return last_bytes
    return max(1, sum(rooms) // (VNODES_MEAN * len(rooms)))


class Ring:
    """The ring of those members that get places.

    `owners[i]` is the member (an index into the table's list) of the i-th vnode.
    """

    def __init__(self, members: Sequence[Member], vnode_room_bytes: int) -> None:
        self.of_member = [_vnodes(member, vnode_room_bytes) for member in members]
        vnodes = sorted((position, index) for index, own in enumerate(self.of_member) for position in own)
        self.positions = [position for position, _ in vnodes]
        self.owners = [index for _, index in vnodes]

    def walk_from(self, position: int) -> int:
        """Return the index of the first vnode at or behind `position`, where a walk begins; past the last it is 0."""
        found = bisect_left(self.positions, position)
        return found if found < len(self.positions) else 0

    def partitions_near(self, index: int, bits: int) -> Iterator[int]:
        """Yield all partitions of a table of 2^bits: before each vnode of member `index` the nearest, then the next."""
        step = 1 << POSITION_BITS - bits
        own = sorted(self.of_member[index])
        gaps = [(before // step, vnode // step) for before, vnode in pairwise([own[-1] - (1 << POSITION_BITS), *own])]
        away = 0
        while gaps := [(first, last) for first, last in gaps if last - away > first]:
            for _, last in gaps:
                yield (last - away) % (1 << bits)
            away += 1


def partition_position(partition: int, bits: int) -> int:
    """Return the position on the ring of a partition of a table of 2^bits."""
    return partition << POSITION_BITS - bits


def _vnodes(member: Member, vnode_room_bytes: int) -> list[int]:
    """Return the positions of a member's vnodes; none for a member that gets no places."""
    if member.state is not Standing.IN:
        return []
    count = max(1, (member.room_bytes + vnode_room_bytes // 2) // vnode_room_bytes)
    output = blake3.blake3(member.id, derive_key_context=_MEMBER_CONTEXT).digest(length=8 * count)
    return list(struct.unpack(f">{count}Q", output))
