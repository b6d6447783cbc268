"""Loaders of models and data sets on a mount: mappings of files, by Python, numpy, safetensors, torch, arrow."""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mount.tools import catch_up, content

pytestmark = [pytest.mark.slow, pytest.mark.fuse]

LOADERS: Final = "not installed; install it with: .venv/bin/pip install '.[loaders]'"
SIZE: Final = (9 << 20) + 12_345


def test_a_mapping_reads_the_whole_file_in_any_order(here: Path, there: Path) -> None:
    expected = content(SIZE)
    (here / "data").write_bytes(expected)
    with (there / "data").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for offset in (SIZE - 1, 5 << 20, 0, (4 << 20) - 3, 4096):
            assert memory[offset : offset + 7] == expected[offset : offset + 7]
        assert bytes(memory) == expected


def test_a_private_mapping_changes_nothing(here: Path, there: Path) -> None:
    (here / "data").write_bytes(content(100_000))
    with (here / "data").open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        memory[:5] = b"other"
    assert (here / "data").read_bytes() == (there / "data").read_bytes() == content(100_000)


def test_a_shared_mapping_is_stored_after_msync_and_close(here: Path, there: Path) -> None:
    path = here / "data"
    path.write_bytes(bytes(SIZE))
    expected = bytearray(SIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for offset, piece in ((0, b"begin"), ((4 << 20) - 2, b"edge"), (SIZE - 3, b"end")):
            memory[offset : offset + len(piece)] = piece
            expected[offset : offset + len(piece)] = piece
        memory.flush()
    catch_up(here, there)
    assert (there / "data").read_bytes() == expected


def test_what_is_written_to_a_mapping_after_close_is_stored_when_it_ends(here: Path, there: Path) -> None:
    path = here / "data"
    path.write_bytes(bytes(200_000))
    descriptor = os.open(path, os.O_RDWR)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    memory[150_000:150_004] = b"late"
    memory.close()
    catch_up(here, there)
    assert (there / "data").read_bytes()[149_999:150_005] == b"\0late\0"


def test_a_mapping_survives_rename_unlink_and_overwrite(here: Path, there: Path) -> None:
    path = here / "data"
    path.write_bytes(content(SIZE, 1))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert memory[:100] == content(SIZE, 1)[:100]
        path.rename(here / "other")
        (here / "new").write_bytes(content(1000, 2))
        (here / "new").rename(here / "other")
        (here / "other").unlink()
        assert bytes(memory) == content(SIZE, 1)
    catch_up(here, there)


def test_numpy_maps_a_file_for_reading_and_writing(here: Path, there: Path) -> None:
    numpy: Any = pytest.importorskip("numpy")
    written = numpy.memmap(here / "array", dtype="float32", mode="w+", shape=(1000, 700))
    written[:] = numpy.arange(700_000, dtype="float32").reshape(1000, 700)
    written.flush()
    del written
    numpy.save(here / "array.npy", numpy.arange(1_500_000))
    catch_up(here, there)
    read = numpy.memmap(there / "array", dtype="float32", mode="r", shape=(1000, 700))
    assert float(read[999, 699]) == 699_999
    assert float(read.sum(dtype="float64")) == 700_000 * 699_999 / 2
    loaded = numpy.load(there / "array.npy", mmap_mode="r+")
    assert int(loaded[::-1000].sum()) == int(numpy.arange(1_500_000)[::-1000].sum())
    loaded[7] = -1
    loaded.flush()
    del loaded
    catch_up(there, here)
    assert int(numpy.load(here / "array.npy")[7]) == -1


def test_safetensors_are_saved_and_opened(here: Path, there: Path, tmp_path: Path) -> None:
    numpy: Any = pytest.importorskip("numpy")
    library: Any = pytest.importorskip("safetensors")
    module: Any = pytest.importorskip("safetensors.numpy")
    tensors = {f"layers.{n}": numpy.full((300 + n, 1024), n, dtype="float32") for n in range(6)}
    module.save_file(tensors, here / "model.safetensors", metadata={"format": "np"})
    module.save_file(tensors, tmp_path / "local.safetensors", metadata={"format": "np"})
    catch_up(here, there)
    assert (there / "model.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()
    with library.safe_open(there / "model.safetensors", framework="np") as model:
        assert sorted(model.keys()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert numpy.array_equal(model.get_tensor(name), tensor)
        assert model.get_slice("layers.3")[10:12].shape == (2, 1024)
    module.save_file({"a": tensors["layers.1"]}, here / "model.safetensors")
    catch_up(here, there)
    assert list(module.load_file(there / "model.safetensors")) == ["a"]


def test_torch_maps_a_checkpoint(here: Path, there: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason=LOADERS)
    state: dict[str, Any] = {
        f"layer{number}": torch.arange(number, 500_000 + number).reshape(500, -1) for number in range(4)
    }
    torch.save({"model": state, "step": 7}, here / "model.pt")
    catch_up(here, there)
    loaded = torch.load(there / "model.pt", mmap=True, weights_only=True)
    assert loaded["step"] == 7
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state.items())
    torch.save({"step": 8}, here / "model.pt")  # the mapping keeps the content that it was made of
    assert torch.equal(loaded["model"]["layer3"], state["layer3"])
    catch_up(here, there)
    assert torch.load(there / "model.pt", mmap=True, weights_only=True) == {"step": 8}


def test_torch_maps_a_tensor_s_own_file_and_writes_through_it(here: Path, there: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason=LOADERS)
    shared = torch.from_file(str(here / "tensor"), shared=True, size=300_000, dtype=torch.float32)
    shared.fill_(1.5)
    shared[-1] = 2.5
    del shared
    catch_up(here, there)
    read = torch.from_file(str(there / "tensor"), shared=False, size=300_000, dtype=torch.float32)
    assert (float(read[0]), float(read[-1]), float(read.sum())) == (1.5, 2.5, 300_000 * 1.5 + 1)


def test_a_torch_loader_s_processes_read_a_mapped_array(here: Path, there: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason=LOADERS)
    numpy: Any = pytest.importorskip("numpy")
    numpy.save(here / "tokens.npy", numpy.arange(64_000, dtype="int64").reshape(64, 1000))
    catch_up(here, there)
    tokens = numpy.load(there / "tokens.npy", mmap_mode="r+")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(tokens))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context="fork")
    total = sum(int(batch.sum()) for (batch,) in loader)
    assert total == 64_000 * 63_999 // 2


def test_safetensors_open_as_torch_s_own(here: Path, there: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason=LOADERS)
    library: Any = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.arange(100_000), "b": torch.ones(300, 700, dtype=torch.bfloat16)}
    library.save_file(tensors, str(here / "model.safetensors"))
    catch_up(here, there)
    loaded = library.load_file(str(there / "model.safetensors"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_data_set_is_saved_mapped_and_mapped_anew(
    here: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library: Any = pytest.importorskip("datasets", reason=LOADERS)
    library.disable_progress_bars()
    numbers = list(range(20_000))
    rows = {"n": numbers, "text": [f"row {n}" for n in numbers]}
    library.Dataset.from_dict(rows).save_to_disk(str(here / "set"), num_shards=3)
    catch_up(here, there)
    loaded = library.load_from_disk(str(there / "set"))
    assert {Path(file["filename"]).parent for file in loaded.cache_files} == {there / "set"}
    assert (loaded["n"][:], loaded[19_999]) == (numbers, {"n": 19_999, "text": "row 19999"})
    doubled = loaded.map(lambda row: {"n": 2 * row["n"]}, cache_file_name=str(there / "doubled.arrow"))
    assert sum(doubled["n"]) == 2 * sum(numbers)
    assert (there / "doubled.arrow").stat().st_size > 0


def test_arrow_maps_a_table(here: Path, there: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.table({"n": list(range(50_000)), "text": [f"row {n}" for n in range(50_000)]})
    with arrow.OSFile(str(here / "table.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    catch_up(here, there)
    with arrow.memory_map(str(there / "table.arrow")) as source:
        assert arrow.ipc.open_file(source).read_all().equals(table)


def test_a_safetensors_header_is_read_by_hand_as_loaders_do(here: Path, there: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    (here / "tiny").write_bytes(struct.pack("<Q", len(header)) + header + b"12345")
    with (there / "tiny").open("rb", buffering=0) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        assert json.loads(file.read(length))["a"]["shape"] == [5]
        assert file.read() == b"12345"
