"""A model under a local path is known by its content: what changes a block changes the identity, and nothing else."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefs.limits import KIB, MIB
from lakefs.plugins.kv import model_files
from lakefs.plugins.kv.model_files import SAMPLE_BYTES, SAMPLES_MIN, model_of, places_of, state_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two weight files."""
    made = tmp_path / "models" / "llama"
    made.mkdir(parents=True)
    (made / "config.json").write_text('{"rope_theta": 10000}')
    (made / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for number in range(2):
        (made / f"model-{number}.safetensors").write_bytes(random.Random(number).randbytes(3 * MIB + number))
    (made / "tokenizer.json").write_text("{}")
    (made / "README.md").write_text("of a model")
    return made


def flip(path: Path, begin: int, length: int = 1) -> None:
    """Write other bytes, and leave length and time as they were."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(begin)
        old = file.read(length)
        file.seek(begin)
        file.write(bytes(byte ^ 0x55 for byte in old))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def write_below(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"w")


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("rope scaling", lambda made: (made / "config.json").write_text('{"rope_theta": 50000}')),
    ("the index", lambda made: (made / "model.safetensors.index.json").write_text("{}")),
    ("code of the model", lambda made: (made / "modeling.py").write_text("pass")),
    ("a finetune saved over it", lambda made: flip(made / "model-1.safetensors", 0, 3 * MIB)),
    ("weights of a few layers", lambda made: flip(made / "model-0.safetensors", MIB, 512 * KIB)),
    ("its first byte", lambda made: flip(made / "model-0.safetensors", 0)),
    ("a file more", lambda made: (made / "extra.bin").write_bytes(b"weights")),
    ("a file less", lambda made: (made / "model-1.safetensors").unlink()),
    ("a longer file", lambda made: os.truncate(made / "model-1.safetensors", 4 * MIB)),
    ("weights below it", lambda made: write_below(made / "sub" / "w.pt")),
]


@pytest.mark.parametrize(("what", "change"), CHANGES, ids=[what for what, _ in CHANGES])
def test_another_content_is_another_model(folder: Path, what: str, change: Callable[[Path], object]) -> None:
    before = model_of(str(folder))
    assert (before.label, before.unseen) == ("llama", "")
    assert before.identity.startswith("content ")
    change(folder)
    assert model_of(str(folder)).identity != before.identity, what


def test_the_same_content_is_the_same_model_on_every_machine(folder: Path, tmp_path: Path) -> None:
    before = model_of(str(folder))
    other = tmp_path / "elsewhere" / "llama"
    shutil.copytree(folder, other)
    for file in other.iterdir():
        os.utime(file, (1, 1))
    assert model_of(str(other)) == before
    (other / "README.md").write_text("of another text")
    (other / "tokenizer.json").write_text('{"added": 1}')
    (other / ".cache").mkdir()
    (other / ".cache" / "x.json").write_text("{}")
    assert model_of(f"{other}/") == before, "keys are made of tokens"
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in other.iterdir():
        (linked / file.name).symlink_to(file)
    assert model_of(str(linked)).identity == before.identity, "as a repository of models has them"


def test_a_file_may_be_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(random.Random(1).randbytes(MIB))
    before = model_of(str(file)).identity
    flip(file, 5000, 200 * KIB)
    assert model_of(str(file)).identity != before


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "/no/such/folder"])
def test_a_model_that_is_no_path_here_is_known_by_its_name(name: str) -> None:
    model = model_of(name)
    assert model.identity == f"name {name}"
    assert model.unseen == "it is no path of this machine"


def test_what_cannot_be_read_is_not_guessed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there are none" in model_of(str(empty)).unseen
    (folder / "gone.bin").symlink_to("nowhere")
    assert "No such file" in model_of(str(folder)).unseen
    assert model_of(str(folder)).identity == f"name {folder}"
    (folder / "gone.bin").unlink()
    monkeypatch.setattr(model_files, "FILES_MAX", 3)
    assert "more than 3" in model_of(str(folder)).unseen


@pytest.mark.parametrize("count", [1, 16, 1000])
@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, 16 * SAMPLE_BYTES, 16 * SAMPLE_BYTES + 1, 3_000_017, 1 << 33])
def test_samples_are_spread_over_a_file_one_in_each_piece(size: int, count: int) -> None:
    places = places_of(size, count)
    assert len(places) <= max(1, count)
    ends = [begin + length for begin, length in places]
    assert all(0 < length <= SAMPLE_BYTES for _, length in places)
    assert all(begin >= end for (begin, _), end in zip(places[1:], ends, strict=False))
    assert not ends or ends[-1] <= size
    if size > count * SAMPLE_BYTES:
        assert len(places) == count
        assert all(size * at // count <= begin < size * (at + 1) // count for at, (begin, _) in enumerate(places))
    else:
        assert sum(length for _, length in places) == size


def test_the_work_is_bounded_however_large_a_model_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        os.truncate(folder / f"model-{number}.safetensors", 1 << 40)
    read: list[int] = []
    monkeypatch.setattr(model_files, "SAMPLES_MAX", 512)

    def noted(_: int, begin: int, length: int) -> bytes:
        read.append(begin)
        return bytes(length)

    monkeypatch.setattr(model_files, "_read", noted)
    assert model_of(str(folder)).unseen == ""
    assert len(read) <= 512 + SAMPLES_MIN * 2 + 2
    assert max(read) > (1 << 40) - (1 << 33)


def test_the_state_of_files_changes_when_they_are_written(folder: Path) -> None:
    before = state_of(str(folder))
    assert state_of(str(folder)) == before
    (folder / "model-0.safetensors").write_bytes(b"other")
    assert state_of(str(folder)) != before
    assert state_of("/no/such/folder") == state_of("/no/such/folder") != before
