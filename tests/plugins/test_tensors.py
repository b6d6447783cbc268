"""Tensors of torch, stored as they lie and read back; and those of a safetensors file, as views of a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.plugins.fsspec.test_libraries import run

pytestmark = pytest.mark.plugins

BEGIN: Final = """
import lakefs, safetensors.torch, torch
from lakefs.errors import InvalidArgument
lake = lakefs.connect()
bucket = {bucket!r}
"""
STORED: Final = r"""
whole = torch.arange(3 << 20, dtype=torch.bfloat16).reshape(3, -1).requires_grad_()
lake.put(f"{bucket}/whole", whole)
back = torch.empty_like(whole, requires_grad=False)
assert lake.get_into(f"{bucket}/whole", back) == back.nbytes
assert torch.equal(back, whole.detach())
lake.put_many([(f"{bucket}/part", whole[1][:1000]), (f"{bucket}/none", torch.empty(0))])
assert len(lake.get(f"{bucket}/part")) == 2000
pair = torch.zeros(2, dtype=torch.complex64)
for bad in (whole.T, torch.empty(2, device="meta"), pair.conj(), torch.eye(3).to_sparse()):
    try:
        lake.put(f"{bucket}/bad", bad)
    except InvalidArgument as error:
        print(error)
assert not lake.exists(f"{bucket}/bad")
"""
REFUSED: Final = (".contiguous()", ".cpu()", ".resolve_conj()", "lends no memory")
SAVED: Final = """
state = {"w": torch.ones(1000, 10), "step": 5}
with lake.open(f"{bucket}/a.pt", "wb") as file:
    torch.save(state, file)
with lake.open(f"{bucket}/a.pt") as file:
    assert torch.equal(torch.load(file)["w"], state["w"])
"""
MAPPED: Final = """
types = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "bool"]
wanted = {name: (torch.arange(200_000) % 2).to(getattr(torch, name)).reshape(2, -1) for name in types}
wanted |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
lake.put(f"{bucket}/m.safetensors", safetensors.torch.save(wanted, {"kind": "all"}))
with lake.map(f"{bucket}/m.safetensors") as mapped:
    tensors = mapped.tensors("torch")
    assert set(tensors) == set(wanted) and tensors.metadata == {"kind": "all"}
    for name, tensor in wanted.items():
        found = tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.to(torch.float64), tensor.to(torch.float64))
        assert tensors.is_view(name) or tensor.numel() < 2
        del found
"""


def test_tensors_of_every_kind_are_stored_or_refused_with_what_to_do(
    fs: LakeFileSystem, bucket: str, tmp_path: Path
) -> None:
    said = run(fs, BEGIN.format(bucket=bucket) + STORED, tmp_path).splitlines()
    assert len(said) == len(REFUSED)
    for line, words in zip(said, REFUSED, strict=True):
        assert words in line


@pytest.mark.parametrize("program", [SAVED, MAPPED], ids=["saved", "mapped"])
def test_torch_reads_what_it_has_stored(fs: LakeFileSystem, bucket: str, tmp_path: Path, program: str) -> None:
    assert run(fs, BEGIN.format(bucket=bucket) + program, tmp_path) == ""
