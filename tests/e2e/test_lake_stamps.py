"""Names that clients know at the heads of a lake on two machines: repeated there, and never late."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest

import lakefs
from tests.e2e.test_lake_on_machines import Machine, eventually

CALLS: Final = 50
RIGHT_S: Final = 1.05
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Two machines with two devices each, the names on the first."""
    folder = tmp_path_factory.mktemp("stamps")
    first, second = machines = [Machine(folder / f"machine{number}", 2) for number in (1, 2)]
    try:
        first.init("prod", "--protect", "2+1", "--accept-loss")
        first.start()
        second.join(first)
        second.start()
        eventually(lambda: len([each for each in first.status()["members"] if each["places"]]) == 4, "four members")
        first.good("bucket", "create", "bucket")
        yield machines
    finally:
        for machine in machines[::-1]:
            if machine.process is not None and machine.process.poll() is None:
                assert machine.stop() == 0


def learn(client: lakefs.Lake, name: str, *, content: bytes | None = None) -> None:
    """Ask for a name until the client repeats the answer without a request."""

    def is_repeated() -> bool:
        before = client.known.answered
        if content is None:
            client.stat(name)
        else:
            assert client.get(name) == content
        return client.known.answered > before

    eventually(is_repeated, "it is not repeated")


def test_a_known_name_is_repeated_without_a_request_at_the_heads_of_both_machines(machines: list[Machine]) -> None:
    payload = os.urandom(4096)
    with lakefs.connect(machines[0].server) as first, lakefs.connect(machines[1].server) as second:
        first.put("bucket/known", payload)
        for client in (first, second):
            learn(client, "bucket/known", content=payload)
            answered = client.known.answered
            for _ in range(CALLS):
                assert client.get("bucket/known") == payload
            assert client.known.answered >= answered + CALLS * 3 // 4  # a busy machine may be late with a right


def test_a_change_through_another_machine_is_seen_at_once(machines: list[Machine]) -> None:
    with lakefs.connect(machines[0].server) as first, lakefs.connect(machines[1].server) as second:
        for number in range(CALLS):
            writer, reader = (first, second) if number % 2 else (second, first)
            writer.put("bucket/changing", b"%d" % number)
            assert reader.get("bucket/changing") == b"%d" % number
            learn(reader, "bucket/changing")
        assert not second.exists("bucket/later")
        first.put("bucket/later", b"1")
        assert second.exists("bucket/later")


def test_a_stopped_head_delays_a_change_once_and_never_repeats_what_was_before(machines: list[Machine]) -> None:
    with lakefs.connect(machines[0].server) as first, lakefs.connect(machines[1].server) as second:
        first.put("bucket/stopped", b"before")
        learn(second, "bucket/stopped")
        assert machines[1].process is not None
        head = machines[1].process.pid
        answers: list[bool] = []
        changed = threading.Event()

        def look() -> None:
            """Ask until the answer is the change; note each answer that was begun behind it."""
            while True:
                is_behind = changed.is_set()
                size_bytes = second.stat("bucket/stopped").size_bytes
                if is_behind:
                    answers.append(size_bytes == len(b"changed"))
                    return

        looking = threading.Thread(target=look)
        os.kill(head, signal.SIGSTOP)
        try:
            looking.start()
            begun = time.monotonic()
            first.put("bucket/stopped", b"changed")
            took_s = time.monotonic() - begun
            changed.set()
            begun = time.monotonic()
            first.put("bucket/stopped", b"changed")
            again_s = time.monotonic() - begun
        finally:
            os.kill(head, signal.SIGCONT)
        looking.join()
        assert answers == [True]
        assert took_s > 0.2
        assert again_s < took_s or again_s < RIGHT_S / 2
        assert second.get("bucket/stopped") == b"changed"
        learn(second, "bucket/stopped")
