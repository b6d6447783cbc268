"""What every `Network` does: order, partial sends, ends, refusals; and descriptors where they can be carried."""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs import net as net_module
from lakefs.errors import AddressInUse, EngineUnreachable, InvalidArgument, LakeError, PermissionDenied
from lakefs.ids import Buffer
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX
from lakefs.net import SocketStream, TrioNetwork
from lakefs.net_address import TcpAddress, UnixAddress, parse_address
from lakefs.ports import Listener, Network, Stream
from lakefs.wire.connection import ClientConnection
from tests.sim.network import SimulatedNetwork

Kind = tuple[Callable[[], Network], str]


def simulated() -> Network:
    return SimulatedNetwork(random.Random(7), capacity_bytes=5000)


@pytest.fixture(params=["unix", "tcp", "simulated"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    kinds: dict[str, Kind] = {
        "unix": (TrioNetwork, f"unix:{tmp_path}/socket"),
        "tcp": (TrioNetwork, "tcp://127.0.0.1:0"),
        "simulated": (simulated, "tcp://simulated:0"),
    }
    return kinds[request.param]


@pytest.fixture
def unix(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/socket"


Pair = Callable[[Stream, Stream], Awaitable[None]]


def with_pair(kind: Kind, body: Pair) -> None:
    """Run `body(client, server)` on a connected pair."""

    async def main() -> None:
        make, address = kind
        network = make()
        listener = await network.listen(address)
        client = await network.connect(listener.address)
        server = await listener.accept()
        try:
            await body(client, server)
        finally:
            await client.aclose()
            await server.aclose()
            await listener.aclose()

    trio.run(main)


async def receive_exactly(stream: Stream, count: int) -> bytes:
    memory = memoryview(bytearray(count))
    left = memory
    while left:
        received = await stream.receive_into(left)
        assert received, "the stream ended early"
        left = left[received:]
    return bytes(memory)


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


# --- real sockets only ---------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_go_with_their_bytes_and_are_the_receivers(unix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    async def body(client: Stream, server: Stream) -> None:
        assert client.carries_descriptors
        with (tmp_path / "file").open("rb") as file:
            await client.send([b"before"])
            await client.send([b"with", b"them"], [file.fileno()] * 3)
            await client.send([b"after"])
        assert await receive_exactly(server, 19) == b"beforewiththemafter"
        descriptors = server.take_descriptors()
        assert len(descriptors) == 3
        for descriptor in descriptors:
            assert os.pread(descriptor, 7, 0) == b"content"
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
        assert server.take_descriptors() == []

    with_pair((TrioNetwork, unix), body)


def test_too_many_descriptors_are_all_closed(unix: str) -> None:
    async def body(client: Stream, server: Stream) -> None:
        before = open_descriptors()
        await client.send([b"x"], [0] * (DESCRIPTORS_PER_FRAME_MAX + 1))
        assert await receive_exactly(server, 1) == b"x"
        assert server.take_descriptors() == []
        assert open_descriptors() == before

    with_pair((TrioNetwork, unix), body)


def test_descriptors_that_nobody_took_are_closed_with_the_stream(unix: str) -> None:
    async def body(client: Stream, server: Stream) -> None:
        before = open_descriptors()
        await client.send([b"x"], [0] * 5)
        await receive_exactly(server, 1)
        assert open_descriptors() == before + 5
        await server.aclose()
        assert open_descriptors() == before - 1

    with_pair((TrioNetwork, unix), body)


def test_a_socket_is_open_to_its_owner_alone_whatever_the_umask(unix: str, tmp_path: Path) -> None:
    async def main() -> None:
        before = os.umask(0)
        try:
            listener = await TrioNetwork().listen(unix)
            assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
            await listener.aclose()
            listener = await TrioNetwork(group=os.getegid()).listen(unix)
            assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o660
            assert (tmp_path / "socket").stat().st_gid == os.getegid()
            await listener.aclose()
        finally:
            os.umask(before)

    trio.run(main)


def test_the_socket_of_a_dead_engine_is_replaced(unix: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/socket")

    async def body(client: Stream, server: Stream) -> None:
        await client.send([b"alive"])
        assert await receive_exactly(server, 5) == b"alive"

    with_pair((TrioNetwork, unix), body)
    assert not (tmp_path / "socket").exists()


def test_a_file_that_is_no_socket_is_left_alone(unix: str, tmp_path: Path) -> None:
    (tmp_path / "socket").write_text("precious")
    with pytest.raises(AddressInUse):
        trio.run(TrioNetwork().listen, unix)
    assert (tmp_path / "socket").read_text() == "precious"


def test_a_socket_that_another_engine_has_made_meanwhile_stays(unix: str, tmp_path: Path) -> None:
    async def main() -> None:
        old = await TrioNetwork().listen(unix)
        (tmp_path / "socket").rename(tmp_path / "moved")
        new = await TrioNetwork().listen(unix)
        await old.aclose()
        assert (tmp_path / "socket").exists()
        await new.aclose()

    trio.run(main)


def test_a_folder_that_does_not_exist_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        trio.run(TrioNetwork().listen, f"unix:{tmp_path}/missing/socket")


def first_answer(address: str) -> LakeError:
    """How the engine's end of a raw connection refuses us."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address.removeprefix("unix:"))
        client = ClientConnection()
        space = client.reader.space()
        client.reader.received(raw.recv_into(space))
        with pytest.raises(LakeError) as refusal:
            client.next_event()
        return refusal.value


async def refused(listener: Listener, address: str) -> LakeError:
    """Accept while a stranger connects."""
    answer: list[LakeError] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.accept)
        answer.append(await trio.to_thread.run_sync(first_answer, address))
        nursery.cancel_scope.cancel()
    return answer[0]


def test_a_user_who_is_neither_owner_nor_root_nor_in_the_group_is_refused(
    unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Credentials:
        """The kernel's answer about somebody else."""

        size = net_module._PEER_CREDENTIALS.size

        @staticmethod
        def unpack(_: bytes) -> tuple[int, int, int]:
            return 4711, 12345, 23456

    monkeypatch.setattr(net_module, "_PEER_CREDENTIALS", Credentials)
    monkeypatch.setattr(net_module, "peer_groups", lambda _: [34567])

    async def main() -> None:
        listener = await TrioNetwork().listen(unix)
        assert isinstance(await refused(listener, unix), PermissionDenied)
        await listener.aclose()
        for group in (23456, 34567):
            network = TrioNetwork()
            listener = await network.listen(unix)
            listener._group = group  # type: ignore[attr-defined]
            client = await network.connect(unix)
            server = await listener.accept()
            assert server.peer == "uid 12345 pid 4711"
            await client.aclose()
            await server.aclose()
            await listener.aclose()

    trio.run(main)


def test_groups_of_a_peer_come_from_the_kernel() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert set(net_module.peer_groups(left)) == set(os.getgroups())


def test_accepting_survives_running_out_of_descriptors(kind: Kind) -> None:
    make, address = kind
    if make is simulated:
        pytest.skip("no descriptors in memory")

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


def test_unix_streams_have_large_buffers_and_tcp_streams_no_delay(unix: str) -> None:
    async def unix_body(client: Stream, server: Stream) -> None:
        assert isinstance(server, SocketStream)
        assert server._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 200_000

    async def tcp_body(client: Stream, server: Stream) -> None:
        assert isinstance(server, SocketStream)
        assert server._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert server._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    with_pair((TrioNetwork, unix), unix_body)
    with_pair((TrioNetwork, "tcp://127.0.0.1:0"), tcp_body)


# --- addresses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/lake.sock", UnixAddress("/run/lake.sock")),
        ("unix:lake.sock", UnixAddress("lake.sock")),
        ("tcp://host:9100", TcpAddress("host", 9100)),
        ("tcp://[::1]:0", TcpAddress("::1", 0)),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:a\0b",
        f"unix:/{'x' * 107}",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:1",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:\u0661",
        "tcp://::1:9100",
        "http://host:1",
        "/run/lake.sock",
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


def test_an_unknown_host_is_told() -> None:
    async def main() -> None:
        with pytest.raises(EngineUnreachable, match="not known"):
            await TrioNetwork().connect("tcp://host.invalid:1")

    trio.run(main)
