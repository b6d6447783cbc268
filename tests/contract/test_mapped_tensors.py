"""Tensors of a mapped safetensors file: views where they lie in one row, copies elsewhere, each with its type."""

from __future__ import annotations

import json
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.errors import InvalidArgument
from lakefs.get.tensors import MappedTensors
from lakefs.limits import CHUNK_BYTES, MIB

RNG: Final = np.random.default_rng(5)
ARRAYS: Final[dict[str, np.ndarray[Any, Any]]] = {
    "large": RNG.random(2 * CHUNK_BYTES // 4 + 100_000, dtype="f4").reshape(2, -1),
    "table": RNG.integers(0, 9, (300, 1000), dtype="i8"),
    "half": RNG.random(100_000).astype("f2"),
    "odd": RNG.integers(0, 200, 3, dtype="u1"),
    "after_odd": RNG.random(40),
    "mask": np.array([[True, False]]),
    "empty": np.zeros((0, 5), "f4"),
    "scalar": np.array(2.5),
    "complex": np.array([1 + 2j], "c8"),
}
NAMES: Final = {"f4": "F32", "f8": "F64", "f2": "F16", "i8": "I64", "u1": "U8", "b1": "BOOL", "c8": "C64"}


def safetensors(arrays: dict[str, np.ndarray[Any, Any]], **types: str) -> bytes:
    """Return a file with these arrays in this order; `types` are names of types that numpy does not have."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        dtype = types.get(name) or NAMES[array.dtype.str[1:]]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values())


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """A lake in this process, with the bucket `bkt`."""
    with open_lake(tmp_path) as opened:
        opened.create_bucket("bkt")
        yield opened


def test_each_tensor_is_what_was_stored_and_large_ones_are_not_copied(lake: Lake) -> None:
    lake.put("bkt/m.safetensors", safetensors(ARRAYS))
    with lake.map("bkt/m.safetensors") as mapped:
        tensors = mapped.tensors()
        assert (list(tensors), len(tensors), tensors.metadata) == (list(ARRAYS), len(ARRAYS), {"format": "pt"})
        for name, array in ARRAYS.items():
            found = tensors[name]
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert np.array_equal(found, array)
            assert found.flags.aligned
            if array.nbytes > 64_000:
                assert tensors.is_view(name)
                assert not found.flags.writeable
            del found
        with pytest.raises(KeyError):
            tensors["other"]
        with pytest.raises(KeyError):
            tensors.is_view("other")
        mapped.close()  # no view is left
        mapped.close()


def test_a_view_that_is_kept_is_noticed_and_a_copy_may_be_kept(lake: Lake) -> None:
    lake.put("bkt/m", safetensors(ARRAYS))
    with pytest.raises(BufferError, match="in use"):
        with lake.map("bkt/m") as mapped:
            kept = mapped.tensors()["large"]
    assert np.array_equal(kept, ARRAYS["large"])


@pytest.mark.parametrize("step", [5 * MIB + 1, 7 * MIB])
def test_tensors_of_an_object_put_in_parts_are_copied_where_they_lie_in_pieces(lake: Lake, step: int) -> None:
    content = safetensors(ARRAYS)
    upload = lake.create_upload("bkt/parts")
    pieces = [content[start : start + step] for start in range(0, len(content), step)]
    parts = [(number, lake.put_part(upload, number, piece).etag) for number, piece in enumerate(pieces, 1)]
    lake.complete_upload(upload, parts)
    with lake.map("bkt/parts") as mapped:
        tensors = mapped.tensors()
        kept = {name: tensors[name] for name in tensors if not tensors.is_view(name)}
        assert "large" in kept
        for name, array in ARRAYS.items():
            assert np.array_equal(tensors[name], array)
    assert all(np.array_equal(found, ARRAYS[name]) for name, found in kept.items())


def test_a_type_that_numpy_lacks_hides_no_other_tensor(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    brain = np.arange(6, dtype="f2")
    odd = safetensors(
        {"brain": brain, "tiny": np.zeros(2, "u1"), "plain": ARRAYS["table"]}, brain="BF16", tiny="F8_E5M2"
    )
    lake.put("bkt/m", odd)
    monkeypatch.setitem(sys.modules, "ml_dtypes", cast(types.ModuleType, None))
    with lake.map("bkt/m") as mapped:
        tensors = mapped.tensors()
        assert np.array_equal(tensors["plain"], ARRAYS["table"])
        with pytest.raises(
            InvalidArgument, match=r"'brain' is of type BF16: .*ml_dtypes; or take tensors\(\"torch\"\)"
        ):
            tensors["brain"]
        stand_in = types.ModuleType("ml_dtypes")
        stand_in.bfloat16 = np.dtype("u2")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ml_dtypes", stand_in)
        assert np.array_equal(tensors["brain"], brain.view("u2"))
        with pytest.raises(InvalidArgument, match="F8_E5M2"):
            tensors["tiny"]


def test_what_is_no_whole_safetensors_file_has_no_tensors(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = safetensors({"plain": ARRAYS["table"]})
    contents = {"short": b"1234", "none": b"", "other": bytes(1000), "cut": whole[:-1]}
    lake.put_many([(f"bkt/{name}", content) for name, content in contents.items()])
    lake.put("bkt/whole", whole)
    for name in contents:
        with lake.map(f"bkt/{name}") as mapped, pytest.raises(InvalidArgument, match="no whole safetensors file"):
            mapped.tensors()
    with lake.map("bkt/whole", 0, 100) as mapped, pytest.raises(InvalidArgument, match="map all of one"):
        mapped.tensors()
    with lake.map("bkt/whole") as mapped:
        library: Any = "jax"
        with pytest.raises(InvalidArgument, match="numpy or torch"):
            mapped.tensors(library)
        monkeypatch.setitem(sys.modules, "torch", cast(types.ModuleType, None))
        with pytest.raises(InvalidArgument, match="torch is not installed"):
            mapped.tensors("torch")["plain"]


def test_a_tensor_at_an_odd_address_is_copied() -> None:
    content = memoryview(safetensors({"odd": ARRAYS["odd"], "numbers": ARRAYS["after_odd"]}))
    tensors = MappedTensors("x", [content], "numpy")
    moved = MappedTensors("x", [memoryview(b"." + bytes(content))[1:]], "numpy")
    assert tensors.is_view("numbers") != moved.is_view("numbers") or not tensors.is_view("numbers")
    for one in (tensors, moved):
        assert one["numbers"].flags.aligned
        assert np.array_equal(one["numbers"], ARRAYS["after_odd"])
