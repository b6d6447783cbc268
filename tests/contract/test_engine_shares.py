"""Shares of the engine, on every driver: one owner, one order, and requests where one cannot be had."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import trio

from engine.process.shared_index_life import run_keyed_index, run_shared_index
from lakefs.client.blocking.lake import Lake
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.errors import EngineBusy, InternalError, LakeError
from lakefs.fabric.client_fabric import ClientFabric
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.host.offload import ThreadOffload
from lakefs.shares.engine_shares import EngineShares
from lakefs.shares.index_in_use import IndexInUse
from lakefs.shares.keys_in_use import KeysInUse
from lakefs.shares.share import NEVER
from lakefs.shares.shared_content import SharedContent
from lakefs.shares.stamps_in_use import StampsInUse
from lakefs.wire import messages as m
from tests.contract.engines import KEYED, KINDS, Engine, InThreads, Kind, every
from tests.contract.test_lake import Driven

SHORT, LONG = b"a short object", bytes(range(256)) * 2048
KEYS = [b"first", b"second"]
IN_ORDER = ["content", "keys", "index", "stamps", "fabric", "segments and slabs"]
OPENS = [m.OpenStamps, m.OpenSharedIndex, m.OpenKeyedIndex, m.OpenSegments]


@pytest.fixture(params=every(KEYED))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


class NoFabric:
    """RDMA that moves nothing, and can be closed."""

    link = None

    def close(self) -> None:
        return

    def forked(self, _: object) -> NoFabric:
        return self


@asynccontextmanager
async def _shared(engine: Engine) -> AsyncIterator[None]:
    """Have the engine share its tables for the block, if they are within reach."""
    if engine.store is None:
        yield
        return
    async with trio.open_nursery() as nursery:
        await nursery.start(run_shared_index, engine.store, "memory", 500)
        await nursery.start(run_keyed_index, engine.store)
        for table in (engine.store.shared_index, engine.store.keyed_index):
            while table is not None and table.state == "filling":  # noqa: ASYNC110 (a handful of records)
                await trio.sleep(0.01)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _lake(engine: Engine, fabric: Any = None) -> AsyncIterator[Driven]:
    if isinstance(engine.client, InThreads):
        blocking = Lake(engine.client.engine, check=Check.CRC32C, fabric=fabric)
        try:
            yield Driven(blocking, engine)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(blocking.close)
        return
    async with ThreadOffload(2, "lake-test") as offload:
        lake = TrioLake(engine.client, offload, check=Check.CRC32C, fabric=fabric)
        try:
            yield Driven(lake, engine)
        finally:
            await lake.aclose()


async def _call(of: Any, method: str, *args: Any) -> Any:
    found = getattr(of, method)
    if isinstance(of, Lake) or type(of).__module__.startswith("lakefs.client.blocking"):
        return await trio.to_thread.run_sync(found, *args)
    return await found(*args)


async def _close(lake: Driven) -> None:
    await _call(lake.lake, "close" if isinstance(lake.lake, Lake) else "aclose")


async def _used(lake: Driven) -> None:
    """Read names, chunks, keys and a long object, for each of which the engine shares something; answers are right."""
    space = await _call(lake.lake, "space", "space")
    for name, content in (("bkt/short", SHORT), ("bkt/long", LONG)):
        await _call(lake.lake, "put", name, content)
    await _call(space, "put_many", KEYS, KEYS)
    for _ in range(4):
        assert await _call(lake.lake, "get", "bkt/short") == SHORT
        assert await _call(lake.lake, "get", "bkt/long") == LONG
        stat = await _call(lake.lake, "stat", "bkt/short")
        memory = bytearray(len(SHORT))
        assert await _call(lake.lake.chunks, "get_into", bytes(stat.blob), memory) == len(SHORT)
        assert bytes(memory) == SHORT
        assert await _call(space, "match", [*KEYS, b"none"]) == (2, [True, True, False])
        rooms = [bytearray(6) for _ in KEYS]
        assert await _call(space, "get_many_into", KEYS, rooms) == [5, 6]
        assert [bytes(room[: len(key)]) for room, key in zip(rooms, KEYS, strict=True)] == KEYS


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Note what is closed or forgotten, in order."""
    noted: list[str] = []
    ends: list[tuple[type, str, str]] = [
        (SharedContent, "close", "content"),
        (SharedContent, "begin_anew", "content"),
        (KeysInUse, "forget", "keys"),
        (IndexInUse, "forget", "index"),
        (StampsInUse, "forget", "stamps"),
        (NoFabric, "close", "fabric"),
        (NoFabric, "forked", "fabric"),
        (SegmentDescriptors, "close", "segments and slabs"),
        (SegmentDescriptors, "leave_all", "segments and slabs"),
    ]

    def noting(original: Any, name: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            noted.append(name)
            return original(self, *args)

        return call

    with ExitStack() as stack:
        for kind, method, name in ends:
            planted = noting(getattr(kind, method), name)
            stack.enter_context(mock.patch.object(kind, method, planted))
        yield noted


async def _all_made(lake: Driven) -> EngineShares:
    """Return what the client uses of its engine; each part was made, whether the engine gave it or not."""
    await _used(lake)
    shares = lake.driver.shares
    for share in (shares.keys, shares.index, shares.stamps):
        assert share is not None
    shares.content_for(cast("Any", mock.MagicMock()))
    return shares


def _at_hand(shares: EngineShares) -> list[object]:
    return [shares.stamps.at_hand(), shares.index.at_hand(), shares.keys.at_hand()]


def _check_once_in_order(noted: list[str]) -> None:
    once = [name for at, name in enumerate(noted) if name != "content" or at + 1 == noted.count("content")]
    assert once == IN_ORDER
    assert noted[: noted.count("content")] == ["content"] * noted.count("content"), "what uses the rest, first"


# --- each ending ---------------------------------------------------------------------------------------------


def test_closing_closes_each_shared_thing_once_and_in_one_order(kind: Kind) -> None:
    async def main(engine: Engine) -> None:
        await engine.client.call(m.BucketCreate("bkt"))
        async with _shared(engine), _lake(engine, cast("ClientFabric", NoFabric())) as lake:
            shares = await _all_made(lake)
            with _noted() as noted:
                await _close(lake)
                _check_once_in_order(noted)
                before = list(noted)
                await _close(lake)
                assert noted == before, "closed twice"
            assert _at_hand(shares) == [None] * 3
            assert shares.descriptors.missing({cast("Any", 1)}) == [1]

    kind.run(main)


def test_one_that_cannot_be_closed_keeps_no_other_open(kind: Kind) -> None:
    async def main(engine: Engine) -> None:
        await engine.client.call(m.BucketCreate("bkt"))
        async with _shared(engine), _lake(engine) as lake:
            shares = await _all_made(lake)
            failing = mock.patch.object(IndexInUse, "forget", side_effect=InternalError("planted"))
            with _noted() as noted, failing, pytest.raises(InternalError, match="planted"):
                shares.close()
            assert set(noted) == {"content", "keys", "stamps", "segments and slabs"}
            shares.index.forget()

    kind.run(main)


def test_a_forked_child_leaves_each_shared_thing_once_and_in_the_same_order(kind: Kind) -> None:
    async def main(engine: Engine) -> None:
        await engine.client.call(m.BucketCreate("bkt"))
        async with _shared(engine), _lake(engine, cast("ClientFabric", NoFabric())) as lake:
            shares = await _all_made(lake)
            before = shares.descriptors
            with _noted() as noted:
                shares.begin_anew(object())
                _check_once_in_order(noted)
            assert shares.descriptors is not before
            assert _at_hand(shares) == [None] * 3

    kind.run(main)


# --- a new epoch ---------------------------------------------------------------------------------------------


def _connect_anew(engine: Engine) -> None:
    """Have the client count one more connection, as after a loss."""
    client: Any = engine.client.engine if isinstance(engine.client, InThreads) else engine.client
    client.epoch = client.epoch + 1


def test_nothing_of_an_earlier_connection_is_used_on_the_next(kind: Kind) -> None:
    async def main(engine: Engine) -> None:
        await engine.client.call(m.BucketCreate("bkt"))
        async with _shared(engine), _lake(engine) as lake:
            await _used(lake)
            shares, driver = lake.driver.shares, lake.driver
            known = driver._known
            is_local = engine.client.carries_descriptors and not kind.refusal  # a head shares nothing
            if is_local:
                assert known is not None
                assert known.content.epoch == driver.epoch
            if is_local and engine.store is not None:
                assert shares.index.at_hand() is not None
                assert shares.keys.at_hand() is not None
            used = _at_hand(shares)
            held = set(shares.descriptors._open)
            assert bool(held) == is_local
            _connect_anew(engine)
            assert _at_hand(shares) == [None] * 3
            if known is not None:
                assert known.content.standing() == NEVER
                assert known.counts.names == 0
            await lake.run(lake.steps.exists("bkt/short"))
            assert set(shares.descriptors.missing(held)) == held
            await _used(lake)
            for before, now in zip(used, _at_hand(shares), strict=True):
                assert now is None or now is not before
            assert shares.epoch == driver.epoch

    kind.run(main)


# --- what cannot be had --------------------------------------------------------------------------------------


@contextmanager
def _refused(engine: Engine, request: type[m.Request], error: LakeError) -> Iterator[list[m.Request]]:
    """Refuse one kind of request."""
    refused: list[m.Request] = []
    client: Any = engine.client.engine if isinstance(engine.client, InThreads) else engine.client
    method = "start" if isinstance(engine.client, InThreads) else "call"
    original = getattr(type(client), method)

    def planted(self: Any, asked: m.Request, *args: Any, **named: Any) -> Any:
        if isinstance(asked, request):
            refused.append(asked)
            raise error
        return original(self, asked, *args, **named)

    with mock.patch.object(type(client), method, planted):
        yield refused


@pytest.mark.parametrize("error", [EngineBusy("planted"), InternalError("planted")], ids=["busy", "broken"])
@pytest.mark.parametrize("request_kind", OPENS, ids=lambda kind: kind.__name__)
def test_a_client_that_cannot_have_one_of_them_works_by_requests(
    kind: Kind, request_kind: type[m.Request], error: LakeError
) -> None:
    async def main(engine: Engine) -> None:
        await engine.client.call(m.BucketCreate("bkt"))
        is_local = engine.client.carries_descriptors and not kind.refusal  # what a head lacks is not asked for
        use = _without_segments if request_kind is m.OpenSegments and is_local else _used
        async with _shared(engine), _lake(engine) as lake:
            with _refused(engine, request_kind, error) as refused:
                await use(lake)
            is_asked = is_local and (engine.store is not None or request_kind is not m.OpenSegments)
            is_asked |= kind.shares_tier and request_kind in (m.OpenSharedIndex, m.OpenStamps)  # a head on this machine
            assert bool(refused) == is_asked

    kind.run(main)


async def _without_segments(lake: Driven) -> None:
    """Read names and keys by what is left: a read of granted places needs the segments, and says so."""
    space = await _call(lake.lake, "space", "space")
    await _call(lake.lake, "put", "bkt/short", SHORT)
    await _call(space, "put_many", KEYS, KEYS)
    for _ in range(4):
        assert await _call(lake.lake, "get", "bkt/short") == SHORT
        assert await _call(space, "match", [*KEYS, b"none"]) == (2, [True, True, False])
