"""PUTs through the door: answered as Python answers them, stored as Python stores them, each once or not at all."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.connect import connect
from lakefs.errors import KeyNotFound
from tests.crash.small_engine import WarmEngine
from tests.door.asks import Ask, Key, raw_of
from tests.door.line import Line, address_of
from tests.door.puts import compare_puts
from tests.door.stored import THINGS
from tests.door.world import SETTINGS, World, door, figure, gathered, new_key, repeated, world
from tests.e2e.gateways import Gateway, gateway
from tests.e2e.served import LAKE, serving
from tests.e2e.test_gateway import until
from tests.served_devices import DEVICES, PUT_STAMPS

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
EXAMPLES = 400
EXAMPLES_TO_NOTICE = 3000
EXAMPLES_WITHOUT_STAMPS = 100
SHARE_MIN = 0.1 if DEVICES else 0.2
"""Part of the PUTs that the door must have gathered; half of those drawn are plain, a third of these by other keys."""
ROUNDS_OF_KILLS = 4
TEACHING_MAX = 50
WAITS_S = 0.2
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        yield made


def test_puts_of_every_form_have_the_same_answer_and_leave_the_same_objects(made: World) -> None:
    before, sent = gathered(made.with_door), made.sent
    compare_puts(made, EXAMPLES)
    share = (gathered(made.with_door) - before) / (made.sent - sent)
    assert share >= SHARE_MIN, f"only {share:.2f} of the PUTs were gathered by the door"


@pytest.mark.parametrize("bug", ["puts-without-type", "puts-by-anybody", "puts-of-another"])
def test_a_gateway_that_stores_puts_otherwise_is_noticed(made: World, bug: str) -> None:
    with made.beside((*PLANTED, bug), "on") as planted, pytest.raises(AssertionError, match="they differ from byte"):
        compare_puts(planted, EXAMPLES_TO_NOTICE, shrink=False)


@pytest.mark.one_engine(PUT_STAMPS)
def test_the_first_get_of_what_was_put_is_answered_by_the_door(made: World) -> None:
    """Not always: the segment in which an object lies must be known."""
    first = 0.0
    with Line(made.door_address) as line:
        for number in range(20):
            body = b"the body of %d" % number
            headers = (("content-length", str(len(body))), ("content-type", f"text/{number}"))
            put = Ask(f"/{THINGS}/taught-{number}", "PUT", headers=headers, body=body)
            assert line.ask(made.raw(put)).status == 200
            before = repeated(made.with_door)
            reply = line.ask(made.raw(Ask(put.path)))
            assert (reply.status, reply.body, reply.header("content-type")) == (200, body, f"text/{number}")
            first += repeated(made.with_door) - before
    assert first >= 10


def test_puts_are_gathered_for_an_engine_that_offers_no_stamps_and_nothing_is_repeated() -> None:
    with world(engine_program=(*PLANTED, "without-stamps")) as found:
        compare_puts(found, EXAMPLES_WITHOUT_STAMPS)
        count = gathered(found.with_door)
        assert count >= 10, f"only {count} of {found.sent} PUTs were gathered by the door"
        assert repeated(found.with_door) == count, "an answer to GET was repeated without stamps"


def put_of(name: str, key: Key) -> bytes:
    """Return a plain PUT of an object whose content is its name."""
    headers = (("content-length", str(len(name))),)
    return raw_of(Ask(f"/{THINGS}/{name}", "PUT", headers=headers, body=name.encode()), {"owner": key})


def teach(found: Gateway, line: Line, key: Key) -> None:
    """Put until the door knows the engine and the signer."""
    before = gathered(found)
    for number in range(TEACHING_MAX):
        assert line.ask(put_of(f"teaching-{number}", key)).status == 200
        if gathered(found) > before:
            return


def put_and_kill(program: Sequence[str]) -> None:
    """Put objects through the door; the engine is killed at each answer, and must have the object afterwards."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="lake-")))
        engine = WarmEngine(folder, "--log-level", "error")
        stack.callback(engine.close)
        with connect(engine.server) as lake:
            lake.create_bucket(THINGS)
            key = new_key(lake)
        options = (*SETTINGS, *door("on"))
        found = stack.enter_context(gateway(engine.server, *options, program=program))
        for number in range(ROUNDS_OF_KILLS):
            with Line(address_of(found.url)) as line:
                teach(found, line, key)
                before = gathered(found)
                assert line.ask(put_of(str(number), key)).status == 200
                engine.kill()
                assert gathered(found) == before + 1 or DEVICES, "a lake may take so long that it has to be taught anew"
            engine.start()
            with connect(engine.server) as lake:
                assert lake.get(f"{THINGS}/{number}") == str(number).encode()


def test_a_put_that_was_answered_is_there_when_the_engine_is_killed_at_once() -> None:
    put_and_kill(LAKE)


def test_a_put_that_is_answered_before_it_is_durable_is_noticed() -> None:
    with pytest.raises(KeyNotFound):
        put_and_kill((*PLANTED, "early-puts"))


def test_a_put_that_failed_at_the_door_is_logged_as_any_other(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with ExitStack() as stack:
        engine = WarmEngine(tmp_path, "--log-level", "error")
        stack.callback(engine.close)
        with connect(engine.server) as lake:
            lake.create_bucket(THINGS)
            key = new_key(lake)
        options = (*SETTINGS, *door("on"), "--s3-access-log", str(log))
        found = stack.enter_context(gateway(engine.server, *options))
        with Line(address_of(found.url)) as line:
            teach(found, line, key)
            before = gathered(found)
            assert engine.process is not None
            engine.process.send_signal(signal.SIGSTOP)
            line.send(put_of("held", key))
            until(lambda: figure(found, "lake_s3_connections", 'state="answering"') == 1)
            time.sleep(WAITS_S)
            engine.kill()
            assert line.reply().status == 503
            assert gathered(found) == before
        engine.start()
        until(lambda: '"status":503' in log.read_text())
        [failed] = [one for one in map(json.loads, log.read_text().splitlines()) if one["status"] == 503]
        assert (failed["access_key"], failed["operation"], failed["key"]) == (key.access_key, "PutObject", "held")
        assert failed["bytes_in"] == len("held")
        assert failed["total_ms"] >= WAITS_S * 1000


def test_a_put_that_is_held_when_the_gateway_stops_is_answered_and_is_the_last_of_its_connection() -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(serving(Path(stack.enter_context(TemporaryDirectory(prefix="lake-")))))
        lake = stack.enter_context(connect(engine.server))
        lake.create_bucket(THINGS)
        key = new_key(lake)
        found = stack.enter_context(gateway(engine.server, *SETTINGS, *door("on")))
        with Line(address_of(found.url)) as line, Line(address_of(found.url)) as idle:
            teach(found, line, key)
            assert idle.ask(put_of("idle", key)).status == 200
            assert engine.process is not None
            engine.process.send_signal(signal.SIGSTOP)
            line.send(put_of("held", key))
            until(lambda: figure(found, "lake_s3_connections", 'state="answering"') == 1)
            found.process.send_signal(signal.SIGTERM)
            assert idle.rest() == b""  # the gateway drains by now
            engine.process.send_signal(signal.SIGCONT)
            reply = line.reply()
            assert (reply.status, reply.header("connection")) == (200, "close")
            assert found.ended() == 0
        assert lake.get(f"{THINGS}/held") == b"held"
