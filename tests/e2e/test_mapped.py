"""Mapped objects of a real engine: the connection pins them, and they are readable when the engine has ended."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import lakefs
from tests.e2e.served import WAIT_S, Served
from tests.served_devices import MAPPED

pytestmark = pytest.mark.one_engine(MAPPED)
BYTES = 9 << 20


def test_what_is_mapped_stays_though_its_name_was_removed_by_another(served: Served) -> None:
    with lakefs.connect(served.server) as lake, lakefs.connect(served.server) as other:
        content = os.urandom(BYTES)
        lake.put("map/gone", content, create_bucket=True)
        lake.put("map/behind", os.urandom(100_000))
        with lake.map("map/gone", 5, BYTES - 10) as mapped:
            other.remove("map/gone")
            while other.gc()["freed_chunks"] == 0:
                pass
            assert other.status()["segments"]["allocated_bytes"] >= BYTES
            assert mapped.view == content[5:-5]
        assert other.status()["pins"] == {"chunks": 0, "bytes": 0, "segments": 0}


def test_a_mapping_outlives_its_engine_and_says_that_nothing_pins_it(served: Served) -> None:
    content = os.urandom(BYTES)
    with lakefs.connect(served.server) as lake:
        lake.put("map/x", content, create_bucket=True)
        with lake.map("map/x") as mapped:
            assert lake.status()["pins"]["chunks"] == len(mapped.chunks) == 3
            served.kill()
            until = time.monotonic() + WAIT_S
            while mapped.is_pinned():  # until the client sees the end of the connection
                assert time.monotonic() < until
            assert mapped.view == content
            served.start()
            assert lake.exists("map/x")
            assert not mapped.is_pinned()
            assert lake.status()["pins"]["chunks"] == 0
            assert np.frombuffer(mapped.view, dtype=np.uint64).tobytes() == content
