"""Records of the table `keyed`: spaces, and the values of their keys.

    next     0                             counter record: the lowest number of a space that was never handed out
    name     1, name of a space            number of the space
    value    2, number (4), key (1 to 64)  keyed head, then a keyed part for each part
    space    3, number (4)                 msgpack array: settings and usage of the space
    expiry   4, expires_ns (8), number (4), key: empty; one for each value that expires

A value is one record, however many parts it has: so it exists whole or not at all.  A space that was removed has no
name, and keeps its record, with `removed` set, until all its values are gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine.format.records import decode_record
from lakefs.errors import StoreUnusable
from lakefs.ids import ChunkId, ChunkKind
from lakefs.layout import Layout
from lakefs.limits import CHUNK_BYTES, KEYED_KEY_BYTES_MAX, KEYED_PARTS_MAX, KEYED_VALUE_BYTES_MAX

NEXT_KEY: Final = b"\x00"
NAMES_BEGIN: Final = b"\x01"
VALUES_BEGIN: Final = b"\x02"
VALUES_END: Final = b"\x03"
SPACES_BEGIN: Final = b"\x03"
SPACES_END: Final = b"\x04"
EXPIRIES_BEGIN: Final = b"\x04"
EXPIRIES_END: Final = b"\x05"
NUMBER_MAX: Final = (1 << 32) - 1
NOT_COUNTED: Final = -1
_KEY_AT: Final = 5
_VERSION: Final = 1

KEYED_HEAD: Final = Layout(
    "keyed head",
    24,
    [("version", "B"), ("flags", "B"), ("depth", "H"), ("part_count", "I"), ("created_ns", "Q"), ("expires_ns", "Q")],
)
KEYED_PART: Final = Layout("keyed part", 36, [("digest", "32s"), ("part_bytes", "I")])


class SpaceRecord(msgspec.Struct, frozen=True, array_like=True):
    """A space: its settings, and number, bytes and parts of its values.  `quota_bytes` and `ttl_ns`: 0 means none."""

    version: int
    name: str
    domain: int
    created_ns: int
    quota_bytes: int
    ttl_ns: int
    entries: int
    value_bytes: int
    removed: bool = False
    parts: int = NOT_COUNTED
    """Parts of all values; NOT_COUNTED in records of an earlier release, which are counted when the store is opened."""

    def pack(self) -> bytes:
        """Pack the record."""
        return _encoder.encode(self)


_encoder: Final = msgspec.msgpack.Encoder()
_spaces: Final = msgspec.msgpack.Decoder(SpaceRecord)


class KeyedValue(msgspec.Struct, frozen=True, gc=False):
    """The value of a key: ids and lengths of its parts.  `expires_ns`, by the wall clock: 0 means never.

    `depth` is the place of the key in its chain.
    """

    created_ns: int
    expires_ns: int
    depth: int
    chunks: tuple[ChunkId, ...]
    lengths: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.lengths)

    def pack(self) -> bytes:
        """Pack head and parts."""
        assert 0 < len(self.chunks) == len(self.lengths) <= KEYED_PARTS_MAX, "a value has 1 to 256 parts"
        parts = [KEYED_PART.pack(chunk[1:], length) for chunk, length in zip(self.chunks, self.lengths, strict=True)]
        head = KEYED_HEAD.pack(_VERSION, 0, self.depth, len(parts), self.created_ns, self.expires_ns)
        return b"".join((head, *parts))


def unpack_value(value: bytes) -> KeyedValue:
    """Unpack a value from its (already verified) record.  StoreUnusable for a later version or impossible parts."""
    depth, created_ns, expires_ns, chunks, lengths = _unpacked(value)
    return KeyedValue(created_ns, expires_ns, depth, tuple(chunks), tuple(lengths))


def chunks_of(value: bytes) -> list[ChunkId]:
    """Return the chunks of a value's (already verified) record, for a walk of all values.  Errors of `unpack_value`."""
    return _unpacked(value)[3]


def _unpacked(value: bytes) -> tuple[int, int, int, list[ChunkId], list[int]]:
    """Return depth, time of creation, expiry, chunks and their lengths."""
    if len(value) < KEYED_HEAD.size:
        raise StoreUnusable(f"keyed record of {len(value)} bytes, at least {KEYED_HEAD.size} expected")
    version, flags, depth, part_count, created_ns, expires_ns = KEYED_HEAD.unpack_from(value)
    if (version, flags) != (_VERSION, 0):
        raise StoreUnusable(f"keyed record version {version}, flags {flags:#x} is not known")
    if not 1 <= part_count <= KEYED_PARTS_MAX or len(value) != KEYED_HEAD.size + part_count * KEYED_PART.size:
        raise StoreUnusable(f"keyed record of {len(value)} bytes with {part_count} parts")
    parts = [*KEYED_PART.struct.iter_unpack(value[KEYED_HEAD.size :])]
    if part_count == 1 and 1 <= parts[0][1] <= CHUNK_BYTES:  # by far the most
        return depth, created_ns, expires_ns, [ChunkId(_DATA + parts[0][0])], [parts[0][1]]
    chunks = [ChunkId(_DATA + digest) for digest, _ in parts]
    lengths = [length for _, length in parts]
    if not 1 <= min(lengths) <= max(lengths) <= CHUNK_BYTES or sum(lengths) > KEYED_VALUE_BYTES_MAX:
        raise StoreUnusable(f"keyed record whose parts have {min(lengths)} to {max(lengths)} bytes")
    return depth, created_ns, expires_ns, chunks, lengths


_DATA: Final = bytes([ChunkKind.DATA])


def unpack_space(value: bytes) -> SpaceRecord:
    """Unpack a space from its (already verified) record.  StoreUnusable for a later version."""
    record = decode_record(_spaces, value, "a space's record")
    if record.version != _VERSION:
        raise StoreUnusable(f"space record version {record.version} is not known")
    return record


def name_key(name: str) -> bytes:
    """Key of a space's name."""
    return NAMES_BEGIN + name.encode()


def space_key(number: int) -> bytes:
    """Key of a space's record."""
    return SPACES_BEGIN + number.to_bytes(4, "big")


def number_of_space(key: bytes) -> int:
    """The number of the space, from the key of its record."""
    return int.from_bytes(key[1:_KEY_AT], "big")


def value_key(number: int, key: bytes) -> bytes:
    """Key of the value of a key in a space."""
    assert 0 < len(key) <= KEYED_KEY_BYTES_MAX, "a key has 1 to 64 bytes"
    return VALUES_BEGIN + number.to_bytes(4, "big") + key


def space_and_key(key: bytes) -> tuple[int, bytes]:
    """The space's number and the caller's key, from the key of a value."""
    return int.from_bytes(key[1:_KEY_AT], "big"), key[_KEY_AT:]


def expiry_key(expires_ns: int, number: int, key: bytes) -> bytes:
    """Key of the record that says when a value expires."""
    return EXPIRIES_BEGIN + expires_ns.to_bytes(8, "big") + number.to_bytes(4, "big") + key


def unpack_expiry_key(key: bytes) -> tuple[int, int, bytes]:
    """The time, the space's number and the caller's key, from the key of an expiry."""
    return int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:13], "big"), key[13:]


def expiries_until(now_ns: int) -> tuple[bytes, bytes]:
    """Start and end of the keys of all expiries up to a time."""
    return EXPIRIES_BEGIN, EXPIRIES_BEGIN + (now_ns + 1).to_bytes(8, "big")


def values_range(number: int) -> tuple[bytes, bytes]:
    """Start and end of the keys of all values of a space."""
    start = VALUES_BEGIN + number.to_bytes(4, "big")
    end = VALUES_END if number == NUMBER_MAX else VALUES_BEGIN + (number + 1).to_bytes(4, "big")
    return start, end
