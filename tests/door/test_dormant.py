"""All connections that a gateway takes, without a task: little memory for each, and each as good as a new one.

They are opened at once, and two of three have got an answer.  Figures are of RssAnon: `-s` prints them.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lakefs.limits import HTTP_CONNECTIONS_MAX
from tests.door.asks import Ask
from tests.door.brief_lake import IDLE_S
from tests.door.line import Line, address_of
from tests.door.stored import OPEN, THINGS
from tests.door.warm import HOT, get, warm
from tests.door.world import SETTINGS, World, door, figure, repeated, world
from tests.e2e.gateways import Gateway
from tests.e2e.test_gateway import until
from tests.served_devices import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
COUNT = HTTP_CONNECTIONS_MAX - 6
"""A few are left for other clients."""
BYTES_MAX = 512
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")
BRIEF = (sys.executable, "-m", "tests.door.brief_lake")
IN_TIME_S = 9.0


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 2 * HTTP_CONNECTIONS_MAX, f"this process may open {hard} files only"
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * HTTP_CONNECTIONS_MAX, hard))  # gateways inherit it
    try:
        with world() as made:
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def private_bytes(pid: int) -> int:
    """Return RssAnon of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def opened(made: World, stack: ExitStack, count: int) -> list[Line]:
    """Open connections, of which two of three have got an answer."""
    lines = []
    for number in range(count):
        line = stack.enter_context(Line(made.door_address))
        if number > count // 3:
            get(made, line, HOT[number % 2])
        lines.append(line)
    return lines


def idle(made: World) -> float:
    return figure(made.with_door, "lake_s3_connections", 'state="idle"')


def memory_of_a_dormant_connection(made: World) -> None:
    with Line(made.door_address) as line:
        warm(made, line)
    with ExitStack() as stack:
        for line in opened(made, stack, 20):
            line.ask(made.raw(Ask(f"/{THINGS}/missing")))
    pid = made.with_door.process.pid
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)
    before = private_bytes(pid)
    with ExitStack() as stack:
        lines = opened(made, stack, COUNT)
        until(lambda: idle(made) == COUNT)
        each = (private_bytes(pid) - before) / COUNT
        for line in lines:
            line.ask(made.raw(Ask(f"/{THINGS}/missing")))  # Python answers
        until(lambda: idle(made) == COUNT)
        used = (private_bytes(pid) - before) / COUNT
    said = f"{each:.0f} bytes for each of {COUNT} connections, {used:.0f} when Python has answered to each"
    sys.stdout.write(f"{said}\n")
    assert max(each, used) < BYTES_MAX, said


def test_a_connection_that_waits_takes_half_a_kib(made: World) -> None:
    memory_of_a_dormant_connection(made)


def each_is_as_good_as_new(made: World) -> None:
    """Wake each of all connections twice: by a request that the door answers, and by one that Python does."""
    with ExitStack() as stack:
        lines = opened(made, stack, COUNT)
        with Line(made.door_address) as line:
            warm(made, line)
        until(lambda: idle(made) == COUNT)
        before = repeated(made.with_door)
        for number, line in enumerate(lines):
            get(made, line, HOT[number % 2])
        assert DEVICES or repeated(made.with_door) - before > 0.9 * COUNT
        raw = made.raw(Ask(f"/{OPEN}/missing"))
        expected = made.send(raw).masked()
        for line in lines:
            assert line.ask(raw).masked() == expected
        for number, line in enumerate(lines):
            if number % 4 == 0:
                line.close()
            elif number % 4 == 1:
                line.reset()
        left = [line for number, line in enumerate(lines) if number % 4 > 1]
        until(lambda: figure(made.with_door, "lake_s3_connections") == len(left))
        for number, line in enumerate(left):
            get(made, line, HOT[number % 2])
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)


def test_each_of_all_connections_is_as_good_as_a_new_one(made: World) -> None:
    each_is_as_good_as_new(made)


def test_a_request_that_is_cut_anywhere_wakes_a_dormant_connection(made: World) -> None:
    """Cut a request of each kind in two at each byte, on connections that were never used."""
    for ask in (Ask(f"/{THINGS}/{HOT[0]}"), Ask(f"/{OPEN}/missing")):
        raw = made.raw(ask)
        expected = made.send(raw).masked()
        with ExitStack() as stack:
            lines = [stack.enter_context(Line(made.door_address)) for _ in raw[1:]]
            for at, line in enumerate(lines, 1):
                line.send_and_wait_until_read(raw[:at])
            for at, line in enumerate(lines, 1):
                line.send(raw[at:])
                assert line.reply().masked() == expected, f"cut at {at}"


@contextmanager
def another(made: World, program: tuple[str, ...]) -> Iterator[tuple[Gateway, World]]:
    """Run one more gateway with a door, which the test ends."""
    gateway = Gateway(made.engine.server, *SETTINGS, *door("on"), program=program)
    found = World(made.engine, gateway, made.without, made.keys, made.lake)
    found.door_address = address_of(gateway.url)
    try:
        yield gateway, found
    finally:
        gateway.process.kill()
        gateway.ended()


def a_drain_ends_all(made: World, program: tuple[str, ...]) -> None:
    with another(made, program) as (gateway, found), ExitStack() as stack:
        lines = opened(found, stack, COUNT)
        half = lines.pop()
        raw = found.raw(Ask(f"/{OPEN}/missing"))
        half.send_and_wait_until_read(raw[:20])
        until(lambda: idle(found) == COUNT - 1)
        began = time.monotonic()
        gateway.process.terminate()
        for line in lines:
            line.set_timeout(IN_TIME_S)
            assert line.rest() == b""
        half.send(raw[20:])
        reply = half.reply()
        assert (reply.status, reply.is_last) == (404, True), reply.head
        assert gateway.process.wait(IN_TIME_S) == 0
        assert time.monotonic() - began < 2 * IN_TIME_S


def test_a_drain_ends_all_and_finishes_a_request_that_has_begun(made: World) -> None:
    a_drain_ends_all(made, (*BRIEF[:2], "tests.crash.small_lake"))


def idle_ones_end_in_time(made: World, program: tuple[str, ...]) -> None:
    with another(made, program) as (_, found), ExitStack() as stack:
        lines = [stack.enter_context(Line(found.door_address)) for _ in range(30)]
        for line in lines[:10]:
            get(found, line, HOT[0])
        began = time.monotonic()
        for line in lines:
            line.set_timeout(IN_TIME_S)
            assert line.rest() == b""
        assert time.monotonic() - began > IDLE_S / 4
        assert figure(found.with_door, "lake_s3_connections") == 0


def test_idle_ones_end_in_time(made: World) -> None:
    idle_ones_end_in_time(made, BRIEF)


def test_without_descriptors_all_that_are_connected_are_served_and_new_ones_wait(made: World) -> None:
    """A task for a dormant connection needs no new descriptor."""
    pid = made.with_door.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        lines = opened(made, stack, 100)
        used = [int(found.name) for found in Path(f"/proc/{pid}/fd").iterdir()]
        most = max(used) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            lines += opened(made, stack, most - len(used))  # these take the numbers between
            waiting = stack.enter_context(Line(made.door_address))
            raw = made.raw(Ask(f"/{OPEN}/missing"))
            waiting.send(raw)
            for number, line in enumerate(lines):
                assert line.ask(raw).status == 404
                get(made, line, HOT[number % 2])
            waiting.set_timeout(0.3)
            with pytest.raises(TimeoutError):
                waiting.receive(1)
            for line in lines[:5]:
                line.close()
            waiting.set_timeout(IN_TIME_S)
            assert waiting.reply().status == 404
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_connections_come_and_go_for_seconds_and_no_descriptor_is_left(made: World) -> None:
    pid = made.with_door.process.pid
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)
    before = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    ended = threading.Event()
    errors: list[BaseException] = []
    raw = made.raw(Ask(f"/{OPEN}/missing"))

    def come_and_go(number: int) -> None:
        try:
            while not ended.is_set():
                with ExitStack() as stack:
                    lines = [stack.enter_context(Line(made.door_address)) for _ in range(60)]
                    for line in lines[number % 2 :: 2]:
                        assert line.ask(raw).status == 404
                    for line in lines[::3]:
                        get(made, line, HOT[number % 2])
                    for line in lines[::5]:
                        line.send(raw[: number * 7 + 1])
                        line.reset()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    ended.wait(4.0)
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)
    until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) <= before + 1)  # that of the admin port's last client


@pytest.mark.parametrize(
    ("bug", "check"), [("tasks-kept", memory_of_a_dormant_connection), ("dormant-byte", each_is_as_good_as_new)]
)
def test_a_planted_bug_is_noticed(made: World, bug: str, check: Callable[[World], None]) -> None:
    with another(made, (*PLANTED, bug)) as (_, planted), pytest.raises((AssertionError, OSError)):
        check(planted)


@pytest.mark.parametrize(
    ("bug", "check"), [("dormant-left", a_drain_ends_all), ("dormant-kept", idle_ones_end_in_time)]
)
def test_an_end_that_forgets_the_dormant_is_noticed(
    made: World, bug: str, check: Callable[[World, tuple[str, ...]], None]
) -> None:
    with pytest.raises((AssertionError, OSError)):
        check(made, (*PLANTED, "brief", bug) if bug == "dormant-kept" else (*PLANTED, bug))
