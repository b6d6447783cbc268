"""The DRAM tier of a real engine, as its clients on the same machine meet it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.connect import connect
from lakefs.content.verify import Check
from lakefs.ids import data_chunk_id
from lakefs.wire.media import MEDIA_DRAM, MEDIUM_DRAM
from lakefs.wire.messages import Locate, Located
from tests.e2e.served import WAIT_S, Served, lake, serving

pytestmark = pytest.mark.slow
LENGTHS = (20 << 10, 64 << 10, 300 << 10, 4 << 20)


def _tier(engine: Served) -> dict[str, int]:
    with connect(engine.server) as client:
        found: dict[str, int] = client.status()["dram"]
    return found


def _wait_until_in(address: str, contents: list[bytes]) -> None:
    """Wait until the engine would answer with places in memory for all of them."""
    chunks = [bytes(data_chunk_id(content)) for content in contents]
    until = time.monotonic() + WAIT_S
    with connect_blocking(address) as client:
        while True:
            reply = client.finish(client.start(Locate(chunks, MEDIA_DRAM)))
            assert isinstance(reply.message, Located)
            if all(grant.medium == MEDIUM_DRAM for grant in reply.message.grants):
                return
            assert time.monotonic() < until, "the tier was not filled"


def test_a_client_of_another_process_reads_what_the_tier_has_and_what_it_lost(folder: Path) -> None:
    contents = [os.urandom(length) for length in LENGTHS]
    with serving(folder, "--dram-tier-bytes", "256M") as engine:
        address = engine.server
        for check in (Check.BLAKE3, Check.CRC32C):
            with connect(address, check=check, repeats=False) as client:  # each get is a request that hits
                for content in contents:
                    client.put(f"bkt/{len(content)}", content, create_bucket=True)
                for _ in range(2):
                    assert [client.get(f"bkt/{length}") for length in LENGTHS] == contents
                _wait_until_in(address, contents)
                hits = _tier(engine)["hits"]
                buffer = bytearray(4 << 20)
                for length, content in zip(LENGTHS, contents, strict=True):
                    client.get_into(f"bkt/{length}", buffer)
                    assert buffer[:length] == content
                assert _tier(engine)["hits"] >= hits + len(LENGTHS)
        assert _tier(engine)["limit_bytes"] == 256 << 20


def test_an_engine_that_was_killed_leaves_its_clients_no_memory_to_be_wrong_about(folder: Path) -> None:
    content = os.urandom(300 << 10)
    with serving(folder, "--dram-tier-bytes", "64M") as engine, connect(engine.server) as client:
        client.put("bkt/object", content, create_bucket=True)
        for _ in range(2):
            client.get("bkt/object")
        _wait_until_in(engine.server, [content])
        assert client.get("bkt/object") == content
        engine.kill()
        engine.start()
        assert client.get("bkt/object") == content


def test_sizes_that_make_no_tier_are_refused_and_what_is_too_large_is_clamped(folder: Path) -> None:
    refused = lake("serve", "--data", folder / "data", "--dram-tier-bytes", "1M", "--s3", "off", "--admin", "off")
    assert refused.code != 0
    assert "less than one slab; give 64M or more, or 0 for none" in refused.err
    with serving(folder, "--dram-tier-bytes", "900T") as engine:
        assert 0 < _tier(engine)["limit_bytes"] < 900 << 40
