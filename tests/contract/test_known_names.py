"""Known names on every kind of client: those of the engine's machine answer by themselves, and all answer alike."""

from __future__ import annotations

import resource
from typing import Any
from unittest import mock

import pytest
import trio

from lakefs.client.trio.lake import TrioLake
from lakefs.errors import KeyNotFound
from lakefs.wire.messages import FEATURE_STAMPS
from tests.contract.engines import KINDS, Kind, features_of
from tests.contract.test_lake import Driven, run

SIZES = (0, 1, 5000, 65_535, 65_536, 65_537, 300_000)
SHORT = tuple(f"bkt/{size}" for size in SIZES if size <= 256 << 10)


async def _call(lake: Driven, method: str, *args: Any) -> Any:
    """Return what a method of a lake of either kind returns."""
    call = getattr(lake.lake, method)
    return await call(*args) if isinstance(lake.lake, TrioLake) else await trio.to_thread.run_sync(call, *args)


async def _used(lake: Driven) -> int:
    """Put, read, change and remove objects; return how many names were answered without a request."""
    contents = {f"bkt/{size}": bytes([size % 251]) * size for size in SIZES}
    names = list(contents)
    for name, content in contents.items():
        await _call(lake, "put", name, content)
    for _ in range(4):
        for name, content in contents.items():
            assert await _call(lake, "get", name) == content
            assert (await _call(lake, "stat", name)).size_bytes == len(content)
            assert await _call(lake, "exists", name)
        assert await _call(lake, "get_many", names) == list(contents.values())
        buffers = [bytearray(len(content)) for content in contents.values()]
        assert await _call(lake, "get_many_into", names, buffers) == list(SIZES)
        assert buffers == list(contents.values())
    answered = lake.lake.known.answered
    await _call(lake, "put", "bkt/1", b"new")
    await _call(lake, "remove", "bkt/5000")
    assert await _call(lake, "get", "bkt/1") == b"new"
    with pytest.raises(KeyNotFound):
        await _call(lake, "get", "bkt/5000")
    return answered


def test_clients_on_the_engines_machine_answer_by_themselves_and_no_others(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        answered = await _used(lake)
        client = lake.engine.client
        if client.carries_descriptors and await features_of(client) & FEATURE_STAMPS:
            assert answered > len(SHORT)
        else:
            assert answered == lake.lake.known.names == 0

    run(kind, body)


def test_an_engine_without_stamps_is_asked_each_time(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        assert await _used(lake) == lake.lake.known.names == 0

    of_names = "engine.metadata.metadata_store.Metadata."
    with mock.patch(of_names + "use_stamps"), mock.patch(of_names + "use_turns"):
        run(kind, body)


def test_a_client_without_the_native_module_asks_each_time(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        assert await _used(lake) == lake.lake.known.names == 0

    with mock.patch("lakefs.known.known_names.IS_BUILT", new=False):
        run(kind, body)


def test_no_memory_need_be_locked() -> None:
    """Neither engine nor client may lock memory here."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, before[1]))
    try:
        for name in ("unix", "blocking-unix"):

            async def body(lake: Driven) -> None:
                assert await _used(lake) > len(SHORT)

            run(KINDS[name], body)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
