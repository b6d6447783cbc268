"""A lake on several devices and its clients over rxe0, as processes: what one engine does, and lost members."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lakefs.content.verify import Check
from lakefs.ids import data_chunk_id
from tests.lab.rdma_rig import Rig, ServedLake
from tests.lab.test_rdma_engine import (
    MIB,
    test_a_link_that_goes_down_leaves_the_way_over_tcp,
    test_keys_of_others_and_memory_that_is_gone_end_only_the_liar_s_queue_pair,
    test_reads_loads_and_puts_move_the_right_bytes,
    test_the_engine_registers_its_tier_and_64_mib_at_most,
)

__all__ = [
    "test_a_link_that_goes_down_leaves_the_way_over_tcp",
    "test_keys_of_others_and_memory_that_is_gone_end_only_the_liar_s_queue_pair",
    "test_reads_loads_and_puts_move_the_right_bytes",
    "test_the_engine_registers_its_tier_and_64_mib_at_most",
]
pytestmark = [pytest.mark.slow, pytest.mark.lab("rdma")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLake]:
    made = ServedLake(tmp_path_factory.mktemp("lake"))
    yield made
    assert made.end(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def rig(served: ServedLake) -> Rig:
    return Rig(served)


def test_a_member_that_is_killed_in_gets_and_loads_is_decoded_past(served: ServedLake, rig: Rig) -> None:
    contents = [os.urandom(4 * MIB) for _ in range(6)]
    with rig.lake(rdma=False) as client:
        for number, content in enumerate(contents):
            client.put(f"lab/lost-{number}", content, create_bucket=True)
    chunks = [data_chunk_id(content) for content in contents]
    before = set(served.members())
    assert len(before) == 3
    killer = threading.Timer(0.5, os.kill, (min(before), signal.SIGKILL))
    killer.start()
    with rig.lake(check=Check.NONE) as client, client.pool(size_bytes=24 * MIB) as pool:
        for _ in range(4):
            client.load_many(chunks, pool, [number * 4 * MIB for number in range(6)])
            assert bytes(pool.buffer) == b"".join(contents)
            for number, content in enumerate(contents):
                assert client.get(f"lab/lost-{number}") == content
        assert client.rdma.bytes >= 24 * MIB
        assert not client.rdma.reason
    killer.join()
