"""Memory that a caller lends to be filled: anything with the buffer protocol, and torch tensors on the CPU.

Nothing is copied: the view is the lender's own memory, which must not be freed, resized or used otherwise until the
call that it was lent to has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from lakefs.errors import InvalidArgument
from lakefs.host.arrays import Array, DlpackArray, Tensor, is_tensor, tensor_bytes
from lakefs.host.plain_bytes import plain_bytes
from lakefs.ids import id_text

if TYPE_CHECKING:
    from typing_extensions import Buffer
else:
    Buffer = bytes | bytearray | memoryview  # Python 3.12 has it


WritableBuffer: TypeAlias = Buffer | Array | Tensor
"""Memory that can be read into: contiguous, writable, on this machine."""

ReadableBuffer: TypeAlias = Buffer | Array | Tensor | DlpackArray
"""Memory that can be stored: contiguous, on this machine."""


def writable_memory(lent: WritableBuffer, name: str) -> memoryview:
    """Return the lent memory as bytes; `name` is the object to be read into it, for messages.

    InvalidArgument: it is not memory, holds Python objects, is read-only, is not contiguous, or lies in another device.
    """
    if type(lent) is memoryview and lent.format == "B" and lent.ndim == 1 and not lent.readonly and lent.contiguous:
        return lent
    try:
        view = plain_bytes(lent)
    except TypeError as error:
        if not is_tensor(lent):
            raise _unusable(lent, name, str(error)) from None
        try:
            return tensor_bytes(lent)
        except TypeError as unusable:
            raise _unusable(lent, name, str(unusable)) from None
    if view.readonly:
        raise _unusable(lent, name, "is read-only")
    return view


def chunk_memories(chunks: Sequence[bytes], lent: Sequence[WritableBuffer]) -> list[memoryview]:
    """Return the memory for each chunk.  InvalidArgument."""
    if len(chunks) != len(lent):
        raise InvalidArgument(f"{len(chunks)} chunks and {len(lent)} buffers do not go together")
    return [writable_memory(buffer, id_text(chunk)) for chunk, buffer in zip(chunks, lent, strict=True)]


def _unusable(lent: object, name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"the {type(lent).__name__} to read {name} into {why}", subject=name)
