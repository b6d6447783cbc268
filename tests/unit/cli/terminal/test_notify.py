"""Notifications to the service manager, over real datagram sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import trio
import trio.testing

from cli.terminal.systemd_notify import STATUS_BYTES_MAX, Notifier, keep_watchdog, notifier_from


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    """Bind a datagram socket, as the service manager does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(10)
        yield channel


def test_states_arrive_as_the_manager_reads_them(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier(str(tmp_path / "notify"))
    sent = [notifier.ready("serving 3 buckets"), notifier.watchdog(), notifier.status("elsewhere")]
    sent.append(notifier.stopping("draining"))
    assert sent == [True] * 4
    assert [manager.recv(4096) for _ in sent] == [
        b"READY=1\nSTATUS=serving 3 buckets",
        b"WATCHDOG=1",
        b"STATUS=elsewhere",
        b"STOPPING=1\nSTATUS=draining",
    ]


def test_an_abstract_socket_is_reached(manager: socket.socket) -> None:
    name = f"lake-test-{uuid4()}"
    manager.bind(b"\0" + name.encode())
    assert notifier_from({"NOTIFY_SOCKET": f"@{name}"}).ready("up")
    assert manager.recv(4096).startswith(b"READY=1\n")


def test_a_status_is_one_line_of_bounded_length(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier(str(tmp_path / "notify"))
    notifier.ready("a\nREADY=1\r\n b")
    assert manager.recv(4096) == b"READY=1\nSTATUS=a READY=1 b"
    notifier.stopping("\N{SNOWMAN}" * 1000)
    received = manager.recv(4096).removeprefix(b"STOPPING=1\nSTATUS=").decode()
    assert set(received) == {"\N{SNOWMAN}"}
    assert len(received.encode()) <= STATUS_BYTES_MAX


@pytest.mark.parametrize("address", [None, "", "relative", "@", "vsock:2:1"])
def test_without_a_manager_nothing_is_sent_and_nothing_fails(address: str | None) -> None:
    notifier = Notifier(address, 5.0)
    assert not notifier.ready("up")
    assert notifier.watchdog_s is None


def test_a_manager_that_has_gone_or_does_not_read_blocks_nobody(manager: socket.socket, tmp_path: Path) -> None:
    assert not Notifier(str(tmp_path / "none")).ready("up")
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier(str(tmp_path / "notify"))
    outcomes = [notifier.watchdog() for _ in range(5000)]
    assert outcomes[0]
    assert not outcomes[-1], "the queue is full and the call came back"


def test_the_variables_are_taken_and_children_do_not_see_them() -> None:
    environ = {
        "NOTIFY_SOCKET": "/run/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
        "HOME": "/",
    }
    assert notifier_from(environ).watchdog_s == 30.0
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    "watch", [{"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {}]
)
def test_a_watchdog_for_another_process_or_none_is_not_kept(watch: dict[str, str]) -> None:
    assert notifier_from({"NOTIFY_SOCKET": "/run/notify", **watch}).watchdog_s is None


def test_the_heart_beats_twice_an_interval(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "notify"))
    manager.setblocking(False)
    notifier = Notifier(str(tmp_path / "notify"), 30.0)

    def beats() -> int:
        count = 0
        while True:
            try:
                assert manager.recv(4096) == b"WATCHDOG=1"
            except BlockingIOError:
                return count
            count += 1

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_watchdog, notifier)
            heard = []
            for _ in range(5):
                await trio.sleep(11)
                heard.append(beats())
            nursery.cancel_scope.cancel()
        assert heard == [1, 1, 1, 0, 1], "at 0, 15, 30 and 45 s"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_no_heart_is_kept_for_a_manager_that_asks_for_none() -> None:
    async def main() -> None:
        await keep_watchdog(Notifier("/run/notify"))

    trio.run(main)
