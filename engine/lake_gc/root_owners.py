"""Owners of roots as bytes of messages: what refers to a blob that a walk through the names meets.

empty                      a lease
`n`, node id, 8 bytes      a node; big-endian
`p`, key of 19 bytes       a part of an unfinished upload (`engine.uploads.keys`)
"""

from __future__ import annotations

from typing import Final

from engine.upkeep.roots import Owner
from engine.uploads.keys import PARTS_BEGIN, PARTS_END, UPLOAD_ID_BYTES
from lakefs.errors import InvalidArgument
from lakefs.ids import NodeId

_NODE: Final = b"n"
_PART: Final = b"p"
_PART_KEY_BYTES: Final = 1 + UPLOAD_ID_BYTES + 2


def packed_owner(owner: Owner) -> bytes:
    """Return an owner as a message has it."""
    if owner is None:
        return b""
    return _PART + owner if isinstance(owner, bytes) else _NODE + owner.to_bytes(8, "big")


def unpacked_owner(value: bytes) -> Owner:
    """Return the owner that a message has.  InvalidArgument for what is none."""
    if not value:
        return None
    kind, rest = value[:1], value[1:]
    if kind == _NODE and len(rest) == 8:
        return NodeId(int.from_bytes(rest, "big"))
    if kind == _PART and len(rest) == _PART_KEY_BYTES and PARTS_BEGIN <= rest < PARTS_END:
        return rest
    raise InvalidArgument("these bytes are no owner of a blob", subject=value.hex())
