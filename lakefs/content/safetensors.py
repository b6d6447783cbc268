"""Parses the header of a safetensors file: where its tensors begin, or None for any other file.

A file is 8 bytes of header length (little-endian), a JSON object of that length, then the tensors' bytes:
    {"__metadata__": {text: text}, NAME: {"dtype": T, "shape": [n, ...], "data_offsets": [begin, end]}, ...}
Offsets count from the end of the header; tensors must cover the rest of the file without hole or overlap.

Cutting (`lakefs.content.chunking`) needs the layout, which keeps only each tensor's length.

Rules kept here:
- The header is untrusted.  A header that does not check out to the last byte gives None, never an exception.  A wrong
  None, or a wrong layout, costs at most dedup: cuts never change the bytes.
- Time is linear in the header.  Memory beside the header itself is a dict of names and 16 bytes a tensor, and a sort
  of the extents if they are out of order.  No call recurses with the input.
- Duplicate names are refused.  A JSON decoder for the whole header would keep the last one silently, or build every
  value that a hostile header can spell; so the object is walked member by member with regular expressions that cannot
  backtrack, and only one tensor's value (at most 4 KiB) is decoded at a time, into a fixed type.

A header of 1 MiB or more takes tens of milliseconds: parse it through `Offload`.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

from lakefs.ids import Buffer
from lakefs.limits import BLOB_BYTES_MAX, KIB, SAFETENSORS_HEADER_BYTES_MAX, SAFETENSORS_TENSORS_MAX

LENGTH_BYTES: Final = 8
METADATA: Final = b"__metadata__"
"""The one member of a header that is not a tensor."""
SMALLEST_FILE_BYTES: Final = LENGTH_BYTES + len("{}")

DTYPE_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one element; elements of less than a byte are packed and fill whole bytes in sum."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """Layout of a sound header.

    `header_bytes` includes the length prefix; `tensor_lengths` are bytes, in file order, and with `header_bytes` sum
    to the file's length.  Empty tensors have length 0.
    """

    header_bytes: int
    tensor_lengths: array[int]


def header_bytes(prefix: Buffer, file_bytes: int) -> int | None:
    """Return the number of first bytes of the file that `parse_header` needs; None if it cannot be a safetensors
    file.

    `prefix` is the first 8 bytes or more (all of a shorter file); the ninth byte rules out more files.
    """
    if file_bytes < SMALLEST_FILE_BYTES:
        return None
    assert len(prefix) >= LENGTH_BYTES, "the length prefix is needed"
    json_bytes = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not len("{}") <= json_bytes <= min(SAFETENSORS_HEADER_BYTES_MAX, file_bytes - LENGTH_BYTES):
        return None
    if len(prefix) > LENGTH_BYTES and prefix[LENGTH_BYTES] != ord("{"):
        return None
    return LENGTH_BYTES + json_bytes


def parse_header(prefix: Buffer, file_bytes: int) -> SafetensorsHeader | None:
    """Return the tensors' layout of a file of `file_bytes`; None if it is not a sound safetensors file.

    `prefix` holds at least as many first bytes as `header_bytes` returns.
    """
    needed = header_bytes(prefix, file_bytes)
    if needed is None:
        return None
    assert len(prefix) >= needed, f"{needed} first bytes are needed, {len(prefix)} given"
    text = memoryview(prefix)[:needed]
    try:
        _check_utf8(text[LENGTH_BYTES:])
        extents = _read_extents(text)
    except (_NotSafetensors, msgspec.DecodeError, UnicodeDecodeError):
        return None
    data_bytes = file_bytes - needed
    lengths = _tile(zip(extents.begins, extents.ends, strict=True), data_bytes)
    if lengths is None:
        lengths = _tile(sorted(zip(extents.begins, extents.ends, strict=True)), data_bytes)
    return None if lengths is None else SafetensorsHeader(needed, lengths)


def file_bytes(prefix: Buffer) -> int | None:
    """Return the length of the file that a header describes; None if it is not a header.

    `prefix` holds at least as many first bytes as `header_bytes` returns.  `parse_header` checks if it is sound.
    """
    needed = header_bytes(prefix, BLOB_BYTES_MAX)
    if needed is None:
        return None
    try:
        ends = _read_extents(memoryview(prefix)[:needed]).ends
    except (_NotSafetensors, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return needed + max(ends, default=0)


class _NotSafetensors(Exception):
    """The header breaks a rule of the format; turned to None by `parse_header` and `file_bytes`."""


class _Extents(NamedTuple):
    """Begins and ends of a header's tensors, in its order, after the header."""

    begins: array[int]
    ends: array[int]


_Count = Annotated[int, msgspec.Meta(ge=0, le=BLOB_BYTES_MAX)]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The value of one tensor's name in the header."""

    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


_tensor_decoder: Final = msgspec.json.Decoder(_Tensor)
_name_decoder: Final = msgspec.json.Decoder(str)

# JSON's grammar (RFC 8259) in pieces.  All repetitions are possessive: there is one way to match, or none.
_BLANK: Final = rb"[ \t\n\r]*+"
_TEXT: Final = rb'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
_OPEN = re.compile(rb"\{" + _BLANK + rb"(\}?)")
_NAME = re.compile(_BLANK + rb'"(' + _TEXT + rb')"' + _BLANK + rb":" + _BLANK)
_TENSOR_VALUE = re.compile(rb"(\{[^{}]{0,%d}+\})" % (4 * KIB) + _BLANK + rb"([,}])")
_TEXT_VALUE = re.compile(rb'"' + _TEXT + rb'"' + _BLANK + rb"([,}])")
_PADDING = re.compile(_BLANK)
_SEPARATOR = re.compile(_BLANK + rb"([,}])")


def _check_utf8(text: memoryview) -> None:
    """Raise UnicodeDecodeError if the text is not UTF-8; piecewise, so that no whole decoded copy exists."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), 64 * KIB):
        decoder.decode(text[start : start + 64 * KIB])
    decoder.decode(b"", final=True)


def _read_extents(text: memoryview) -> _Extents:
    """Return the tensors, in the header's order, each sound by itself."""
    begins, ends = array("Q"), array("Q")
    names: dict[bytes, None] = {}
    at, closed = _enter_object(text, LENGTH_BYTES)
    while not closed:
        name, at = _read_name(text, at, names)
        if name == METADATA:
            at, closed = _skip_metadata(text, at)
            continue
        value = _TENSOR_VALUE.match(text, at)
        if value is None:
            raise _NotSafetensors
        begin, end = _tensor_extent(value[1])
        begins.append(begin)
        ends.append(end)
        at, closed = value.end(), value[2] == b"}"
    padding = _PADDING.match(text, at)
    if padding is None or padding.end() != len(text):
        raise _NotSafetensors
    return _Extents(begins, ends)


def _enter_object(text: memoryview, at: int) -> tuple[int, bool]:
    """Return the position behind the `{` at `at`, and True if the object is empty and closed already."""
    opened = _OPEN.match(text, at)
    if opened is None:
        raise _NotSafetensors
    return opened.end(), bool(opened[1])


def _read_name(text: memoryview, at: int, names: dict[bytes, None]) -> tuple[bytes, int]:
    """Return the member's name at `at` in UTF-8, which is added to `names`, and the start of its value."""
    found = _NAME.match(text, at)
    if found is None or len(names) > SAFETENSORS_TENSORS_MAX:
        raise _NotSafetensors
    name = bytes(found[1])
    if b"\\" in name:
        name = _name_decoder.decode(b'"' + name + b'"').encode()
    if name in names:
        raise _NotSafetensors
    names[name] = None
    return name, found.end()


def _skip_metadata(text: memoryview, at: int) -> tuple[int, bool]:
    """Return the position behind the map of texts at `at` and its separator, and True if that closes the header."""
    names: dict[bytes, None] = {}
    at, closed = _enter_object(text, at)
    while not closed:
        _, at = _read_name(text, at, names)
        value = _TEXT_VALUE.match(text, at)
        if value is None:
            raise _NotSafetensors
        at, closed = value.end(), value[1] == b"}"
    separator = _SEPARATOR.match(text, at)
    if separator is None:
        raise _NotSafetensors
    return separator.end(), separator[1] == b"}"


def _tensor_extent(value: bytes) -> tuple[int, int]:
    """Return begin and end of one tensor, whose length is that of its shape and element type.

    The decoder keeps the last of duplicate fields, so colons are counted: with the three fields present and no other,
    three colons mean each field once.  The decoder also accepts -0, which is not a count.
    """
    tensor = _tensor_decoder.decode(value)
    bits = DTYPE_BITS.get(tensor.dtype)
    if bits is None or value.count(b":") != 3 or b"-" in value:
        raise _NotSafetensors
    for extent in tensor.shape:
        bits *= extent
        if bits > 8 * BLOB_BYTES_MAX:
            raise _NotSafetensors
    begin, end = tensor.data_offsets
    if bits != 8 * (end - begin):
        raise _NotSafetensors
    return begin, end


def _tile(extents: Iterable[tuple[int, int]], data_bytes: int) -> array[int] | None:
    """Return the lengths of extents that follow each other from 0 to `data_bytes`; None if they do not."""
    lengths = array("Q")
    at = 0
    for begin, end in extents:
        if begin != at:
            return None
        lengths.append(end - begin)
        at = end
    return lengths if at == data_bytes else None
