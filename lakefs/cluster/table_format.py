"""Bytes of a table: what the coordinator keeps and members, heads and names send each other.

    header     64 bytes: magic, version, protection, epoch, counts, CRC32C of all bytes but its own
    members    member_count x 44 bytes, in ascending order of their ids
    names      domain names, each once, ascending: 1 byte of length and so many bytes of UTF-8; the empty name is first
    rows       2^partition_bits x (k + m + 2) numbers of 2 bytes: members by their place in the list, 65,535 for none

`docs/format.md`, section Ring table, has the fields.

Rules kept here:
- One table has one form: equal tables have equal bytes.
- Nothing is believed before it is checked: lengths first, then the CRC, then that members are ones that a table may
  have, and that each row names only such as get places.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Final

from lakefs.cluster.members import Member, Standing, checked_members
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import NO_MEMBER, SUBSTITUTE_COUNT, Row, Table
from lakefs.errors import InvalidArgument, ProtocolError, UnsupportedVersion
from lakefs.host.crc import crc32c
from lakefs.ids import Buffer, MemberId, RingEpoch
from lakefs.layout import Layout
from lakefs.limits import CLUSTER_MEMBERS_MAX, PARTITION_BITS, PARTITION_BITS_MANY, TABLE_BYTES_MAX

MAGIC: Final = b"LAKERING"
FORMAT_VERSION: Final = 1

RING_TABLE_HEADER: Final = Layout(
    "ring table header",
    64,
    [
        ("magic", "8s"),
        ("version", "H"),
        ("data_shards", "B"),
        ("parity_shards", "B"),
        ("partition_bits", "B"),
        ("reserved", "19s"),
        ("ring_epoch", "Q"),
        ("vnode_room_bytes", "Q"),
        ("member_count", "I"),
        ("name_count", "I"),
        ("names_bytes", "I"),
        ("crc", "I"),
    ],
)
RING_TABLE_MEMBER: Final = Layout(
    "ring table member",
    44,
    [
        ("id", "16s"),
        ("room_bytes", "Q"),
        ("machine", "I"),
        ("rack", "I"),
        ("zone", "I"),
        ("state", "B"),
        ("device", "I"),
        ("reserved", "3s"),
    ],
)
_CRC_AT: Final = RING_TABLE_HEADER.offset_of("crc")
_PLACE_BYTES: Final = 2
_HEADER_RESERVED: Final = bytes(19)
_MEMBER_RESERVED: Final = bytes(3)
_STATES: Final = {int(state): state for state in Standing}


def pack(table: Table) -> bytes:
    """Return the table's bytes; 2 a place, 44 a member, and the names of the domains."""
    names = sorted({"", *(name for member in table.members for name in _names_of(member))})
    place_of = {name: place for place, name in enumerate(names)}
    members = [
        RING_TABLE_MEMBER.pack(
            member.id,
            member.room_bytes,
            place_of[member.machine],
            place_of[member.rack],
            place_of[member.zone],
            member.state,
            place_of[member.device],
            _MEMBER_RESERVED,
        )
        for member in table.members
    ]
    packed_names = b"".join([bytes([len(name.encode())]) + name.encode() for name in names])
    header = RING_TABLE_HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        table.protection.data,
        table.protection.parity,
        table.partition_bits,
        _HEADER_RESERVED,
        table.ring_epoch,
        table.vnode_room_bytes,
        len(table.members),
        len(names),
        len(packed_names),
        0,
    )[:_CRC_AT]
    body = b"".join([*members, packed_names, _pack_rows(table.rows)])
    return header + crc32c(body, crc32c(header)).to_bytes(4, "little") + body


def unpack(packed: Buffer) -> Table:
    """Return the table that these bytes are; they may come from anywhere.

    UnsupportedVersion for a version that is not known here, ProtocolError for bytes that are no table, or damaged.
    """
    if not RING_TABLE_HEADER.size <= len(packed) <= TABLE_BYTES_MAX:
        raise _refused(f"it has {len(packed)} bytes")
    magic, version, data, parity, bits, reserved, epoch, vnode_room_bytes, *counts, crc = RING_TABLE_HEADER.unpack_from(
        packed
    )
    member_count, name_count, names_bytes = counts
    if magic != MAGIC:
        raise _refused(f"it begins with {magic!r}")
    if version != FORMAT_VERSION:
        raise UnsupportedVersion(f"a ring table has version {version}, and this release knows {FORMAT_VERSION}")
    if bits not in (PARTITION_BITS, PARTITION_BITS_MANY) or not 1 <= member_count <= CLUSTER_MEMBERS_MAX:
        raise _refused(f"it says {member_count} members and 2^{bits} rows")
    names_at = RING_TABLE_HEADER.size + member_count * RING_TABLE_MEMBER.size
    rows_at = names_at + names_bytes
    view = memoryview(packed)
    if len(view) != rows_at + ((data + parity + SUBSTITUTE_COUNT) * _PLACE_BYTES << bits):
        raise _refused(f"its {len(view)} bytes are not what its header says")
    if crc != crc32c(view[_CRC_AT + 4 :], crc32c(view[:_CRC_AT])):
        raise _refused("its checksum is wrong")
    if reserved != _HEADER_RESERVED or epoch < 1 or vnode_room_bytes < 1:
        raise _refused("its header has an impossible value")
    try:
        protection = Protection(data, parity)
        names = _unpack_names(bytes(view[names_at:rows_at]), name_count)
        members = _unpack_members(view[RING_TABLE_HEADER.size : names_at], names, protection)
    except InvalidArgument as error:
        raise _refused(error.message) from error
    rows = _unpack_rows(view[rows_at:], protection, members)
    return Table(RingEpoch(epoch), protection, members, rows, bits, vnode_room_bytes)


def _names_of(member: Member) -> tuple[str, ...]:
    return member.machine, member.rack, member.zone, member.device


def _pack_rows(rows: Sequence[Row]) -> bytes:
    places = array("H", chain.from_iterable(rows))
    if sys.byteorder == "big":
        places.byteswap()
    return places.tobytes()


def _unpack_names(packed: bytes, name_count: int) -> list[str]:
    """Return the names; they are ascending, so each occurs once, and the first is empty."""
    names: list[str] = []
    at = 0
    while at < len(packed):
        end = at + 1 + packed[at]
        if end > len(packed):
            raise _refused("a domain's name ends behind the names")
        try:
            names.append(packed[at + 1 : end].decode())
        except UnicodeDecodeError as error:
            raise _refused("a domain's name is not UTF-8") from error
        at = end
    if len(names) != name_count or names[:1] != [""] or any(one >= other for one, other in pairwise(names)):
        raise _refused("its names of domains are not a list of that kind")
    return names


def _unpack_members(packed: memoryview, names: list[str], protection: Protection) -> tuple[Member, ...]:
    members = []
    used = {0}
    for identifier, room_bytes, *places, state, device, reserved in RING_TABLE_MEMBER.struct.iter_unpack(packed):
        if max(*places, device) >= len(names) or state not in _STATES or reserved != _MEMBER_RESERVED:
            raise _refused("a member has an impossible value")
        used.update((*places, device))
        machine, rack, zone = (names[place] for place in places)
        members.append(Member(MemberId(identifier), room_bytes, machine, rack, zone, _STATES[state], names[device]))
    if len(used) != len(names):
        raise _refused("it names a domain that no member is in")
    checked = checked_members(protection, members, accept_loss=True)
    if list(checked) != members:
        raise _refused("its members are not in the order of their ids")
    return checked


def _unpack_rows(packed: memoryview, protection: Protection, members: Sequence[Member]) -> tuple[Row, ...]:
    places = array("H")
    places.frombytes(packed)
    if sys.byteorder == "big":
        places.byteswap()
    row_places = protection.width + SUBSTITUTE_COUNT
    placing = {index for index, member in enumerate(members) if member.state is Standing.IN}
    for column in range(row_places):
        if not set(places[column::row_places]) <= placing | ({NO_MEMBER} if column >= protection.width else set()):
            raise _refused("a row names a member that gets no places")
    return tuple(zip(*[iter(places)] * row_places, strict=True))


def _refused(why: str) -> ProtocolError:
    return ProtocolError(f"not a ring table that this release writes: {why}")
