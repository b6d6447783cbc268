"""Memory that a caller lends to be filled: anything with the buffer protocol, and torch tensors on the CPU.

Nothing is copied: the view is the lender's own memory, which must not be freed, resized or used otherwise until the
call that it was lent to has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from lakefs.errors import InvalidArgument
from lakefs.host.plain_bytes import plain_bytes
from lakefs.ids import id_text

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Array(Protocol):
    """A numpy array, which has the buffer protocol though type checkers do not know it before Python 3.12."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array interface; its address says where the elements are."""


@runtime_checkable
class Tensor(Protocol):
    """The part of a torch tensor's interface used here; a tensor has no buffer protocol."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def is_cpu(self) -> bool:
        """True if it is in this machine's memory."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def is_contiguous(self) -> bool:
        """Return True if its elements follow each other without gaps."""


WritableBuffer: TypeAlias = "Buffer | Array | Tensor"
"""Memory that can be read into: contiguous, writable, on this machine."""


def writable_memory(lent: WritableBuffer, name: str) -> memoryview:
    """Return the lent memory as bytes; `name` is the object to be read into it, for messages.

    InvalidArgument: it is not memory, holds Python objects, is read-only, is not contiguous, or lies in another device.
    """
    if type(lent) is memoryview and lent.format == "B" and lent.ndim == 1 and not lent.readonly and lent.contiguous:
        return lent
    try:
        view = plain_bytes(lent)
    except TypeError as error:
        if isinstance(lent, Tensor):
            return _tensor_memory(lent, name)
        raise _unusable(lent, name, str(error)) from None
    if view.readonly:
        raise _unusable(lent, name, "is read-only")
    return view


def chunk_memories(chunks: Sequence[bytes], lent: Sequence[WritableBuffer]) -> list[memoryview]:
    """Return the memory for each chunk.  InvalidArgument."""
    if len(chunks) != len(lent):
        raise InvalidArgument(f"{len(chunks)} chunks and {len(lent)} buffers do not go together")
    return [writable_memory(buffer, id_text(chunk)) for chunk, buffer in zip(chunks, lent, strict=True)]


def _tensor_memory(tensor: Tensor, name: str) -> memoryview:
    if not tensor.is_cpu:
        raise _unusable(tensor, name, "is not in this machine's memory")
    if not tensor.is_contiguous():
        raise _unusable(tensor, name, "is not contiguous")
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _unusable(lent: object, name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"the {type(lent).__name__} to read {name} into {why}", subject=name)
