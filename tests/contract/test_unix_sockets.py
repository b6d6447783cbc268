"""Real Unix sockets, beyond the contract of `Network`: descriptors, modes of files, credentials of peers."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs.client.blocking import socket as blocking_socket
from lakefs.errors import AddressInUse, InvalidArgument, LakeError, PermissionDenied
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX
from lakefs.ports import Listener, Stream
from lakefs.transport import sockets, streams as net_module
from lakefs.transport.address import UnixAddress
from lakefs.transport.sockets import receive_with_descriptors
from lakefs.transport.streams import SocketStream, TrioNetwork
from lakefs.wire.connection import ClientConnection
from tests.descriptors import descriptor_count
from tests.stream_pairs import receive_exactly, with_pair


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


def test_who_answers_one_question_after_the_other_seldom_looks_in_vain(
    unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    receive = receive_with_descriptors

    def counted(sock: socket.socket, buffer: memoryview, descriptors: list[int]) -> int:
        looks.append(len(buffer))
        return receive(sock, buffer, descriptors)

    monkeypatch.setattr(net_module, "receive_with_descriptors", counted)

    async def body(client: Stream, server: Stream) -> None:
        async def answer() -> None:
            for _ in range(200):
                await server.send([await receive_exactly(server, 1)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            for number in range(200):
                await client.send([bytes([number])])
                assert await receive_exactly(client, 1) == bytes([number])
        assert 400 <= len(looks) <= 450, "each of 400 bytes took more than its own look"
        looks.clear()
        await client.send([bytes(300)])
        for _ in range(300):
            await receive_exactly(server, 1)
        assert len(looks) == 300

    with_pair((TrioNetwork, unix), body)


def test_a_server_knows_the_user_of_a_client_on_a_unix_socket_alone(unix: str) -> None:
    async def on_a_unix_socket(client: Stream, server: Stream) -> None:
        assert (server.uid, client.uid) == (os.geteuid(), None)

    async def over_tcp(client: Stream, server: Stream) -> None:
        assert (server.uid, client.uid) == (None, None)

    with_pair((TrioNetwork, unix), on_a_unix_socket)
    with_pair((TrioNetwork, "tcp://127.0.0.1:0"), over_tcp)


def test_too_many_descriptors_are_all_closed(unix: str) -> None:
    async def body(client: Stream, server: Stream) -> None:
        before = descriptor_count()
        await client.send([b"x"], [0] * (DESCRIPTORS_PER_FRAME_MAX + 1))
        assert await receive_exactly(server, 1) == b"x"
        assert server.take_descriptors() == []
        assert descriptor_count() == before

    with_pair((TrioNetwork, unix), body)


def test_descriptors_that_nobody_took_are_closed_with_the_stream(unix: str) -> None:
    async def body(client: Stream, server: Stream) -> None:
        before = descriptor_count()
        await client.send([b"x"], [0] * 5)
        await receive_exactly(server, 1)
        assert descriptor_count() == before + 5
        await server.aclose()
        assert descriptor_count() == before - 1

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
    """Connect a raw socket; return the error with which the engine's end refuses it."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address.removeprefix("unix:"))
        client = ClientConnection()
        space = client.reader.space()
        client.reader.received(raw.recv_into(space))
        with pytest.raises(LakeError) as refusal:
            client.next_event()
        return refusal.value


async def refused(listener: Listener, address: str) -> LakeError:
    """Accept while a stranger connects; return the error."""
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
        """Credentials of another process, as the kernel returns them."""

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
            listener._group = group
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
        assert set(sockets.peer_groups(left)) == set(os.getgroups())


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


def test_the_blocking_client_waits_while_a_listeners_backlog_is_full(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        try:
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        except BlockingIOError:
            pass
        began = threading.Event()

        def accept() -> None:
            began.wait()
            for _ in waiting:
                listener.accept()[0].close()

        accepting = threading.Thread(target=accept)
        accepting.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocking_socket, "_CONNECT_RETRY_S", 0.0)
            patch.setattr("lakefs.client.blocking.socket.time.sleep", lambda _: began.set())
            blocking_socket.connected_socket(UnixAddress(path)).close()
        accepting.join()
    for sock in waiting:
        sock.close()
    assert began.is_set()
