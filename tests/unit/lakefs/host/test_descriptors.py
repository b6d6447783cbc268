"""Descriptors from strangers are closed without a wait for the server of their file system."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import pytest

from lakefs.host import descriptors


def test_what_is_no_memory_is_closed_beside_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    may_close, closed, close_all = threading.Event(), threading.Event(), descriptors.close_all

    def slowly(descriptors: Iterable[int]) -> None:
        assert may_close.wait(60)
        close_all(descriptors)
        closed.set()

    monkeypatch.setattr(descriptors, "close_all", slowly)
    receiver, sender = os.pipe()
    memory = os.memfd_create("of a client")
    descriptors.close_later([receiver, memory, sender])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)
    os.fstat(receiver)
    may_close.set()
    assert closed.wait(60)
    for descriptor in (receiver, sender):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
