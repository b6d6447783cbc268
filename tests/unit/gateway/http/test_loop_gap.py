"""The door in the gap of trio's loop: nothing that trio has to do is late, and without a gap all is the same."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import pytest
import trio
import trio.lowlevel
import trio.testing

from gateway.http import loop_gap
from gateway.http.door import Door, HandedOver
from tests.slow_machine import LostTime
from tests.unit.gateway.http.line_repeater import LineRepeater
from tests.unit.gateway.http.test_door import PEER, no_rest

SOON_S = 1.0
WAIT_S = 60.0
CROWD = 40
Body = Callable[[Door, socket.socket, socket.socket], Awaitable[None]]


@pytest.fixture(params=["in the gap", "in a task"])
def has_gap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "in a task":
        monkeypatch.setattr(loop_gap, "_inside", lambda: None)
    return bool(request.param == "in the gap")


def with_door(body: Body, before_turn: Callable[[], None] = lambda: None) -> None:
    """Run `body` with a door and a connection, whose task waits there."""

    async def run() -> None:
        client, server = socket.socketpair()
        door = Door(LineRepeater(), before_turn, lambda: None, no_rest)
        with client, server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(door.run)
                await trio.testing.wait_all_tasks_blocked()
                with trio.fail_after(WAIT_S):
                    await body(door, client, server)
                nursery.cancel_scope.cancel()

    trio.run(run)


def park(nursery: trio.Nursery, door: Door, server: socket.socket, found: list[HandedOver]) -> None:
    """Have a task wait at the door; what it gets is added to `found`."""

    async def wait() -> None:
        found.append(await door.next_bytes(server.fileno(), PEER))

    nursery.start_soon(wait)


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for comes through a socket
        await trio.sleep(0.001)


def test_the_gap_is_found_in_the_trio_that_is_used_here() -> None:
    async def look() -> None:
        assert loop_gap._inside() is not None

    trio.run(look)


def test_the_gap_is_left_while_no_connection_waits_and_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    serve = Door._serve_in_gap

    def counted(door: Door, most_s: float, has_tasks: loop_gap.HasTasks) -> bool:
        served.append(1)
        return serve(door, most_s, has_tasks)

    monkeypatch.setattr(Door, "_serve_in_gap", counted)

    async def turns_cost(calls: int) -> None:
        for _ in range(20):
            await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
        assert len(served) == calls

    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        for number in range(3):
            await turns_cost(len(served))
            found: list[HandedOver] = []
            async with trio.open_nursery() as nursery:
                park(nursery, door, server, found)
                await trio.testing.wait_all_tasks_blocked()
                client.send(b"!%d\n" % number)
            assert found == [HandedOver(b"!%d\n" % number, b"")]
            await trio.testing.wait_all_tasks_blocked()

    with_door(body)
    assert served


def test_answers_are_given_while_no_task_runs(has_gap: bool) -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        async with trio.open_nursery() as nursery:
            park(nursery, door, server, [])
            await trio.testing.wait_all_tasks_blocked()
            steps: list[object] = []

            class Steps(trio.abc.Instrument):
                def before_task_step(self, task: trio.lowlevel.Task) -> None:
                    steps.append(task)

            def ask() -> float:
                client.send(b"?first\n")
                assert client.recv(100) == b"FIRST"
                steps.clear()
                began = time.monotonic()
                for _ in range(50):
                    time.sleep(0.002)  # longer than a turn: it serves what comes at once
                    client.send(b"?line\n")
                    assert client.recv(100) == b"LINE"
                return time.monotonic() - began

            lost = LostTime()
            instrument = Steps()
            trio.lowlevel.add_instrument(instrument)
            done = await trio.to_thread.run_sync(ask)
            assert done < SOON_S + lost.seconds()
            assert (len(steps) < 20) is has_gap, "in the gap no task is needed for an answer"
            trio.lowlevel.remove_instrument(instrument)
            nursery.cancel_scope.cancel()

    with_door(body)


def test_a_task_that_is_woken_by_the_door_runs_at_once(has_gap: bool) -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        for number in range(20):
            found: list[HandedOver] = []
            began, lost = trio.current_time(), LostTime()
            async with trio.open_nursery() as nursery:
                park(nursery, door, server, found)
                threading.Timer(0.01, client.send, (b"!%d\n" % number,)).start()
            assert found == [HandedOver(b"!%d\n" % number, b"")]
            assert trio.current_time() - began < SOON_S + lost.seconds()

    with_door(body)


def test_timers_fire_in_time_while_connections_wait_and_while_they_are_busy(has_gap: bool) -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        async with trio.open_nursery() as nursery:
            park(nursery, door, server, [])
            await trio.testing.wait_all_tasks_blocked()
            for seconds in (0.001, 0.02, 0.1):
                began, lost = trio.current_time(), LostTime()
                await trio.sleep(seconds)
                assert seconds <= trio.current_time() - began < seconds + SOON_S + lost.seconds()
            stop = threading.Event()

            answers: list[bytes] = []

            def ask() -> None:
                while not stop.is_set():
                    client.send(b"?line\n")
                    answers.append(client.recv(100))

            async def keep_busy() -> None:
                await trio.to_thread.run_sync(ask)

            async with trio.open_nursery() as busy:
                busy.start_soon(keep_busy)
                rounds = 0
                while rounds < 20 or len(answers) <= 100:
                    began, lost = trio.current_time(), LostTime()
                    await trio.sleep(0.01)
                    assert trio.current_time() - began < SOON_S + lost.seconds()
                    rounds += 1
                stop.set()
            assert set(answers) == {b"LINE"}
            nursery.cancel_scope.cancel()

    with_door(body)


def test_work_of_the_loop_does_not_wait_for_all_connections_that_are_ready(has_gap: bool) -> None:
    """Each answer takes longer than a turn; the loop gets its work with the first of them."""
    one, other = socket.socketpair()
    answered: list[bytes] = []

    def slowly(line: bytes) -> bytes:
        if not answered:
            one.send(b"work")
        answered.append(line)
        time.sleep(0.002)
        return line

    async def run() -> None:
        door = Door(LineRepeater(slowly), lambda: None, lambda: None, no_rest)
        with ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(CROWD)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(door.run)
                for client, server in pairs:
                    stack.enter_context(client)
                    stack.enter_context(server)
                    park(nursery, door, server, [])
                await trio.testing.wait_all_tasks_blocked()
                for client, _ in pairs:
                    client.send(b"?line\n")
                await trio.lowlevel.wait_readable(other)
                assert len(answered) < CROWD / 4
                nursery.cancel_scope.cancel()

    with one, other:
        trio.run(run)


def test_other_sockets_and_threads_are_met_while_connections_wait(has_gap: bool) -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        async with trio.open_nursery() as nursery:
            park(nursery, door, server, [])
            one, other = trio.socket.socketpair()
            with one, other:
                for number in range(20):
                    threading.Timer(0.005, os.write, (one.fileno(), b"%d" % number)).start()
                    assert await other.recv(100) == b"%d" % number
                    assert await trio.to_thread.run_sync(abs, number) == number
                    await trio.to_thread.run_sync(lambda: trio.from_thread.run(trio.sleep, 0))
            nursery.cancel_scope.cancel()

    with_door(body)


def test_an_error_before_a_turn_ends_the_door_with_it(has_gap: bool) -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        async with trio.open_nursery() as nursery:
            park(nursery, door, server, [])
            await trio.testing.wait_all_tasks_blocked()
            client.send(b"?a\n")
            await trio.sleep_forever()

    def fail() -> None:
        raise KeyError("a bug")

    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        with_door(body, fail)


def test_a_second_door_of_a_loop_waits_in_a_task_and_both_serve() -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        second = Door(LineRepeater(), lambda: None, lambda: None, no_rest)
        client2, server2 = socket.socketpair()
        with client2, server2:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(second.run)
                park(nursery, door, server, [])
                park(nursery, second, server2, [])
                for _ in range(20):
                    for one in (client, client2):
                        one.setblocking(False)
                        one.send(b"?a\n")
                        got: list[bytes] = []

                        def received(one: socket.socket = one, got: list[bytes] = got) -> bool:
                            with suppress(BlockingIOError):
                                got.append(one.recv(100))
                            return bool(got)

                        await until(received)
                        assert got == [b"A"]
                nursery.cancel_scope.cancel()

    with_door(body)


def test_the_gap_is_free_again_when_its_door_has_ended() -> None:
    async def run() -> None:
        for _ in range(2):
            with loop_gap.gap(lambda _: None, lambda *_: False, lambda _: None) as has_gap:
                assert has_gap
                with loop_gap.gap(lambda _: None, lambda *_: False, lambda _: None) as has_another:
                    assert not has_another
                await trio.lowlevel.checkpoint()

    trio.run(run)


def test_a_signal_is_met_while_connections_wait(has_gap: bool) -> None:
    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            async with trio.open_nursery() as nursery:
                park(nursery, door, server, [])
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                assert await anext(signals) == signal.SIGUSR1
                nursery.cancel_scope.cancel()

    with_door(body)


def test_the_door_serves_on_after_a_signal_that_does_not_wake_trio(has_gap: bool) -> None:
    """A wait also ends like this when the process is stopped and continued, or a debugger attaches."""

    async def body(door: Door, client: socket.socket, server: socket.socket) -> None:
        found: list[bytes] = []
        asked, token = trio.Event(), trio.lowlevel.current_trio_token()

        def ask() -> None:
            time.sleep(0.05)  # the loop waits by then
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            client.settimeout(WAIT_S / 3)
            client.send(b"?line\n")
            with suppress(TimeoutError):
                found.append(client.recv(100))
            token.run_sync_soon(asked.set)  # only now does anything but the door wake the loop

        trios = signal.set_wakeup_fd(-1)
        try:
            async with trio.open_nursery() as nursery:
                park(nursery, door, server, [])
                thread = threading.Thread(target=ask)
                thread.start()
                await asked.wait()
                thread.join()
                nursery.cancel_scope.cancel()
        finally:
            signal.set_wakeup_fd(trios)
        assert found == [b"LINE"]

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with_door(body)
    finally:
        signal.signal(signal.SIGUSR1, before)
