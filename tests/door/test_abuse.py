"""Clients that are slow, idle, many, or gone: no wrong byte, no hung connection, and little memory for each."""

from __future__ import annotations

import random
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.door.asks import Ask
from tests.door.line import Line
from tests.door.stored import THINGS, Stored, content_of, put
from tests.door.warm import HOT, LARGE, content, get, warm
from tests.door.world import World, figure, world
from tests.e2e.test_gateway import until
from tests.served_devices import CYCLES, SHORT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")
PARKED = 1200
TINY_BYTES = 4 << 10
"""A receive buffer that holds next to nothing."""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        put(made.send, made.keys, f"/{THINGS}/large", Stored(content_of(LARGE)))
        yield made


# --- slow readers --------------------------------------------------------------------------------------


def slow_readers_get_right_bytes(made: World) -> None:
    """Clients with tiny buffers ask for much, read nothing while others are served, then read on."""
    raws = {key: made.raw(Ask(f"/{THINGS}/{key}")) for key in (*HOT, "large")}
    with ExitStack() as stack:
        other = stack.enter_context(Line(made.door_address))
        warm(made, other)
        slow: list[tuple[Line, list[str]]] = []
        for keys in (
            ["large"],
            ["large", HOT[0]],
            [HOT[3]] * 8,
            [HOT[2]] * 60,
            [HOT[1]] * 60,
            [HOT[0]] * 200,
            [*HOT] * 20,
        ):
            line = stack.enter_context(Line(made.door_address, receive_bytes=TINY_BYTES))
            line.send(b"".join(raws[key] for key in keys))
            slow.append((line, keys))
        for _ in range(20):
            for key in HOT:
                get(made, other, key)
        for line, keys in slow:
            for number, key in enumerate(keys):
                reply = line.reply()
                assert (reply.status, reply.body == content(key)) == (200, True), f"answer {number} of {keys[:4]}"
            line.end_sending()
            assert line.rest() == b""


def test_slow_readers_get_all_their_bytes_and_hold_up_nobody(made: World) -> None:
    slow_readers_get_right_bytes(made)


def test_a_slow_reader_that_goes_is_forgotten(made: World) -> None:
    for key in (*HOT, "large"):
        line = Line(made.door_address, receive_bytes=TINY_BYTES)
        line.send(made.raw(Ask(f"/{THINGS}/{key}")) * 50)
        assert line.receive(100)
        line.reset()
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)


def test_an_object_that_changes_while_a_slow_reader_reads_it_is_whole(made: World) -> None:
    """The reader gets the content that the object had when it asked; the next request gets the new one.

    Python leases the content when it opens an object; the door pins it when an answer takes longer than a moment.
    """
    old, new = content_of(LARGE, "old"), content_of(LARGE, "new")
    path = f"/{THINGS}/changing"
    for stored, other in ((old, new), (new, old)):
        put(made.send, made.keys, path, Stored(stored))
        raw = made.raw(Ask(path))
        with Line(made.door_address, receive_bytes=TINY_BYTES) as slow, Line(made.door_address) as line:
            assert line.ask(raw).body == stored
            until(lambda: not _is_held(made))
            slow.send(raw)
            began = slow.receive(1000)
            until(lambda: _is_held(made))
            put(made.send, made.keys, path, Stored(other))
            for _ in range(CYCLES):
                made.lake.gc(compact=True)
            assert line.ask(raw).body == other
            head, _, body = began.partition(b"\r\n\r\n")
            left = LARGE - len(body)
            while left and (piece := slow.receive(left)):
                body += piece
                left -= len(piece)
            assert head.startswith(b"HTTP/1.1 200"), head
            assert stored.startswith(body), "the bytes of two contents"
            assert not left, f"the answer was cut short by {left} bytes, though the object was there when it began"


def test_clients_that_come_and_go_get_their_own_answers(made: World) -> None:
    """Connections are closed at all times, some with requests under way, and their descriptors are used again."""
    errors: list[BaseException] = []

    def come_and_go(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(60):
                key = chance.choice(HOT)
                line = Line(made.door_address)
                for _ in range(chance.randrange(4)):
                    get(made, line, key)
                if chance.random() < 0.3:
                    line.send(made.raw(Ask(f"/{THINGS}/{chance.choice(HOT)}")))
                if chance.random() < 0.5:
                    line.reset()
                else:
                    line.close()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)


def _is_held(made: World) -> bool:
    status = made.lake.status()
    pins = status.get("pins", {"chunks": 0})  # a head has none
    return bool(status["clients"]["leases"] or pins["chunks"])


# --- many connections ----------------------------------------------------------------------------------


def parked(made: World, stack: ExitStack, count: int) -> list[Line]:
    """Open connections that each got an answer, and are idle."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most > count + 200, f"this process may open {most} files only"
    lines = []
    for number in range(count):
        line = stack.enter_context(Line(made.door_address))
        if number % 3:  # some have never asked
            get(made, line, HOT[number % 2])
        lines.append(line)
    return lines


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


CONNECTION_BYTES_MAX = 64 << 10


def memory_of_a_parked_connection(made: World) -> float:
    """Return the resident bytes that each of many parked connections adds."""
    with Line(made.door_address) as line:
        warm(made, line)
    with ExitStack() as stack:
        parked(made, stack, 100)
    before = resident_bytes(made.with_door.process.pid)
    with ExitStack() as stack:
        parked(made, stack, PARKED)
        until(lambda: figure(made.with_door, "lake_s3_connections", 'state="idle"') == PARKED)
        return (resident_bytes(made.with_door.process.pid) - before) / PARKED


def check_memory(made: World) -> None:
    """Check, and print, what a parked connection takes."""
    each = memory_of_a_parked_connection(made)
    said = f"{each / 1024:.1f} KiB for each of {PARKED} parked connections"
    sys.stdout.write(f"{said}\n")
    assert each < CONNECTION_BYTES_MAX, said


def test_a_parked_connection_takes_little_memory(made: World) -> None:
    check_memory(made)


def test_many_parked_connections_hold_up_nobody_and_each_can_ask_again(made: World) -> None:
    with ExitStack() as stack:
        lines = parked(made, stack, PARKED)
        with Line(made.door_address) as line:
            for _ in range(100):
                for key in HOT:
                    get(made, line, key)
        for number, line in enumerate(lines):
            if number % 4 == 0:
                line.close()
            elif number % 4 == 1:
                line.reset()
            else:
                get(made, line, HOT[number % 2])
        left = sum(number % 4 > 1 for number in range(PARKED))
        until(lambda: figure(made.with_door, "lake_s3_connections") == left)
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)


@pytest.mark.parametrize(
    ("bug", "check", "seen"),
    [
        pytest.param(
            "forgotten-position",
            slow_readers_get_right_bytes,
            "answer|ended|timed out",
            marks=pytest.mark.one_engine(SHORT),
        ),
        ("hoard", check_memory, "KiB for each"),
    ],
)
def test_a_planted_bug_is_noticed(made: World, bug: str, check: Callable[[World], None], seen: str) -> None:
    with made.beside((*PLANTED, bug)) as planted, pytest.raises((AssertionError, OSError), match=seen):
        check(planted)
