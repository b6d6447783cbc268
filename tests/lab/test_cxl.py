"""CXL memory: the shared index kept in a DAX device of a CXL region."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from engine.memory.backing import open_backing
from engine.memory.dax_device import CONTENT_OFFSET, MAGIC
from lakefs.errors import ConfigError, StoreLocked
from lakefs.shared_index.table_format import table_bytes
from tests.lab.hardware import found, load_modules, shell, wait_for
from tests.lab.kept_index import is_kept_over_stops_and_not_over_kills

pytestmark = [pytest.mark.slow, pytest.mark.lab("cxl")]


@pytest.fixture(scope="module")
def device() -> Path:
    load_modules("cxl_acpi", "cxl_pci", "cxl_port", "cxl_mem", "cxl_pmem", "nd_pmem", "dax_pmem", "device_dax")
    wait_for(lambda: Path("/sys/bus/cxl/devices/mem0").exists(), "the CXL memory is not found")
    shell("cxl create-region -m -d decoder0.0 -w 1 -s 256M mem0 -t pmem")
    shell("ndctl create-namespace -r region0 -m devdax -M mem")
    return found("dax*")


@pytest.fixture
def erased(device: Path) -> Path:
    write(device, 0, bytes(4096))
    return device


def read(device: Path, offset: int, length: int) -> bytes:
    descriptor = os.open(device, os.O_RDWR)
    try:
        with mmap.mmap(descriptor, CONTENT_OFFSET, mmap.MAP_SHARED) as mapping:
            return mapping[offset : offset + length]
    finally:
        os.close(descriptor)


def write(device: Path, offset: int, content: bytes) -> None:
    descriptor = os.open(device, os.O_RDWR)
    try:
        with mmap.mmap(descriptor, CONTENT_OFFSET, mmap.MAP_SHARED) as mapping:
            mapping[offset : offset + len(content)] = content
    finally:
        os.close(descriptor)


def test_the_index_is_kept_over_a_clean_stop_and_made_anew_behind_a_kill(tmp_path: Path, erased: Path) -> None:
    is_kept_over_stops_and_not_over_kills(tmp_path, erased, "DAX device")


def test_what_was_saved_is_read_again_and_gone_while_in_use(erased: Path) -> None:
    content = os.urandom(table_bytes(1024))
    backing = open_backing(str(erased), len(content))
    assert not backing.is_old
    backing.memory[: len(content)] = content
    backing.save()
    backing.close()
    again = open_backing(str(erased), len(content))
    assert again.is_old
    assert again.memory[: len(content)] == content
    again.mark_in_use()
    again.close()
    behind_a_crash = open_backing(str(erased), len(content))
    assert not behind_a_crash.is_old
    assert not any(behind_a_crash.memory[:4096])
    behind_a_crash.close()


@pytest.mark.parametrize("at", [8, 16, 19])
def test_a_damaged_header_is_no_content(erased: Path, at: int) -> None:
    backing = open_backing(str(erased), table_bytes(1024))
    backing.save()
    backing.close()
    write(erased, at, bytes([read(erased, at, 1)[0] ^ 1]))
    again = open_backing(str(erased), table_bytes(1024))
    assert not again.is_old
    again.close()


def test_a_device_that_something_else_uses_is_refused_and_left_as_it_is(erased: Path) -> None:
    write(erased, 0, b"weights of a model")
    with pytest.raises(ConfigError, match="is a device that something else uses"):
        open_backing(str(erased), table_bytes(1024))
    assert read(erased, 0, 20) == b"weights of a model\0\0"


def test_two_engines_do_not_share_a_device(erased: Path) -> None:
    backing = open_backing(str(erased), table_bytes(1024))
    with pytest.raises(StoreLocked, match="shared index of another engine"):
        open_backing(str(erased), table_bytes(1024))
    backing.close()
    open_backing(str(erased), table_bytes(1024)).close()


def test_a_device_that_is_too_small_is_refused(erased: Path) -> None:
    with pytest.raises(ConfigError, match=r"bytes, and \d+ are needed"):
        open_backing(str(erased), 1 << 30)


def test_the_magic_is_written_with_the_first_mark(erased: Path) -> None:
    backing = open_backing(str(erased), table_bytes(1024))
    backing.mark_in_use()
    backing.close()
    assert read(erased, 0, 8) == MAGIC
