"""A payload is stored from its sender's buffer: the stored bytes are those sent, whatever the buffer holds later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from engine.format.sizes import StoreSizes
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from lakefs.errors import LakeError
from lakefs.host.buffers import BUFFER_BYTES, BufferPool, PooledPayload
from lakefs.host.offload import InlineOffload
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES, KIB, SMALL_PAYLOAD_BYTES
from lakefs.wire import messages as m
from tests.sim.world.determinism import run_seeded
from tests.store_rig import (
    SMALL_SIZES,
    change,
    client_of,
    fsck,
    good,
    in_flight,
    put,
    read,
    records,
    session_of,
    simulated_store,
)

T = TypeVar("T")
SENT = bytes(range(251)) * 800
LATER = 0xEE
SIZES = {"hashed first": SMALL_SIZES, "written ahead": replace(SMALL_SIZES, write_ahead_bytes=64 * KIB)}
DELAYS_MAX = 500


class Sender:
    """A client with a buffer of its own, which it fills anew as soon as it may, or earlier."""

    def __init__(self, store: Store) -> None:
        self.engine = client_of(store)
        self.replies: list[m.Message] = []
        self._buffer = BufferPool(BUFFER_BYTES).try_acquire()
        assert self._buffer is not None
        self.body = PooledPayload(self._buffer, len(SENT))
        self._fill(SENT)

    def _fill(self, content: bytes) -> None:
        self.body.area[: len(content)] = content

    def fill_anew(self) -> None:
        self._fill(bytes([LATER]) * BUFFER_BYTES)

    async def send(self, request: m.Request) -> None:
        try:
            self.replies.append((await self.engine.call(request, self.body)).message)
        finally:
            self.fill_anew()


async def request_of(name: str, client: EmbeddedEngine) -> m.Request:
    if name == "PutObjects":
        return m.PutObjects([len(SENT)], [change("a")])
    return m.StoreChunks(await session_of(client), [1], [len(SENT)])


async def is_whole(store: Store, sender: Sender) -> bool:
    """Return True if each chunk of the store has its own bytes, and what was answered is what was sent."""
    for reply in sender.replies:
        if isinstance(reply, m.Stored) and reply.chunks != [data_chunk_id(SENT)]:
            return False
        if isinstance(reply, m.NameResults) and good(reply)[0].blob != data_chunk_id(SENT):
            return False
    for chunk in records(store):
        try:
            if data_chunk_id(await read(sender.engine, chunk)) != chunk:
                return False
        except LakeError:
            return False
    return bool((await fsck(sender.engine))["damage"] == 0)


def after_each_delay(sizes: StoreSizes, name: str, act: Callable[[Sender, trio.CancelScope], None]) -> list[bool]:
    """Send once for each number of checkpoints after which `act` runs; return of each whether all was whole."""
    outcomes: list[bool] = []
    ended = False

    async def main() -> None:
        nonlocal ended
        async with simulated_store(sizes=sizes) as store:
            sender = Sender(store)
            request = await request_of(name, sender.engine)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send, request)
                for _ in range(len(outcomes)):
                    await trio.lowlevel.checkpoint()
                ended = bool(sender.replies)
                act(sender, nursery.cancel_scope)
            outcomes.append(await is_whole(store, sender))
            assert store.buffers.in_use == 0
            assert in_flight(store) == 0
            await put(sender.engine, "after", SENT)
            assert await read(sender.engine, data_chunk_id(SENT)) == SENT or not outcomes[-1]

    while not ended:
        run_seeded(main, len(outcomes), clock=MockClock(autojump_threshold=0))
        assert len(outcomes) < DELAYS_MAX
    return outcomes


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", ["StoreChunks", "PutObjects"])
def test_the_stored_bytes_are_those_sent_wherever_the_request_is_cancelled(name: str, sizes: StoreSizes) -> None:
    assert all(after_each_delay(sizes, name, lambda sender, scope: scope.cancel()))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", ["StoreChunks", "PutObjects"])
def test_a_buffer_that_is_filled_anew_too_early_is_noticed(name: str, sizes: StoreSizes) -> None:
    """The planted bug: what the tests here look at does change when the rule is broken."""
    assert not all(after_each_delay(sizes, name, lambda sender, scope: sender.fill_anew()))


class Held(InlineOffload):
    """Calls that have begun, and do not go on before `gate` is set; as threads, they cannot be cancelled."""

    def __init__(self) -> None:
        self.is_holding = False
        self.gate = trio.Event()

    async def run(self, call: Callable[..., T], *args: object) -> T:
        if self.is_holding:
            with trio.CancelScope(shield=True):
                await self.gate.wait()
        return await super().run(call, *args)


def test_a_cancelled_request_ends_when_its_buffer_is_no_longer_read() -> None:
    async def main() -> None:
        offload = Held()
        async with simulated_store(offload=offload) as store:
            sender = Sender(store)
            offload.is_holding = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send, m.PutObjects([len(SENT)], [change("a")]))
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                assert bytes(sender.body[0]) == SENT, "the request had ended"
                offload.is_holding = False
                offload.gate.set()
            assert sender.replies == []
            assert bytes(sender.body[0]) != SENT
            assert await is_whole(store, sender)

    trio.run(main)


@pytest.mark.parametrize("length", [0, 1, SMALL_PAYLOAD_BYTES - 1, SMALL_PAYLOAD_BYTES, CHUNK_BYTES])
def test_a_payload_of_any_length_is_stored_from_a_pooled_buffer(length: int) -> None:
    payload = (SENT * 21)[:length]

    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            buffer = BufferPool(BUFFER_BYTES).try_acquire()
            assert buffer is not None
            buffer.view[:length] = payload
            reply = await client.call(m.PutObjects([length], [change("a")]), PooledPayload(buffer, length))
            buffer.view[:] = bytes([LATER]) * BUFFER_BYTES
            buffer.release()
            assert isinstance(reply.message, m.NameResults)
            (stat,) = good(reply.message)
            assert stat.blob == data_chunk_id(payload)
            assert not length or await read(client, stat.blob) == payload

    trio.run(main)
