"""The record of the answers of members that names are bound on: the joined gc generation, the oldest ring epoch.

counter `gc generation`  msgpack array: version 1, generation, oldest epoch (absent: 0, no epoch is refused)
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine.format.records import decode_record
from lakefs.errors import StoreUnusable

JOINED_KEY: Final = b"gc generation"
_VERSION: Final = 1


class JoinedRecord(msgspec.Struct, array_like=True, frozen=True):
    """The joined generation, and the oldest ring epoch whose answers are not refused, as stored."""

    version: int = _VERSION
    generation: int = 0
    oldest_epoch: int = 0


_decoder: Final = msgspec.msgpack.Decoder(JoinedRecord)


def pack_joined(generation: int, oldest_epoch: int = 0) -> bytes:
    """Pack the record."""
    return msgspec.msgpack.encode(JoinedRecord(generation=generation, oldest_epoch=oldest_epoch))


def unpack_joined(value: bytes) -> JoinedRecord:
    """Return an (already verified) record.  StoreUnusable for one of another release."""
    record = decode_record(_decoder, value, "the record of the joined gc generation")
    if record.version != _VERSION:
        raise StoreUnusable(f"the record of the joined gc generation has version {record.version}, which is not known")
    return record
