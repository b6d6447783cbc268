"""The contract of `Network`: order, partial sends, ends, refusals, and descriptors where they can be carried."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs.errors import AddressInUse, EngineUnreachable
from lakefs.ids import Buffer
from lakefs.ports import Network, Stream
from lakefs.transport.streams import TrioNetwork
from tests.certificates import TlsNetwork
from tests.sim.world.network import SimulatedNetwork
from tests.stream_pairs import Kind, receive_exactly, with_pair


def simulated() -> Network:
    return SimulatedNetwork(random.Random(7), capacity_bytes=5000)


@pytest.fixture(params=["unix", "tcp", "simulated", "tls"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    kinds: dict[str, Kind] = {
        "unix": (TrioNetwork, f"unix:{tmp_path}/socket"),
        "tcp": (TrioNetwork, "tcp://127.0.0.1:0"),
        "simulated": (simulated, "tcp://simulated:0"),
        "tls": (partial(TlsNetwork, tmp_path_factory.getbasetemp()), "tcp://127.0.0.1:0"),
    }
    return kinds[request.param]


async def receive_to_end(stream: Stream) -> bytes:
    found = bytearray()
    buffer = memoryview(bytearray(1000))
    while count := await stream.receive_into(buffer):
        found += buffer[:count]
    return bytes(found)


def test_bytes_arrive_in_order_both_ways_at_once(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        there = random.Random(1).randbytes(300_000)
        back = random.Random(2).randbytes(200_000)

        async def send(stream: Stream, payload: bytes) -> None:
            await stream.send([payload[:10], bytearray(payload[10:1000]), b"", memoryview(payload)[1000:]])

        async def expect(stream: Stream, payload: bytes) -> None:
            assert await receive_exactly(stream, len(payload)) == payload

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, client, there)
            nursery.start_soon(send, server, back)
            nursery.start_soon(expect, server, there)
            nursery.start_soon(expect, client, back)

    with_pair(kind, body)


def test_who_has_ended_its_half_still_receives(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        await server.send([b"the last"])
        server.send_end()
        server.send_end()
        assert await receive_to_end(client) == b"the last"
        await client.send([b"an answer"])
        assert await receive_exactly(server, 9) == b"an answer"

    with_pair(kind, body)


def test_more_parts_than_one_system_call_takes_arrive(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        parts: Sequence[Buffer] = [bytes([number % 256]) * 3 for number in range(5000)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, parts)
            assert await receive_exactly(server, 15_000) == b"".join(parts)

    with_pair(kind, body)


def test_send_nowait_takes_what_fits_and_never_waits(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        payload = bytes(1_000_000)
        taken = 0
        while count := client.send_nowait([payload]):
            taken += count
            assert taken < 200_000_000, "somebody buffers without bound"
        assert len(await receive_exactly(server, taken)) == taken

    with_pair(kind, body)


def test_the_end_of_the_peer_is_the_end_of_the_bytes(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        await client.send([b"last words"])
        await client.aclose()
        assert await receive_to_end(server) == b"last words"

    with_pair(kind, body)


@pytest.mark.parametrize("way", ["closes", "ends its half"])
def test_a_peer_that_leaves_is_seen_at_once_whatever_it_sent_before(kind: Kind, way: str) -> None:
    async def body(client: Stream, server: Stream) -> None:
        assert not client.has_peer_left()
        await client.send([b"a request"])
        assert not server.has_peer_left()
        if way == "closes":
            await client.aclose()
        else:
            client.send_end()
        with trio.fail_after(5):
            while not server.has_peer_left():  # over TCP the end travels
                assert not server.carries_descriptors, "on this machine it is seen in the same step"
                await trio.sleep(0.001)
        assert await receive_to_end(server) == b"a request"
        await server.aclose()
        assert server.has_peer_left(), "closed here"

    with_pair(kind, body)


def test_sending_to_a_peer_that_has_gone_raises(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        await server.aclose()
        with pytest.raises(EngineUnreachable):
            for _ in range(1000):
                await client.send([bytes(10_000)])

    with_pair(kind, body)


def test_closing_wakes_a_task_that_receives_here(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        ended: list[bool] = []

        async def receive() -> None:
            try:
                ended.append(await client.receive_into(memoryview(bytearray(1))) == 0)
            except EngineUnreachable:
                ended.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            await client.aclose()
        assert ended == [True]
        await client.aclose()

    with_pair(kind, body)


def test_a_receive_can_be_cancelled_without_losing_bytes(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        buffer = memoryview(bytearray(10))
        with trio.CancelScope() as scope:
            scope.cancel()
            for _ in range(100):
                await server.receive_into(buffer)
        assert scope.cancelled_caught
        await client.send([b"kept"])
        assert await receive_exactly(server, 4) == b"kept"

    with_pair(kind, body)


def test_a_busy_stream_lets_other_tasks_run(kind: Kind) -> None:
    async def body(client: Stream, server: Stream) -> None:
        turns = 0
        async with trio.open_nursery() as nursery:

            async def count() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            nursery.start_soon(count)
            await client.send([bytes(1000)])
            for _ in range(1000):
                await receive_exactly(server, 1)
            nursery.cancel_scope.cancel()
        assert turns > 10

    with_pair(kind, body)


def test_an_address_is_listened_on_once_and_is_free_afterwards(kind: Kind) -> None:
    async def main() -> None:
        make, address = kind
        network = make()
        listener = await network.listen(address)
        with pytest.raises(AddressInUse):
            await network.listen(listener.address)
        await listener.aclose()
        await listener.aclose()
        await (await network.listen(listener.address)).aclose()

    trio.run(main)


def test_nobody_at_an_address_is_told_at_once(kind: Kind) -> None:
    async def main() -> None:
        make, address = kind
        network = make()
        listener = await network.listen(address)
        await listener.aclose()
        with pytest.raises(EngineUnreachable):
            await network.connect(listener.address)

    trio.run(main)


def test_closing_a_listener_wakes_who_accepts(kind: Kind) -> None:
    async def main() -> None:
        make, address = kind
        listener = await make().listen(address)

        async def accept() -> None:
            with pytest.raises(EngineUnreachable):
                await listener.accept()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            await listener.aclose()

    trio.run(main)


def test_accepting_survives_running_out_of_descriptors(kind: Kind) -> None:
    make, address = kind
    if make is simulated:
        pytest.skip("no descriptors in memory")
    if isinstance(make, partial):
        pytest.skip("TLS accepts as the listener below it does")

    async def main() -> None:
        network = make()
        listener = await network.listen(address)
        client = await network.connect(listener.address)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        fillers: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many") as full:
                while True:
                    fillers.append(os.dup(0))
            assert full.value.errno == errno.EMFILE
            with trio.move_on_after(0) as scope:
                await listener.accept()
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                accepted: list[Stream] = []

                async def accept() -> None:
                    accepted.append(await listener.accept())

                nursery.start_soon(accept)
                await trio.testing.wait_all_tasks_blocked()
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        await client.send([b"patience"])
        assert await receive_exactly(accepted[0], 8) == b"patience"
        for stream in (client, *accepted):
            await stream.aclose()
        await listener.aclose()

    trio.run(main)


def test_an_unknown_host_is_told() -> None:
    async def main() -> None:
        with pytest.raises(EngineUnreachable, match="not known"):
            await TrioNetwork().connect("tcp://host.invalid:1")

    trio.run(main)
