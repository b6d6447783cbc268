"""The record of the gc generation that names have joined.

counter `gc generation`  msgpack array: version 1, generation
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine.format.records import decode_record
from lakefs.errors import StoreUnusable

JOINED_KEY: Final = b"gc generation"
_VERSION: Final = 1


class JoinedRecord(msgspec.Struct, array_like=True, frozen=True):
    """The joined generation, as stored."""

    version: int = _VERSION
    generation: int = 0


_decoder: Final = msgspec.msgpack.Decoder(JoinedRecord)


def pack_joined(generation: int) -> bytes:
    """Pack the record."""
    return msgspec.msgpack.encode(JoinedRecord(generation=generation))


def unpack_joined(value: bytes) -> int:
    """Return the generation of an (already verified) record.  StoreUnusable for one of another release."""
    record = decode_record(_decoder, value, "the record of the joined gc generation")
    if record.version != _VERSION:
        raise StoreUnusable(f"the record of the joined gc generation has version {record.version}, which is not known")
    return record.generation
