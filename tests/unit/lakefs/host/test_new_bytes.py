"""New bytes are what was written to their view, of any length; long ones lie on huge pages where the system has any."""

from __future__ import annotations

import ctypes
import random
import re
from pathlib import Path

import pytest

from lakefs.host.memory_advice import want_huge_pages
from lakefs.host.new_bytes import HUGE_FROM_BYTES, NewBytes
from lakefs.limits import MIB

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that has an address in this process."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if first == "VmFlags:" and inside:
            return words
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", first):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
    return []


@pytest.mark.parametrize("length", [0, 1, 4096, MIB + 3, HUGE_FROM_BYTES - 1, HUGE_FROM_BYTES, HUGE_FROM_BYTES + 4097])
def test_bytes_are_what_was_written_to_their_view(length: int) -> None:
    content = random.Random(length).randbytes(min(length, MIB)) * (length // MIB + 1)
    new = NewBytes(length)
    assert len(new.view) == length
    new.view[:] = content[:length]
    assert new.take() == content[:length]
    with pytest.raises(ValueError, match="released"):
        new.view[:1] = b"x"


def test_long_bytes_lie_on_huge_pages() -> None:
    if not _SETTING.exists() or "[never]" in _SETTING.read_text():
        pytest.skip("this system has no huge pages for programs")
    new = NewBytes(4 * HUGE_FROM_BYTES)
    for at in range(0, len(new.view), 4096):
        new.view[at] = 1
    middle = ctypes.addressof(ctypes.c_char.from_buffer(new.view, 2 * HUGE_FROM_BYTES))
    assert "hg" in flags_at(middle), "the kernel was not asked for huge pages; whether it has any is its own matter"
    assert new.take().count(1) == 4 * HUGE_FROM_BYTES // 4096


@pytest.mark.parametrize("length", [1, 100, 4096, 8192])
def test_advice_changes_no_byte_and_keeps_no_hold_of_the_memory(length: int) -> None:
    memory = bytearray(random.Random(1).randbytes(length))
    kept = bytes(memory)
    view = memoryview(memory)
    want_huge_pages(view)
    view.release()
    memory.append(1)  # refused while anything holds the memory
    assert memory[:-1] == kept
