"""Tensors of torch, stored as they lie and read back; and those of a safetensors file, as views of a mapping."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.errors import InvalidArgument
from lakefs.limits import MIB

pytestmark = pytest.mark.plugins


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """A lake in this process, with the bucket `bkt`."""
    with open_lake(tmp_path) as opened:
        opened.create_bucket("bkt")
        yield opened


@pytest.fixture
def torch() -> Any:
    """The library."""
    return import_module("torch")


def test_tensors_of_every_kind_are_stored_or_refused_with_what_to_do(lake: Lake, torch: Any) -> None:
    whole = torch.arange(3 * MIB, dtype=torch.bfloat16).reshape(3, -1).requires_grad_()
    lake.put("bkt/whole", whole)
    back = torch.empty_like(whole, requires_grad=False)
    assert lake.get_into("bkt/whole", back) == back.nbytes
    assert torch.equal(back, whole.detach())
    lake.put_many([("bkt/part", whole[1][:1000]), ("bkt/none", torch.empty(0))])
    assert len(lake.get("bkt/part")) == 2000
    for bad, why in [
        (whole.T, r"\.contiguous\(\)"),
        (torch.empty(2, device="meta"), r"\.cpu\(\)"),
        (torch.zeros(2, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)|contiguous"),
        (torch.eye(3).to_sparse(), "lends no memory"),
    ]:
        with pytest.raises(InvalidArgument, match=why):
            lake.put("bkt/bad", bad)
    assert not lake.exists("bkt/bad")


def test_torch_saves_through_a_file_of_the_lake(lake: Lake, torch: Any) -> None:
    state = {"w": torch.ones(1000, 10), "step": 5}
    with lake.open("bkt/a.pt", "wb") as file:
        torch.save(state, file)
    with lake.open("bkt/a.pt") as back:
        loaded = torch.load(back)
    assert torch.equal(loaded["w"], state["w"])


def test_tensors_of_a_safetensors_file_are_views_of_each_type(lake: Lake, torch: Any) -> None:
    save = import_module("safetensors.torch").save
    types = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "bool"]
    wanted = {name: (torch.arange(200_000) % 2).to(getattr(torch, name)).reshape(2, -1) for name in types}
    wanted |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    lake.put("bkt/m.safetensors", save(wanted, {"kind": "all"}))
    with lake.map("bkt/m.safetensors") as mapped:
        tensors = mapped.tensors("torch")
        assert set(tensors) == set(wanted)
        assert tensors.metadata == {"kind": "all"}
        for name, tensor in wanted.items():
            found = tensors[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.to(torch.float64), tensor.to(torch.float64))
            assert tensors.is_view(name) or tensor.numel() < 2
            del found
