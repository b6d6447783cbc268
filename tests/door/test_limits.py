"""Time limits and ends: idle connections, half heads, readers that stop; SIGTERM, and engines that are killed.

The gateway is `brief_lake`, so that no test waits for a minute.  Times are compared with limits far from them: a slow
machine fails nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.door.asks import Ask
from tests.door.brief_lake import CONNECTIONS_MAX, HEAD_S, IDLE_S, STALL_S
from tests.door.line import Line, address_of
from tests.door.stored import THINGS, Stored, content_of, put
from tests.door.warm import HOT, LARGE, content, get, warm
from tests.door.world import SETTINGS, World, door, figure, world
from tests.e2e.gateways import Gateway
from tests.e2e.test_gateway import until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
BRIEF = (sys.executable, "-m", "tests.door.brief_lake")
PLANTED = (sys.executable, "-m", "tests.door.planted_lake", "brief")
IN_TIME_S = 9.0
"""The limits are some 2 s; those of the product are 15 s and more."""
EARLY_S = 0.25


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(program=BRIEF) as made:
        put(made.send, made.keys, f"/{THINGS}/large", Stored(content_of(LARGE)))
        yield made


def end_of(line: Line) -> float:
    """Wait until the server ends an idle connection; return the time that it took."""
    began = time.monotonic()
    line.set_timeout(IN_TIME_S)
    assert line.rest() == b"", "an idle connection got an answer"
    return time.monotonic() - began


# --- limits --------------------------------------------------------------------------------------------


def idle_connections_end_in_time(made: World) -> None:
    """Connections that were never used, used once, and used by the door, end when they have been idle for so long."""
    with ExitStack() as stack:
        lines = []
        for count in (0, 1, 9):
            line = stack.enter_context(Line(made.door_address))
            for number in range(count):
                get(made, line, HOT[number // 5])
            lines.append(line)
        for line in lines[:1]:
            assert end_of(line) > IDLE_S - EARLY_S - 1, "too early"
        for line in lines[1:]:
            end_of(line)


def test_idle_connections_end_in_time(made: World) -> None:
    idle_connections_end_in_time(made)


@pytest.mark.parametrize("count", [1, 9], ids=["answered by Python", "answered by the door"])
def test_an_idle_connection_ends_no_earlier(made: World, count: int) -> None:
    with Line(made.door_address) as line:
        for _ in range(count):
            get(made, line, HOT[0])
        assert end_of(line) > IDLE_S - EARLY_S


def used_connections_live_on(made: World) -> None:
    """A connection that is used more often than the idle limit is never ended."""
    with Line(made.door_address) as line:
        until_s = time.monotonic() + 2.5 * IDLE_S
        while time.monotonic() < until_s:
            get(made, line, HOT[0])
            threading.Event().wait(IDLE_S / 8)


def test_a_connection_that_is_used_lives_on(made: World) -> None:
    used_connections_live_on(made)


@pytest.mark.parametrize("is_warm", [False, True], ids=["new", "known to the door"])
@pytest.mark.parametrize("pace_s", [0.0, HEAD_S / 5], ids=["at once", "in drops"])
def test_half_a_head_is_waited_for_no_longer_than_its_limit(made: World, is_warm: bool, pace_s: float) -> None:
    raw = made.raw(Ask(f"/{THINGS}/{HOT[0]}"))[:40]
    with Line(made.door_address) as line:
        if is_warm:
            warm(made, line)
        began = time.monotonic()
        line.set_timeout(pace_s or IN_TIME_S)
        if not pace_s:
            line.send(raw)
        for at in range(len(raw) if pace_s else 1):
            if pace_s:
                line.send(raw[at : at + 1])
            try:
                assert line.receive(1) == b""
                break
            except TimeoutError:
                assert time.monotonic() - began < IN_TIME_S, "half a head was waited for"
        assert time.monotonic() - began > HEAD_S - EARLY_S, "too early"


@pytest.mark.parametrize("key", [HOT[1], HOT[2], "large"])
def test_a_reader_that_stops_is_ended_and_got_a_prefix(made: World, key: str) -> None:
    raw = made.raw(Ask(f"/{THINGS}/{key}"))
    with Line(made.door_address, receive_bytes=4 << 10) as line:
        line.send(raw * (1 if key == "large" else 400))
        assert line.receive(12) == b"HTTP/1.1 200"
        began = time.monotonic()
        until(lambda: figure(made.with_door, "lake_s3_connections") == 0)
        assert STALL_S - EARLY_S - 1 < time.monotonic() - began < IN_TIME_S
        received = line.rest()
        body = received.partition(b"\r\n\r\n")[2][: len(content(key))]
        assert content(key).startswith(body)
        assert len(received) < (LARGE if key == "large" else 400 * len(content(key)))


def test_a_look_at_all_deadlines_ends_no_connection_that_is_in_use(made: World) -> None:
    """The server looks at them some hundred times a second here: at connections in every state of a request."""
    raw = made.raw(Ask(f"/{THINGS}/{HOT[0]}"))
    expected = made.send(raw).body
    with Line(made.door_address) as line:
        for number in range(1500):
            at = 1 + number * 7 % (len(raw) - 1)
            line.send_and_wait_until_read(raw[:at])
            line.send(raw[at:])
            assert line.reply().body == expected


def the_longest_idle_makes_room(made: World) -> None:
    """With all places taken, a new connection takes that of the one that was idle longest, not of one in use."""
    with ExitStack() as stack:
        lines = [stack.enter_context(Line(made.door_address)) for _ in range(CONNECTIONS_MAX)]
        for line in lines:
            get(made, line, HOT[0])
        for line in lines[:10] * 3:
            get(made, line, HOT[0])  # the oldest are used again, by the door
        for _ in range(5):
            get(made, stack.enter_context(Line(made.door_address)), HOT[0])
        for line in lines[:10]:
            get(made, line, HOT[0])
        assert [line.rest() for line in lines[10:15]] == [b""] * 5
        for line in lines[15:]:
            get(made, line, HOT[0])


def test_the_connection_that_was_idle_longest_makes_room(made: World) -> None:
    the_longest_idle_makes_room(made)


# --- ends ----------------------------------------------------------------------------------------------


class Reader:
    """Reads a hot object again and again until the connection ends; every answer is whole and right."""

    def __init__(self, made: World, address: tuple[str, int], key: str) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self._made, self._address, self._key = made, address, key
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with Line(self._address) as line:
                while True:
                    line.send(self._made.raw(Ask(f"/{THINGS}/{self._key}")))
                    first = line.receive(1)
                    if not first:
                        return
                    line.put_back(first)
                    reply = line.reply()
                    assert reply.status == 200, reply.head
                    assert reply.body == content(self._key), f"wrong bytes of {self._key}"
                    self.count += 1
                    if reply.is_last:
                        return
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self.error = error


def a_gateway_drains(made: World, program: tuple[str, ...]) -> None:
    """End a gateway under parked connections, busy ones, and one that is half answered."""
    state = "on" if program == BRIEF else "off"  # planted bugs are in the Python path
    ending = Gateway(made.engine.server, *SETTINGS, *door(state), program=program)
    address = address_of(ending.url)
    try:
        with ExitStack() as stack:
            idle = [stack.enter_context(Line(address)) for _ in range(20)]
            for number, line in enumerate(idle):
                for _ in range(number % 4):
                    get(made, line, HOT[number % 2])
            slow = stack.enter_context(Line(address, receive_bytes=4 << 10))
            slow.send(made.raw(Ask(f"/{THINGS}/large")))
            assert slow.receive(12) == b"HTTP/1.1 200"
            readers = [Reader(made, address, key) for key in HOT]
            until(lambda: all(reader.count > 20 or reader.error for reader in readers))
            began = time.monotonic()
            ending.process.send_signal(signal.SIGTERM)
            for line in idle:
                end_of(line)
            for reader in readers:
                reader.thread.join(IN_TIME_S)
                assert not reader.thread.is_alive(), "a busy connection was not ended"
                if reader.error is not None:
                    raise reader.error
            assert ending.process.poll() is None, "an answer under way was not finished"
            rest = slow.rest()
            assert rest.endswith(content("large")), f"only {len(rest)} bytes of an answer under way"
            assert ending.process.wait(IN_TIME_S) == 0
            assert time.monotonic() - began < 2 * IN_TIME_S
    finally:
        ending.process.kill()
        ending.ended()


def test_a_gateway_told_to_end_ends_idle_connections_and_finishes_answers(made: World) -> None:
    a_gateway_drains(made, BRIEF)


def test_a_gateway_without_its_engine_repeats_nothing_and_goes_on_when_it_is_back(made: World) -> None:
    with Line(made.door_address) as line:
        warm(made, line)
        made.engine.kill()
        reply = line.ask(made.raw(Ask(f"/{THINGS}/{HOT[0]}")))
        assert (reply.status, reply.code) == (503, "ServiceUnavailable"), reply.head
        made.engine.start()
        until(lambda: made.with_door.admin("/ready")[0] == 200)
        with Line(made.door_address) as again:
            warm(made, again)


def test_readers_get_right_bytes_or_an_error_while_the_engine_is_killed_and_stopped(made: World) -> None:
    ended = threading.Event()
    statuses: list[int] = []
    errors: list[BaseException] = []

    def read(key: str) -> None:
        try:
            while not ended.is_set():
                with Line(made.door_address) as line:
                    while not ended.is_set():
                        try:
                            reply = line.ask(made.raw(Ask(f"/{THINGS}/{key}")))
                        except ConnectionError:  # an answer that was cut short
                            break
                        assert reply.status in (200, 500, 503), reply.head
                        assert reply.status != 200 or reply.body == content(key), f"wrong bytes of {key}"
                        statuses.append(reply.status)
                        if reply.is_last:
                            break
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=read, args=(key,)) for key in (*HOT, *HOT, "large")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            seen = len(statuses) + 100
            until(lambda seen=seen: len(statuses) > seen or bool(errors))  # type: ignore[misc]
            made.engine.kill()
            made.engine.start()
        assert made.engine.process is not None
        os.kill(made.engine.process.pid, signal.SIGSTOP)
        threading.Event().wait(0.5)
        os.kill(made.engine.process.pid, signal.SIGCONT)
        seen = len(statuses) + 100
        until(lambda: len(statuses) > seen or bool(errors))
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert statuses.count(200) > 300


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("no-sweep", idle_connections_end_in_time),
        ("fixed-deadline", used_connections_live_on),
        ("fixed-deadline", the_longest_idle_makes_room),
    ],
)
def test_a_planted_bug_is_noticed(made: World, bug: str, check: Callable[[World], None]) -> None:
    with made.beside((*PLANTED, bug)) as planted, pytest.raises((AssertionError, OSError)):
        check(planted)


@pytest.mark.parametrize("bug", ["idle-kept", "hasty-end"])
def test_an_end_that_forgets_somebody_is_noticed(made: World, bug: str) -> None:
    with pytest.raises((AssertionError, OSError)):
        a_gateway_drains(made, (*PLANTED, bug))
