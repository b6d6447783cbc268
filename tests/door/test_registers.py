"""Objects are registers, whichever process is asked, and whatever is killed: no answer is older than what was
acknowledged before.  More: `python -m tests.door.registers`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.limits import S3_CLOCK_SKEW_S
from tests.door.asks import Ask, Key, Way, raw_of
from tests.door.line import Line
from tests.door.registers import Registers
from tests.door.stored import KIB, OPEN, THINGS
from tests.door.world import World, new_key, world
from tests.served_devices import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
ROUNDS = 7
"""One for each fault."""
ROUNDS_TO_NOTICE = 40
KEYS_LIVE_S = 1.0
"""A removed key is accepted for at most so long."""
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")


@contextmanager
def registers(bug: str = "") -> Iterator[Registers]:
    program = (*PLANTED, bug) if bug else ()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="lake-")))
        yield stack.enter_context(Registers(folder, 1, program))


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        yield made


def test_what_clients_of_three_ports_find_is_linearizable_while_processes_are_killed_and_stopped() -> None:
    with registers() as made:
        made.run(ROUNDS)
        reads = sum(made.figures[kind] for kind in ("get", "head", "range"))
        writes = sum(made.figures[kind] for kind in ("put", "delete", "copy", "rename", "swap"))
        for figure in ("lost", "copy", "rename", "swap", "cycles of gc"):
            assert made.figures[figure], f"nothing was tried: {made}"
        assert reads > writes > 500, str(made)
        assert made.repeated > reads / 20 or DEVICES, str(made)
        assert made.gathered > made.figures["put"] / 20, str(made)


@pytest.mark.parametrize("bug", ["stale", "stale-after-removal", "any-range"])
def test_a_gateway_that_remembers_too_much_is_noticed(bug: str) -> None:
    with registers(bug) as made, pytest.raises(AssertionError, match=r"is no register|the headers are of|no answer to"):
        made.run(ROUNDS_TO_NOTICE, faults=["nothing"])


# --- rights ----------------------------------------------------------------------------------------------


class Asker:
    """Sends one request again and again, and notes when each was sent and its status."""

    def __init__(self, address: tuple[str, int], ask: Ask, key: Key) -> None:
        self.statuses: list[tuple[float, float, int]] = []
        """When it was sent, when it was answered, and the status."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, ask, key))
        self._thread.start()

    def _run(self, address: tuple[str, int], ask: Ask, key: Key) -> None:
        with Line(address) as line:
            while not self._stop.is_set():
                raw = raw_of(ask, {ask.caller: key})
                sent = time.monotonic()
                reply = line.ask(raw)
                self.statuses.append((sent, time.monotonic(), reply.status))

    def stop(self) -> None:
        """End; the thread's last answer is noted."""
        self._stop.set()
        self._thread.join()


def removed_key_is_refused(made: World, addresses: Sequence[tuple[str, int]]) -> None:
    """Remove a key that is used all the time; a second later it must be refused."""
    asks = [
        Ask(f"/{THINGS}/size-{4 * KIB}"),
        Ask(f"/{THINGS}/size-{64 * KIB}", "HEAD"),
        Ask(f"/{THINGS}/size-{4 * KIB}", way=Way.QUERY),
    ]
    key = new_key(made.lake)
    askers = [Asker(address, ask, key) for address in addresses for ask in asks]
    with ExitStack() as stack:
        for asker in askers:
            stack.callback(asker.stop)
        until = time.monotonic() + 30
        while not all(asker.statuses and asker.statuses[-1][2] == 200 for asker in askers):
            assert time.monotonic() < until, "a new key was not accepted"
        time.sleep(0.3)  # answered many times, so that the door knows it
        made.lake.remove_access_key(key.access_key)
        removed = time.monotonic()
        time.sleep(KEYS_LIVE_S + 0.5)
    for asker in askers:
        late = [status for sent, _, status in asker.statuses if sent > removed + KEYS_LIVE_S]
        assert late, "nothing was asked after the removal"
        assert set(late) == {403}, f"{late.count(200)} of {len(late)} requests with a removed key were answered"


def test_a_removed_key_is_refused_after_a_second_at_the_latest(made: World) -> None:
    for _ in range(2):
        removed_key_is_refused(made, [made.door_address, made.plain_address])


SOON_OLD = {
    "presigned": Ask(f"/{THINGS}/size-{4 * KIB}", way=Way.QUERY, expires_s=2),
    "signed long ago": Ask(f"/{THINGS}/size-{4 * KIB}", age_s=S3_CLOCK_SKEW_S - 2),
}
"""Requests whose signature holds for two more seconds."""


def statuses_over_time(made: World) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Sign, then ask for five seconds; return the statuses of requests sent in the first second, and behind the third.

    On a busy machine nothing may be sent in that first second.
    """
    signed = int(time.time())
    raws = {name: made.raw(ask) for name, ask in SOON_OLD.items()}
    early: dict[str, set[int]] = {name: set() for name in raws}
    late: dict[str, set[int]] = {name: set() for name in raws}
    with Line(made.door_address) as line:
        while time.time() < signed + 5:
            for name, raw in raws.items():
                sent = time.time()
                status = line.ask(raw).status
                if sent < signed + 1:
                    early[name].add(status)
                elif sent > signed + 3:
                    late[name].add(status)
    return early, late


def test_a_signature_that_is_too_old_is_refused_in_time(made: World) -> None:
    """Requests that the door repeats until their time is over, and not after that."""
    for _ in range(5):
        early, late = statuses_over_time(made)
        if all(early.values()) and all(late.values()):
            break
    assert early == {name: {200} for name in SOON_OLD}
    assert late == {name: {403} for name in SOON_OLD}


def strangers_are_refused_at_once(made: World, address: tuple[str, int]) -> None:
    """Close a bucket to strangers and open it again: what was answered counts for the next request."""
    raw = made.raw(Ask(f"/{OPEN}/size-{4 * KIB}", way=Way.NONE))
    with Line(address) as line:
        for number in range(30):
            is_open = number % 2 == 0
            made.lake.set_bucket(OPEN, anonymous_read=is_open)
            statuses = {line.ask(raw).status for _ in range(5)}
            assert statuses == {200 if is_open else 403}, f"the bucket is {'open' if is_open else 'closed'}"
    made.lake.set_bucket(OPEN, anonymous_read=True)


def test_a_bucket_that_is_closed_to_strangers_is_closed_at_once(made: World) -> None:
    strangers_are_refused_at_once(made, made.door_address)


@pytest.mark.parametrize("bug", ["keys-for-long", "strangers-for-long"])
def test_a_gateway_that_asks_too_seldom_is_noticed(made: World, bug: str) -> None:
    with made.beside((*PLANTED, bug)) as planted, pytest.raises(AssertionError, match=r"a removed key|the bucket is"):
        if bug.startswith("keys"):
            removed_key_is_refused(planted, [planted.door_address])
        else:
            strangers_are_refused_at_once(planted, planted.door_address)
