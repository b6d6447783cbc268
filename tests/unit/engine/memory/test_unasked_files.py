"""Descriptors from clients: the engine makes no call on them that their file system would have to answer."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from engine.host.client_files import check_source
from engine.memory.lent_memory import LentMemory
from lakefs.errors import InvalidArgument


@pytest.mark.parametrize("check", [check_source, lambda file: LentMemory(file, 1, writable=False).open()])
def test_a_file_system_that_may_not_answer_is_asked_nothing(
    check: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    descriptor = os.open("/proc/self/status", os.O_RDONLY)  # stands for such a file: it is on no local file system
    for module in ("engine.host.client_files", "engine.memory.lent_memory"):
        monkeypatch.setattr(f"{module}.file_system", asked.append)
    monkeypatch.setattr(os, "fstat", asked.append)
    try:
        with pytest.raises(InvalidArgument, match=r"local file system|memfd"):
            check(descriptor)
    finally:
        monkeypatch.undo()
        os.close(descriptor)
    assert not asked


def test_a_file_of_a_local_file_system_and_memory_are_looked_at() -> None:
    descriptor = os.memfd_create("of a client")
    os.write(descriptor, b"content")
    check_source(descriptor)
    LentMemory(descriptor, 7, writable=False).open()
    os.close(descriptor)
