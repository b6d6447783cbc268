"""Arrays and tensors that lend no buffer, as bytes to store: odd types of numpy, tensors, and what speaks DLPack."""

from __future__ import annotations

import gc
from typing import Any, Final

import numpy as np
import pytest

from lakefs.errors import InvalidArgument
from lakefs.host.plain_bytes import bytes_to_put

TIMES: Final = np.array(["2026-01-01", "2026-01-02"], dtype="M8[ns]")
GRID: Final = np.arange(24, dtype="f4").reshape(4, 6)


class Tensor:
    """The part of a torch tensor that puts use."""

    is_cpu = True

    def __init__(self, array: np.ndarray[Any, Any], *, other_values: bool = False) -> None:
        self._array = array
        self._other_values = other_values

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self._array.flags["C_CONTIGUOUS"])

    def is_conj(self) -> bool:
        return self._other_values


class OnDevice(Tensor):
    is_cpu = False


class Sparse(Tensor):
    @property
    def nbytes(self) -> int:
        raise RuntimeError("nbytes is not defined for sparse tensors\nat some line of C++")


class Dlpack:
    """An array that has the DLPack protocol, and nothing else."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


class Interface:
    """An array that has numpy's interface, and nothing else."""

    def __init__(self, array: np.ndarray[Any, Any], **changed: Any) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, **changed}


@pytest.mark.parametrize(
    ("array", "content"),
    [
        (TIMES, TIMES.tobytes()),
        (Interface(np.array(["ab", "c"])), np.array(["ab", "c"]).tobytes()),
        (Interface(GRID), GRID.tobytes()),
        (Interface(GRID[1:3]), GRID[1:3].tobytes()),
        (Interface(GRID[2:3], strides=(99, 4)), GRID[2:3].tobytes()),
        (Interface(np.zeros((0, 7)), strides=(3, 3)), b""),
        (Tensor(GRID), GRID.tobytes()),
        (Tensor(np.zeros(0)), b""),
        (Dlpack(GRID), GRID.tobytes()),
        (Dlpack(GRID[1:]), GRID[1:].tobytes()),
        (Dlpack(np.array(7, dtype="i2")), b"\x07\x00"),
        (Dlpack(np.zeros((3, 0))), b""),
        (Dlpack(GRID, device=3), GRID.tobytes()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_array_is_stored_as_the_bytes_of_its_elements(array: Any, content: bytes) -> None:
    assert bytes(bytes_to_put(array)) == content


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (GRID[:, ::2], r"not contiguous; .*ascontiguousarray"),
        (GRID.T, "not contiguous"),
        (TIMES[::-1], "not contiguous"),
        (Interface(GRID.T), "not contiguous"),
        (Tensor(GRID.T), r"not contiguous; .*\.contiguous\(\)"),
        (Dlpack(GRID.T), "not contiguous"),
        (Tensor(GRID, other_values=True), r"resolve_conj\(\)"),
        (OnDevice(GRID), r"not in this machine's memory; .*\.cpu\(\)"),
        (Dlpack(GRID, device=2), r"not in this machine's memory"),
        (Sparse(GRID), r"lends no memory \(nbytes is not defined for sparse tensors\)"),
        (np.array([b"a", None], dtype=object), "Python objects"),
        (np.zeros(2, dtype=[("at", "M8[ns]"), ("of", [("it", "O")])]), "Python objects"),
        (Interface(GRID, data=None), "no address"),
        ("text", "cannot put a str as bkt/x; pass bytes, an array or a tensor"),
        ([1.0, 2.0], "cannot put a list"),
        (None, "cannot put a NoneType"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_as_it_lies_is_refused_with_what_to_do(array: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        bytes_to_put(array, "bkt/x")


@pytest.mark.parametrize("made_of", [Dlpack, Interface])
def test_the_bytes_stay_while_they_are_used(made_of: Any) -> None:
    view = bytes_to_put(made_of(np.full(1 << 20, 7, dtype="u1")))
    gc.collect()
    np.full(1 << 20, 9, dtype="u1")  # it would take the place of memory that was given back
    assert bytes(view) == b"\x07" * (1 << 20)
