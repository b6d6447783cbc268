"""Keys and lengths of LMCache's objects: what a name does not tell, and a model whose files change under LMCache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakefs.errors import SourceChanged
from lakefs.plugins.kv import lmcache_names
from lakefs.plugins.kv.lmcache_names import ANY, Lengths, Names
from tests.unit.lakefs.plugins.test_kv_plugins import FakeSpace
from tests.unit.lakefs.plugins.test_lmcache_connector import Host

REMOTE = ["org/m@01000000@0@aa", "org/m@01000000@0@bb@salt"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


@pytest.fixture
def space() -> FakeSpace:
    return FakeSpace()


@pytest.fixture
def host(space: FakeSpace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(space, monkeypatch)
    yield made
    made.connector.close()


def test_a_name_without_path_and_salt_is_hashed_as_it_is() -> None:
    keys = Names("").keys(REMOTE)
    assert keys == [hashlib.sha256(name.encode()).digest() for name in REMOTE]
    assert Names("").keys_now(REMOTE) == keys
    salted = [*Names("a").keys(REMOTE), *Names("b").keys(REMOTE)]
    assert len({*keys, *salted}) == 6


def test_a_model_under_a_local_path_is_known_by_its_content(folder: Path, tmp_path: Path) -> None:
    names = [f"{folder}@01000000@0@aa", f"{folder}@01000000@1@aa", f"{folder}@01000000@0@aa@salt"]
    first = Names("")
    assert first.keys_now(names) is None, "files are looked at where that may wait"
    keys = first.keys(names)
    assert first.keys_now(names) == keys
    assert len(set(keys)) == 3
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    assert Names("").keys([name.replace(str(folder), str(moved)) for name in names]) == keys
    (moved / "model.safetensors").write_bytes(b"another")
    assert not set(keys) & set(Names("").keys([name.replace(str(folder), str(moved)) for name in names]))


def test_a_model_whose_content_changes_is_neither_stored_nor_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names, name = Names(""), f"{folder}@01000000@0@aa"
    keys = names.keys([name])
    (folder / "model.safetensors").write_bytes(b"another")
    assert names.keys([name]) == names.keys_now([name]) == keys, "until the next look"
    monkeypatch.setattr(lmcache_names, "LOOK_S", -1.0)
    assert names.keys_now([name]) is None
    for _ in range(2):
        with pytest.raises(SourceChanged, match=f"{folder}: its files have changed .* start LMCache anew"):
            names.keys([name])
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    assert f"Objects of {folder} are neither stored nor found" in caplog.text
    monkeypatch.setattr(lmcache_names, "LOOK_S", 60.0)
    assert names.keys_now([name]) is None
    assert names.keys(REMOTE) == Names("").keys(REMOTE), "another model is served"


def test_files_that_are_written_anew_with_the_same_content_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, name = Names(""), f"{folder}@01000000@0@aa"
    keys = names.keys([name])
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(lmcache_names, "LOOK_S", -1.0)
    assert names.keys([name]) == keys


def test_models_and_kinds_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_names, "MODELS_MAX", 3)
    monkeypatch.setattr(lmcache_names, "KINDS_MAX", 3)
    names, lengths = Names(""), Lengths()
    for number in range(10):
        name = f"{tmp_path}/{number}@0@0@aa"
        names.keys([name])
        lengths.note([name], [memoryview(b"12345")])
        assert lengths.of([name]) == [5]
    assert len(names._local) == 3
    assert len(lengths._lengths) <= 3


def test_lengths_are_those_of_a_model_rank_and_group() -> None:
    lengths = Lengths()
    assert lengths.of(["m@0@0@aa"]) == [ANY]
    lengths.note(["m@0@0@aa", "m@0@1@aa"], [memoryview(b"1234"), memoryview(b"12")])
    assert lengths.of(["m@0@0@bb@salt", "m@0@1@cc", "m@1@0@aa"]) == [4, 2, ANY]
    lengths.note(["m@0@0@cc"], [memoryview(b"123")])
    lengths.note(["m@0@0@cc"], [memoryview(b"1234")])
    assert lengths.of(["m@0@0@aa"]) == [ANY], "LMCache uses several"


def test_an_object_of_another_length_is_not_found_and_the_next_put_replaces_it(host: Host, space: FakeSpace) -> None:
    asked, names = host.connector, ["m@0@0@aa", "m@0@0@bb"]
    assert host.result(asked.submit_batch_set(names, [memoryview(b"old")] * 2))[1]
    asked._lengths = Lengths()  # as another LMCache has
    assert host.result(asked.submit_batch_exists(names))[3] == [True, True]
    buffers = [memoryview(bytearray(4)) for _ in names]
    assert host.result(asked.submit_batch_get(names, buffers))[3] == [False, False]
    assert host.result(asked.submit_batch_exists(names))[3] == [False, False], "the length is known by now"
    assert host.result(asked.submit_batch_set(names[:1], [memoryview(b"new!")]))[1:] == (True, "", [True])
    space.at_hand = lambda: None
    assert host.result(asked.submit_batch_exists(names))[3] == [True, False]
    assert host.result(asked.submit_batch_get(names, buffers))[3] == [True, False]
    assert bytes(buffers[0]) == b"new!"


def test_requests_about_a_model_that_changed_fail_by_name(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, names = host.connector, [f"{folder}@0@0@aa"]
    value = [memoryview(b"block")]
    assert host.result(asked.submit_batch_set(names, value))[1]
    assert host.result(asked.submit_batch_exists(names))[3] == [True]
    (folder / "config.json").write_text('{"rope_scaling": 2}')
    monkeypatch.setattr(lmcache_names, "LOOK_S", -1.0)
    submits: tuple[Callable[[], int], ...] = (
        lambda: asked.submit_batch_exists(names),
        lambda: asked.submit_batch_get(names, [memoryview(bytearray(5))]),
        lambda: asked.submit_batch_set(names, value),
        lambda: asked.submit_batch_delete(names),
    )
    for submit in submits:
        _, ok, reason, each = host.result(submit())
        assert (ok, each) == (False, [False])
        assert "start LMCache anew" in reason
