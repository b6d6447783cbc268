"""Chunks by their ids from a real engine: its hot index says where they are, and no request is made."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import lakefs
from lakefs.client.blocking_driver import BlockingDriver
from lakefs.ids import data_chunk_id
from tests.e2e.served import WAIT_S, Served, serving


def until_hot(lake: lakefs.Lake, chunk: bytes) -> None:
    """Read it until the index has it, and its segment's descriptor is here."""
    until = time.monotonic() + WAIT_S
    while True:
        lake.chunks.get(chunk)
        hot = lake.chunks.hot_reads()
        if hot is not None and hot.index.find(chunk) is not None:
            return
        assert time.monotonic() < until, lake.status()["hot_index"]


def no_requests() -> Any:
    return mock.patch.object(BlockingDriver, "run", side_effect=AssertionError("the engine was asked"))


@pytest.mark.parametrize("check", lakefs.Check)
def test_a_chunk_is_read_without_a_request_and_is_not_there_when_it_was_freed(
    served: Served, check: lakefs.Check
) -> None:
    content = os.urandom(65_536)
    chunk = data_chunk_id(content)
    with lakefs.connect(served.server, check=check) as lake:
        lake.put(f"hot/{check.name}", content)
        until_hot(lake, chunk)
        buffer = bytearray(65_536)
        with no_requests():
            assert lake.chunks.get_into(chunk, buffer) == 65_536
            assert buffer == content == lake.chunks.get(chunk)
            assert (
                lake.chunks.get_many_into([chunk] * 20, [bytearray(65_536) for _ in range(20)])
                == [65_536] * 20
            )
        lake.remove(f"hot/{check.name}")
        while lake.gc()["freed_chunks"] == 0:
            pass
        with pytest.raises(lakefs.LakeError, match="not in the store"):
            lake.chunks.get(chunk)


def test_what_is_read_without_the_engine_is_told_to_it_and_then_read_from_its_memory(folder: Path) -> None:
    contents = [os.urandom(length) for length in (20 << 10, 64 << 10, 300 << 10)]
    chunks = [data_chunk_id(content) for content in contents]
    with serving(folder, "--dram-tier-bytes", "256M") as engine, lakefs.connect(engine.server) as lake:
        for number, content in enumerate(contents):
            lake.put(f"bkt/{number}", content)
        for chunk in chunks:
            until_hot(lake, chunk)
        hot = lake.chunks.hot_reads()
        assert hot is not None
        until = time.monotonic() + WAIT_S
        while not all((found := hot.index.find(chunk)) and found[0] == 3 for chunk in chunks):
            assert [lake.chunks.get(chunk) for chunk in chunks] == contents
            assert time.monotonic() < until, lake.status()["dram"]
        while not lake.status()["dram"]["client_reads"]:
            for chunk in chunks:
                lake.chunks.get(chunk)
        assert [lake.chunks.get(chunk) for chunk in chunks] == contents  # the slabs have come
        buffers = [bytearray(len(content)) for content in contents]
        with no_requests(), mock.patch("lakefs.hot_reads.os.preadv", side_effect=AssertionError("a segment")):
            assert [lake.chunks.get(chunk) for chunk in chunks] == contents
            assert lake.chunks.get_many_into(chunks, buffers) == [len(content) for content in contents]
        assert buffers == contents
        engine.kill()
        with no_requests():
            assert [lake.chunks.get(chunk) for chunk in chunks] == contents, "what is mapped stays"
        engine.start()
        lake.status()
        assert [lake.chunks.get(chunk) for chunk in chunks] == contents


def test_chunks_are_read_after_the_engine_was_replaced(served: Served) -> None:
    content = os.urandom(65_536)
    chunk = data_chunk_id(content)
    with lakefs.connect(served.server) as lake:
        lake.put("hot/stays", content)
        until_hot(lake, chunk)
        served.stop()
        with no_requests():
            assert lake.chunks.get(chunk) == content  # the bytes say so themselves
        served.start()
        lake.put("hot/another", b"x")
        assert lake.chunks.hot_reads() is None
        until_hot(lake, chunk)
        with no_requests():
            assert lake.chunks.get(chunk) == content
