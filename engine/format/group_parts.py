"""Keys and values of the log of groups in the coordinator.

    names/SHARD/leader                  the replica that leads, on its lease; the revision of this key is its term
    names/SHARD/wanted                  id of the replica that shall lead, on its lease
    names/SHARD/origin                  id of the replica that begins the log, behind all that it has
    names/SHARD/replicas/ID             a replica, and the last group that it has kept; ID in hex
    names/SHARD/holds/ID                a replica that begins anew, on its lease: nothing is trimmed
    names/SHARD/log                     the last group that was trimmed: the log begins behind it
    names/SHARD/log/SEQUENCE/PART       a part of a group; 16 and 4 hex digits

    value of a part       group part head, then bytes of the group's body
    value of the last     group part head, group end, then bytes of the group's body

A group is its parts in order.  Without its last part it never was.  The body is that of a journal group
(`docs/format.md`).  SHARD is 4 hex digits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from crc32c import crc32c

from lakefs.errors import StoreDamaged, StoreUnusable
from lakefs.ids import NamesShard, ReplicaId, Revision, Sequence
from lakefs.layout import Layout
from lakefs.limits import COORDINATOR_VALUE_BYTES_MAX, GROUP_BYTES_MAX

GROUP_PART_HEAD: Final = Layout("group part head", 14, [("crc", "I"), ("kind", "B"), ("version", "B"), ("term", "Q")])
GROUP_END: Final = Layout(
    "group end",
    22,
    [("sequence", "Q"), ("record_count", "I"), ("body_bytes", "I"), ("part_count", "H"), ("body_crc", "I")],
)
_INNER: Final = 0
_LAST: Final = 1
_VERSION: Final = 1
_CRC_BYTES: Final = 4
_PIECE_BYTES: Final = COORDINATOR_VALUE_BYTES_MAX - GROUP_PART_HEAD.size - GROUP_END.size
PARTS_MAX: Final = -(-GROUP_BYTES_MAX // _PIECE_BYTES)


FIRST_SHARD: Final = NamesShard(0)


class LogKeys:
    """The keys of one names shard."""

    def __init__(self, shard: NamesShard) -> None:
        prefix = b"names/%04x/" % shard
        self.leader: Final = prefix + b"leader"
        self.wanted: Final = prefix + b"wanted"
        self.origin: Final = prefix + b"origin"
        self.log: Final = prefix + b"log"
        self.groups: Final = prefix + b"log/", prefix + b"log0"
        """Begin and end of the keys of all parts."""
        self.followed: Final = self.leader, self.groups[1]
        """Begin and end of the keys that a replica follows: leader, log and parts."""
        self.holds: Final = prefix + b"holds/", prefix + b"holds0"
        self.replicas: Final = prefix + b"replicas/", prefix + b"replicas0"

    def replica(self, replica: bytes) -> bytes:
        """Key of a replica."""
        return self.replicas[0] + replica.hex().encode()

    def replica_of(self, key: bytes) -> ReplicaId:
        """Return the replica that has a key."""
        return ReplicaId(bytes.fromhex(key.removeprefix(self.replicas[0]).decode()))

    def hold(self, replica: bytes) -> bytes:
        """Key of a replica that begins anew."""
        return self.holds[0] + replica.hex().encode()

    def part(self, sequence: int, part: int) -> bytes:
        """Key of a part of a group."""
        return self.groups[0] + b"%016x/%04x" % (sequence, part)

    def group(self, sequence: int) -> bytes:
        """Return a key at or before all parts of a group, and behind those of the group before it."""
        return self.groups[0] + b"%016x" % sequence

    def place(self, key: bytes) -> tuple[Sequence, int] | None:
        """Return the group and the number of the part that has this key; None if it is not a part's."""
        begin, _ = self.groups
        if not key.startswith(begin):
            return None
        sequence, _, part = key.removeprefix(begin).partition(b"/")
        return Sequence(int(sequence, 16)), int(part, 16)


class GroupEnd(NamedTuple):
    """The last part's word about its group."""

    sequence: Sequence
    record_count: int
    body_bytes: int
    part_count: int
    body_crc: int


class Part(NamedTuple):
    """An unpacked part.  `end`: of the last part only."""

    term: Revision
    piece: bytes
    end: GroupEnd | None


def pack_parts(term: Revision, sequence: Sequence, record_count: int, body: bytes) -> list[bytes]:
    """Return the values of a group's parts, the last one behind all others."""
    pieces = [body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES)] or [b""]
    end = GROUP_END.pack(sequence, record_count, len(body), len(pieces), crc32c(body))
    inner = [_packed(_INNER, term, piece) for piece in pieces[:-1]]
    return [*inner, _packed(_LAST, term, end + pieces[-1])]


def _packed(kind: int, term: Revision, rest: bytes) -> bytes:
    checked = GROUP_PART_HEAD.pack(0, kind, _VERSION, term)[_CRC_BYTES:] + rest
    return crc32c(checked).to_bytes(_CRC_BYTES, "little") + checked


def unpack_part(key: bytes, value: bytes) -> Part:
    """Unpack a part.  StoreUnusable for a later version, StoreDamaged for bytes that are none."""
    if len(value) < GROUP_PART_HEAD.size:
        raise _damaged(key, "it is too short")
    crc, kind, version, term = GROUP_PART_HEAD.unpack_from(value)
    if crc32c(memoryview(value)[_CRC_BYTES:]) != crc:
        raise _damaged(key, "it does not match its checksum")
    if version != _VERSION or kind not in (_INNER, _LAST):
        raise StoreUnusable(f"the coordinator's {key.decode()} has version {version}: it is of a later release")
    piece_at = GROUP_PART_HEAD.size
    if kind == _INNER:
        return Part(Revision(term), value[piece_at:], None)
    if len(value) < piece_at + GROUP_END.size:
        raise _damaged(key, "it is too short")
    sequence, record_count, body_bytes, part_count, body_crc = GROUP_END.unpack_from(value, piece_at)
    end = GroupEnd(Sequence(sequence), record_count, body_bytes, part_count, body_crc)
    return Part(Revision(term), value[piece_at + GROUP_END.size :], end)


def joined(key: bytes, parts: list[Part]) -> bytes:
    """Return the body of a group whose parts are all here, checked.  StoreDamaged when they do not make it."""
    end = parts[-1].end
    assert end is not None, "the last part has the end"
    body = b"".join(part.piece for part in parts)
    if len(parts) != end.part_count or len({part.term for part in parts}) != 1:
        raise _damaged(key, "its parts are not of one group")
    if len(body) != end.body_bytes or crc32c(body) != end.body_crc:
        raise _damaged(key, "its body does not match its checksum")
    return body


def _damaged(key: bytes, reason: str) -> StoreDamaged:
    return StoreDamaged(f"the coordinator's {key.decode()} is damaged: {reason}", subject=key.decode())
