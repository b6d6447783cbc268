"""New shards at a member: checked, written and synced in one step, or refused together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from lakefs.errors import InvalidArgument
from lakefs.host.offload import InlineOffload
from lakefs.limits import KIB
from lakefs.wire import messages as m
from tests.contract.engines import LAKE
from tests.shards import Shard, chunk_at, listed, read, store, store_request
from tests.store_rig import ask, client_of, fsck, in_flight, run, simulated_store


def long_ones(count: int, seed: int = 1) -> list[Shard]:
    """Return shards that lie in large segments, each of a chunk of its own."""
    rng = random.Random(seed)
    return [Shard(chunk_at(seed * 100 + index), 0, rng.randbytes(100 * KIB), 400 * KIB) for index in range(count)]


def short_ones(count: int) -> list[Shard]:
    """Return shards that are packed with others."""
    return [Shard(chunk_at(index), 1, bytes([index]) * KIB) for index in range(count)]


def test_new_shards_are_checked_written_and_synced_in_one_call_to_a_thread() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client = client_of(opened)
            await store(client, *long_ones(1))  # a segment is begun
            calls: list[str] = []
            call_in_thread = InlineOffload.run

            async def noted(self: InlineOffload, call: Callable[..., Any], *args: object) -> Any:
                calls.append(call.__name__)
                return await call_in_thread(self, call, *args)

            with mock.patch.object(InlineOffload, "run", noted):
                await store(client, *long_ones(4))
            # The first is present, so these are compared, and written in runs; then there are only new ones.
            assert calls.count("_seal_all") == 1
            calls.clear()
            with mock.patch.object(InlineOffload, "run", noted):
                await store(client, *long_ones(4, seed=7))
            assert calls.count("_write_blocking") == 1
            assert "_sync_blocking" not in calls, "synced by the call that has written"
            assert "_seal_all" not in calls
            assert await read(client, *long_ones(4, seed=7)) == [shard.payload for shard in long_ones(4, seed=7)]

    run(main)


def test_one_shard_that_differs_from_its_checksums_is_refused_with_all_of_its_request() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client, shards = client_of(opened), [*long_ones(3), *short_ones(2)]
            lie = shards[1].with_payload(b"?" + shards[1].payload[1:])
            sent = [shard.payload for shard in (shards[0], lie, *shards[2:])]
            with pytest.raises(InvalidArgument, match="checksums"):
                await ask(client, store_request(shards), m.ShardsStored, *sent)
            assert await listed(client) == {}
            assert in_flight(opened) == 0
            await store(client, *shards)
            assert await read(client, *shards) == [shard.payload for shard in shards]
            assert (await fsck(client))["findings"] == []

    run(main)
