"""Keys of shards in the table `chunks`, and the record of a member's ring epoch.

    key of a shard        that of its chunk, with the shard's number in place of 255 as the last byte
    record of a shard     a chunk record: stored_bytes and checksum are the shard's, logical_bytes is its chunk's length
    counter `ring epoch`  msgpack array: version 1, epoch

So the shards of a chunk are neighbours, and those of a ring partition are one range of keys for each kind of chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from engine.format.layouts import CHECKSUM_CRC32C_GRANULE, CHUNK_RECORD, chunk_key, unpack_chunk_record
from lakefs.errors import StoreUnusable
from lakefs.ids import WHOLE_CHUNK, Birth, ChunkId, ChunkKind, ShardNumber
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES

EPOCH_KEY: Final = b"ring epoch"
_DIGEST_AT: Final = 3
_DEFAULT_DOMAIN: Final = b"\0\0"


def shard_key(chunk: ChunkId, shard: ShardNumber) -> bytes:
    """Key of a shard in the table `chunks`; of the chunk itself for WHOLE_CHUNK."""
    return chunk_key(chunk)[:-1] + bytes((shard,))


def shard_of_key(key: bytes) -> ShardNumber:
    """Return the number of the shard whose key this is; WHOLE_CHUNK for a chunk's own."""
    return ShardNumber(key[-1])


def is_whole(key: bytes) -> bool:
    """Return True for the key of a chunk that is not a shard."""
    return key[-1] == WHOLE_CHUNK


def partition_of_key(key: bytes, partition_bits: int) -> int:
    """Return the ring partition of the chunk whose key this is: the first bits of its digest, 16 at most."""
    return int.from_bytes(key[_DIGEST_AT : _DIGEST_AT + 2], "big") >> (16 - partition_bits)


def shards_of(chunk: ChunkId) -> tuple[bytes, bytes]:
    """Return the range of keys, the end excluded, of all shards of a chunk."""
    key = chunk_key(chunk)
    return key[:-1], key


def ranges_between(begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    """Return the ranges of keys of chunks with digests from `begin` to below `end`, ascending; b"": no bound."""
    ranges: list[tuple[bytes, bytes]] = []
    for kind in ChunkKind:
        prefix = bytes((kind,)) + _DEFAULT_DOMAIN
        ranges.append((prefix + begin, prefix + end if end else bytes((kind,)) + b"\0\1"))
    return ranges


def may_be_of(shard_bytes: int, chunk_bytes: int) -> bool:
    """Return True if a chunk of that length may have a shard of that length, whatever the lake's protection is."""
    if not 0 < shard_bytes <= chunk_bytes <= CHUNK_BYTES:
        return False
    return shard_bytes == chunk_bytes or chunk_bytes > GRANULE_BYTES


class RecordColumns(NamedTuple):
    """Fields of several records of shards, in order: one column for each."""

    births: tuple[Birth, ...]
    lengths: tuple[int, ...]
    chunk_lengths: tuple[int, ...]
    crcs: tuple[int, ...]


def unpack_columns(values: Sequence[bytes]) -> RecordColumns:
    """Unpack at least one record from (already verified) values; 0.3 us each.  StoreUnusable, as `unpack_chunk_record`.

    So many at once cost a third of one by one.
    """
    for value in values:
        if len(value) != CHUNK_RECORD.size or value[:4] != _KNOWN:
            unpack_chunk_record(value)
            raise AssertionError("such a record is refused")
    fields = list(zip(*CHUNK_RECORD.struct.iter_unpack(b"".join(values)), strict=True))
    return RecordColumns(fields[5], fields[8], fields[9], fields[10])


_KNOWN: Final = bytes((1, 0, 0, CHECKSUM_CRC32C_GRANULE))


class EpochRecord(msgspec.Struct, array_like=True, frozen=True):
    """The ring epoch of a member, as stored."""

    version: int = 1
    epoch: int = 0


def unpack_epoch(value: bytes) -> EpochRecord:
    """Unpack the record from its (already verified) value.  StoreUnusable for one of another release."""
    try:
        record = msgspec.msgpack.decode(value, type=EpochRecord)
    except msgspec.DecodeError as error:
        raise StoreUnusable(f"the record of the ring epoch cannot be read ({error})") from error
    if record.version != 1:
        raise StoreUnusable(f"the record of the ring epoch has version {record.version}, which is not known")
    return record
