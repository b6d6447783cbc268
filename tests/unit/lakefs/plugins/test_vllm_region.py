"""vLLM's region is lent only where the kernel says that the blocks are a mapping of it, and the engine takes it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest

from lakefs.host.mapped_files import maps_file
from lakefs.plugins.kv.vllm_region import lendable_descriptor
from tests.unit.lakefs.plugins.test_kv_plugins import mapped_memfd


def spec_of(descriptor: object, segments: object) -> Any:
    return SimpleNamespace(_scheduler_mmap=SimpleNamespace(fd=descriptor, _segments=segments))


def test_a_region_is_lent_only_if_the_blocks_are_a_mapping_of_its_one_file() -> None:
    one = [("path", 0, 8 * 4096)]
    with mapped_memfd(8 * 4096) as (descriptor, mapping), mapped_memfd(8 * 4096) as (other, _):
        blocks = memoryview(mapping).cast("B", (8, 4096))
        assert lendable_descriptor(spec_of(descriptor, one), blocks) == descriptor
        assert lendable_descriptor(spec_of(descriptor, one), memoryview(mapping)[: 2 * 4096]) == descriptor
        read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        for spec in (
            spec_of(other, one),
            spec_of(descriptor, one * 2),
            spec_of(descriptor, None),
            spec_of(None, one),
            spec_of(-1, one),
            spec_of(read_only, one),
            SimpleNamespace(_scheduler_mmap=None),
            SimpleNamespace(),
        ):
            assert lendable_descriptor(spec, blocks) is None, spec
        os.close(read_only)
        for memory in (
            memoryview(mapping)[4096:],
            memoryview(mapping)[::2],
            memoryview(mapping).toreadonly(),
            memoryview(mapping)[:0],
            memoryview(bytearray(8 * 4096)),
        ):
            assert lendable_descriptor(spec_of(descriptor, one), memory) is None
        private = mmap.mmap(descriptor, 8 * 4096, flags=mmap.MAP_PRIVATE)
        later = mmap.mmap(descriptor, 4 * 4096, offset=4096)
        assert not maps_file(memoryview(private), descriptor)
        assert not maps_file(memoryview(later), descriptor)


def test_a_region_in_a_file_on_a_disk_is_not_lent_because_the_engine_refuses_it() -> None:
    with TemporaryFile(dir=Path(__file__).parent) as file:
        file.truncate(8 * 4096)
        with mmap.mmap(file.fileno(), 8 * 4096) as mapping:
            assert maps_file(memoryview(mapping), file.fileno())
            assert lendable_descriptor(spec_of(file.fileno(), [1]), memoryview(mapping)) is None


def test_a_mapping_in_two_pieces_of_the_file_is_one_if_they_follow_each_other() -> None:
    with mapped_memfd(4 * 4096) as (descriptor, mapping):
        mapping.madvise(mmap.MADV_DONTFORK, 4096, 4096)  # splits the kernel's record of it in three
        assert maps_file(memoryview(mapping), descriptor)


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", "a\u2028b".encode(), b"a\x0cb\x1cc\rd", b"line\nbreak", b"a b (deleted)"]
)
def test_files_of_any_name_may_be_mapped_beside_the_region(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    beside = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(beside, 4096)
    with mapped_memfd(4096) as (descriptor, mapping), mmap.mmap(beside, 4096):
        os.close(beside)
        assert maps_file(memoryview(mapping), descriptor)
        assert not maps_file(memoryview(bytearray(4096)), descriptor)


def test_nothing_is_lent_where_mappings_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with mapped_memfd(4096) as (descriptor, mapping):
        monkeypatch.setattr("lakefs.host.mapped_files._MAPS", Path("/nonexistent"))
        assert not maps_file(memoryview(mapping), descriptor)
