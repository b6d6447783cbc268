"""Fixed binary layouts: one declaration gives the struct, its size and the field table of the documents.

Every fixed structure of the store and of the wire is declared once as a `Layout`, in the module that packs it.
`docs/format.md` and `docs/protocol.md` hold the same tables for readers, and a test compares the two, field by field.

Rules: little-endian, no implicit padding, every byte of a layout has a name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

_REGISTRY: Final[dict[str, Layout]] = {}


@dataclass(frozen=True)
class Field:
    """One field of a layout: its name, struct code, offset and size in bytes."""

    name: str
    code: str
    offset: int
    size: int


class Layout:
    """A named, fixed-size, little-endian structure without implicit padding.

    `fields` is a sequence of (name, struct code); `size` asserts the total in bytes, so that an edit that
    moves a field fails at import.  `pack` and `unpack_from` are the bound methods of one `struct.Struct`.
    """

    def __init__(self, name: str, size: int, fields: list[tuple[str, str]]) -> None:
        self.name = name
        self.size = size
        self.struct = struct.Struct("<" + "".join(code for _, code in fields))
        assert self.struct.size == size, f"{name}: {self.struct.size} bytes declared as {size}"
        placed: list[Field] = []
        offset = 0
        for field_name, code in fields:
            width = struct.calcsize("<" + code)
            placed.append(Field(field_name, code, offset, width))
            offset += width
        self.fields: tuple[Field, ...] = tuple(placed)
        self.pack = self.struct.pack
        self.pack_into = self.struct.pack_into
        self.unpack = self.struct.unpack
        self.unpack_from = self.struct.unpack_from
        assert name not in _REGISTRY, f"layout {name} is declared twice"
        _REGISTRY[name] = self

    def offset_of(self, field_name: str) -> int:
        """Return the byte offset of the named field; KeyError for an unknown one."""
        for field in self.fields:
            if field.name == field_name:
                return field.offset
        raise KeyError(field_name)

    def unpack_fields(self, buffer: bytes | bytearray | memoryview) -> dict[str, Any]:
        """Return the fields by name, for tools and tests; hot paths unpack to a tuple instead."""
        values = self.struct.unpack_from(buffer)
        return dict(zip((field.name for field in self.fields), values, strict=True))


def registered() -> dict[str, Layout]:
    """Return all layouts declared by the modules imported so far, by name."""
    return dict(_REGISTRY)
