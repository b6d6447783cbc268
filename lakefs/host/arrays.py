"""The memory of arrays and tensors that lend no buffer: torch, and whatever has `__array_interface__` or `__dlpack__`.

No library of arrays is imported.  Nothing is copied: the view is the array's own memory.

Rules kept here:
- Elements must follow each other without gaps, in this machine's memory.  Nothing is copied to make it so: the text of
  the error names the call that makes a copy, and its caller decides.
- Memory that holds references to Python objects is refused, and so is a tensor whose memory holds other values than
  the tensor (conjugated or negated ones that torch has not computed yet).
- A view keeps alive what it was made from, except a torch tensor, which its user holds.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final, Protocol, TypeGuard

_DLPACK_IN_MEMORY: Final = (1, 3)
"""Devices whose memory the processor reads (dlpack.h: kDLCPU, kDLCUDAHost)."""
_ELSEWHERE: Final = "is not in this machine's memory; pass a copy that is, such as .cpu()"
_GAPS: Final = "is not contiguous; pass a copy, such as numpy.ascontiguousarray(it) or it.contiguous()"


class Array(Protocol):
    """A numpy array, which has the buffer protocol though type checkers do not know it before Python 3.12."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array interface; its address says where the elements are."""


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


class DlpackArray(Protocol):
    """An array or tensor of any library that has the DLPack protocol, such as jax."""

    def __dlpack__(self) -> Any:
        """Return a capsule with a description of the array."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return type and number of the device that holds the elements."""


def array_bytes(array: Any) -> memoryview | None:
    """Return the bytes of an array or tensor that lends no buffer; None if it is neither.

    TypeError, whose text begins with a verb: why it cannot be used.
    """
    if is_tensor(array):
        return tensor_bytes(array)
    interface = getattr(array, "__array_interface__", None)
    if isinstance(interface, dict):
        return _interface_bytes(array, interface)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _dlpack_bytes(array)
    return None


def is_tensor(array: object) -> TypeGuard[Tensor]:
    """Return True for a tensor of torch.  Its class is looked at: attributes of a sparse one raise errors."""
    return hasattr(type(array), "data_ptr") and hasattr(type(array), "is_contiguous")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a torch tensor on the CPU.  TypeError, whose text begins with a verb."""
    if not tensor.is_cpu:
        raise TypeError(_ELSEWHERE)
    try:
        length = tensor.nbytes
        if not tensor.is_contiguous():
            raise TypeError(_GAPS)
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:  # a sparse one, which has no memory of its own
        raise TypeError(f"lends no memory ({str(error).partition(chr(10))[0]})") from error
    for is_other, mended in (("is_conj", "resolve_conj"), ("is_neg", "resolve_neg")):
        if getattr(tensor, is_other, bool)():
            raise TypeError(f"has other values than its memory; pass .{mended}()")
    return _at(address, length) if length else memoryview(bytearray())


def _interface_bytes(array: Any, interface: dict[str, Any]) -> memoryview:
    """Return the bytes of an array that has numpy's array interface (version 3)."""
    kinds = interface.get("descr") or [("", interface["typestr"])]
    if _has_objects(kinds) or "O" in interface["typestr"][1:2]:
        raise TypeError("holds Python objects, not bytes")
    size, shape = _item_bytes(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and not _is_dense(shape, tuple(strides), size):
        raise TypeError(_GAPS)
    place = interface.get("data")
    if not isinstance(place, tuple):
        raise TypeError("lends no memory (its array interface has no address)")
    length = math.prod(shape) * size
    return _at(place[0], length, array).toreadonly() if length else memoryview(b"")


def _item_bytes(typestr: str) -> int:
    """Return the length of an element from its type, such as `<f4`, `|V16` or `<M8[ns]`; a character has 4 bytes."""
    count = int(typestr[2:].partition("[")[0])
    return 4 * count if typestr[1] == "U" else count


def _has_objects(fields: Any) -> bool:
    """Return True if a field, at any depth, is a reference to a Python object."""
    levels = [fields]
    while levels:
        kind = levels.pop()
        if isinstance(kind, list):
            levels += [field[1] for field in kind]
        elif kind[1:2] == "O":
            return True
    return False


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> bool:
    """Return True if elements follow each other in C's order.  A dimension of one element may have any stride."""
    wanted = element_bytes
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count > 1 and stride != wanted:
            return 0 in shape
        wanted *= count
    return True


class _DlTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer_of.restype = ctypes.c_void_p


def _dlpack_bytes(array: DlpackArray) -> memoryview:
    """Return the bytes of an array that has the DLPack protocol; its capsule is held, and never consumed."""
    try:
        if array.__dlpack_device__()[0] not in _DLPACK_IN_MEMORY:
            raise TypeError(_ELSEWHERE)
        capsule = array.__dlpack__()
        described = _DlTensor.from_address(_pointer_of(capsule, b"dltensor"))
    except (RuntimeError, ValueError, BufferError, NotImplementedError) as error:
        raise TypeError(f"lends no memory ({str(error).partition(chr(10))[0]})") from error
    shape = tuple(described.shape[: described.ndim])
    bits = described.bits * described.lanes
    if described.strides and not _is_dense(shape, tuple(described.strides[: described.ndim]), 1):
        raise TypeError(_GAPS)
    length = -(-math.prod(shape) * bits // 8)
    if not length:
        return memoryview(b"")
    return _at((described.data or 0) + described.byte_offset, length, capsule).toreadonly()


def _at(address: int, length: int, owner: object = None) -> memoryview:
    """Return memory as a view that keeps its owner alive."""
    memory = (ctypes.c_ubyte * length).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
