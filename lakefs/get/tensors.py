"""The tensors of a mapped safetensors file, each made when it is asked for: a view of the mapping, or a copy.

A tensor is a view where its bytes lie in one row of the mapping, at an address that suits its type.  Files are stored
cut at their tensors, so nearly all of a tensor's chunks are whole pages, and lie in one row.  Others are copied: short
tensors that begin at an odd address, and those whose chunks are no whole pages (objects that were put in parts).

Neither numpy nor torch is imported before it is asked for.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple

import msgspec

from lakefs.content.safetensors import DTYPE_BITS, LENGTH_BYTES, METADATA, header_bytes, parse_header
from lakefs.errors import InvalidArgument

Library = Literal["numpy", "torch"]
_NUMPY: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "C64": "complex64",
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{word}{bits}" for kind, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}
_ML_DTYPES: Final = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""Types that numpy has only with the package ml_dtypes; torch has them under the same names."""


class _Tensor(NamedTuple):
    """A tensor of the header; its bytes are `begin` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class MappedTensors(Mapping[str, Any]):
    """The tensors of a mapping by their names, in the order of the header.  None is made before it is asked for.

    Views among them must be gone at the end of the mapping's block, like all that is made from its memory; copies may
    stay.  KeyError; InvalidArgument for a type that the library does not have.
    """

    def __init__(self, name: str, pieces: list[memoryview], library: Library) -> None:
        """Read the header.  InvalidArgument if the pieces are no whole safetensors file."""
        if library not in ("numpy", "torch"):
            raise InvalidArgument(f"tensors are those of numpy or torch, not of {library!r}", subject=name)
        self._name = name
        self._pieces = pieces
        self._library = library
        self._tensors, self.metadata = _read_header(name, pieces)

    metadata: dict[str, str]
    """Texts of the header that belong to no tensor."""

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        dtype, module = self._type_of(name, tensor)
        make = _numpy_array if self._library == "numpy" else _torch_tensor
        return make(module, self._bytes(tensor), dtype, tensor.shape)

    def is_view(self, name: str) -> bool:
        """Return True if a tensor is a view of the mapping, False if it is a copy.  KeyError."""
        return self._row(self._tensors[name]) is not None

    def _bytes(self, tensor: _Tensor) -> memoryview:
        row = self._row(tensor)
        return row if row is not None else memoryview(bytearray(_range(self._pieces, tensor.begin, tensor.end)))

    def _row(self, tensor: _Tensor) -> memoryview | None:
        """Return the tensor's bytes where they lie in one row and begin at an address for its type; else None."""
        at = 0
        for piece in self._pieces:
            if at <= tensor.begin and tensor.end <= at + len(piece):
                row = piece[tensor.begin - at : tensor.end - at]
                element_bytes = max(1, DTYPE_BITS[tensor.dtype] // 8)
                return row if not row or _address(row) % element_bytes == 0 else None
            at += len(piece)
        return None

    def _type_of(self, name: str, tensor: _Tensor) -> tuple[Any, ModuleType]:
        """Return the type of a tensor in its library, and the library."""
        module = _library(self._library, self._name)
        word = _NUMPY.get(tensor.dtype) or _ML_DTYPES.get(tensor.dtype)
        if self._library == "torch":
            found = getattr(module, word or "", None)
            if found is None:
                raise self._unknown(name, tensor, "the installed torch has no such type")
            return found, module
        if tensor.dtype in _NUMPY:
            return module.dtype(word), module
        if word is None:
            raise self._unknown(name, tensor, "numpy has no such type")
        try:
            return module.dtype(getattr(import_module("ml_dtypes"), word)), module
        except (ImportError, AttributeError) as error:
            hint = 'numpy has it only with the package ml_dtypes; or take tensors("torch")'
            raise self._unknown(name, tensor, hint) from error

    def _unknown(self, name: str, tensor: _Tensor, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self._name}: tensor {name!r} is of type {tensor.dtype}: {why}", subject=self._name)


def _read_header(name: str, pieces: list[memoryview]) -> tuple[dict[str, _Tensor], dict[str, str]]:
    size = sum(map(len, pieces))
    needed = header_bytes(_range(pieces, 0, min(size, LENGTH_BYTES + 1)), size) if size > LENGTH_BYTES else None
    header = b"" if needed is None else _range(pieces, 0, needed)
    if needed is None or parse_header(header, size) is None:
        raise InvalidArgument(f"{name} is no whole safetensors file; map all of one", subject=name)
    members: dict[str, Any] = msgspec.json.decode(header[LENGTH_BYTES:])
    metadata: dict[str, str] = members.pop(METADATA.decode(), {})
    tensors = {}
    for key, member in members.items():
        begin, end = member["data_offsets"]
        tensors[key] = _Tensor(member["dtype"], tuple(member["shape"]), needed + begin, needed + end)
    return tensors, metadata


def _range(pieces: list[memoryview], begin: int, end: int) -> bytes:
    """Return a copy of a range of the bytes."""
    found = []
    at = 0
    for piece in pieces:
        if at < end and begin < at + len(piece):
            found.append(bytes(piece[max(0, begin - at) : end - at]))
        at += len(piece)
    return b"".join(found)


def _address(view: memoryview) -> int:
    """Return where the view's memory begins; it may be read-only, which ctypes refuses."""
    described = (ctypes.c_size_t * _PY_BUFFER_WORDS)()
    _get_buffer(view, described, 0)
    try:
        return int(described[0])
    finally:
        _release_buffer(described)


_PY_BUFFER_WORDS: Final = 16
"""More than the ten words of a `Py_buffer` (PEP 3118), whose first is the address."""
_get_buffer: Final = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer: Final = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def _library(library: Library, name: str) -> ModuleType:
    try:
        return import_module(library)
    except ImportError as error:
        raise InvalidArgument(f"{name}: {library} is not installed", subject=name) from error


def _numpy_array(numpy: Any, content: memoryview, dtype: Any, shape: tuple[int, ...]) -> Any:
    array = numpy.frombuffer(content, dtype=dtype) if content else numpy.empty(0, dtype=dtype)
    return array.reshape(shape)


def _torch_tensor(torch: Any, content: memoryview, dtype: Any, shape: tuple[int, ...]) -> Any:
    if not content:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory cannot be written to
        return torch.frombuffer(content, dtype=dtype).reshape(shape)
