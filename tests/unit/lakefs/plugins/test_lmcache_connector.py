"""LMCache's connector with a fake space: operations, failures, and what is done while it is submitted."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lakefs.errors import EngineUnreachable, InvalidArgument, LakeError
from lakefs.plugins.kv import lmcache_connector
from lakefs.plugins.kv.lmcache_connector import AT_ONCE_BYTES_MAX, AT_ONCE_KEYS_MAX, Completion, LakeConnector, batches
from tests.interrupts import WAIT_S
from tests.unit.lakefs.plugins.test_kv_plugins import FakeSpace


class Host:
    """The part of LMCache that asks a connector: it waits for the event, and drains."""

    def __init__(self, space: FakeSpace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lmcache_connector, "check_host", lambda *_: None)
        monkeypatch.setattr(lmcache_connector, "Connection", lambda settings: space)
        self.connector = LakeConnector(space="s", salt="s")

    def result(self, number: int) -> Completion:
        ready = select.select([self.connector.event_fd()], [], [], WAIT_S)[0]
        assert ready, "no completion came"
        (completion,) = self.connector.drain_completions()
        assert completion[0] == number
        assert not select.select([self.connector.event_fd()], [], [], 0)[0]
        return completion


@pytest.fixture
def space() -> FakeSpace:
    return FakeSpace()


@pytest.fixture
def host(space: FakeSpace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(space, monkeypatch)
    yield made
    made.connector.close()
    made.connector.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made.connector.event_fd())


def test_lmcache_stores_finds_loads_and_deletes(host: Host) -> None:
    asked, names = host.connector, ["m@0@0@aa", "m@0@0@bb", "m" * 300]
    values = [memoryview(bytes([number]) * 100) for number in range(3)]
    assert asked.drain_completions() == []
    assert host.result(asked.submit_batch_set(names, values))[1:] == (True, "", [True] * 3)
    assert host.result(asked.submit_batch_exists([*names, "none"]))[1:] == (True, "", [True] * 3 + [False])
    buffers = [memoryview(bytearray(size)) for size in (100, 99, 101, 100)]
    found = host.result(asked.submit_batch_get([*names, "none"], buffers))
    assert found[1:] == (True, "", [True, False, False, False]), "a value of another length is a miss"
    assert buffers[0] == values[0]
    assert host.result(asked.submit_batch_delete([names[0], "none"]))[1:] == (True, "", [True, False])
    assert host.result(asked.submit_batch_exists(names[:1]))[3] == [False]


def test_what_is_in_memory_is_read_while_it_is_submitted(host: Host, space: FakeSpace) -> None:
    asked, names = host.connector, ["a", "b", "c"]
    values = [memoryview(bytes([number]) * 100) for number in range(3)]
    assert host.result(asked.submit_batch_set(names, values))[1]
    space.at_hand, uses = lambda: None, space.uses
    buffers = [memoryview(bytearray(size)) for size in (100, 99, 101, 100)]
    numbers = [asked.submit_batch_exists(["none", "c"]), asked.submit_batch_get([*names, "none"], buffers)]
    assert select.select([asked.event_fd()], [], [], 0)[0], "both have ended when the call returns"
    assert asked.drain_completions() == [
        (numbers[0], True, "", [False, True]),
        (numbers[1], True, "", [True, False, False, False]),
    ]
    assert buffers[0] == values[0]
    assert (space.uses, space.served_at_once) == (uses, 2)
    large = [memoryview(bytearray(AT_ONCE_BYTES_MAX)), memoryview(bytearray(1))]
    for names, found in ((["a", "b"], large), (["a", "a"], buffers[:2]), ([], [])):
        host.result(asked.submit_batch_get(names, found))
    host.result(asked.submit_batch_exists([str(number) for number in range(AT_ONCE_KEYS_MAX + 1)]))
    host.result(asked.submit_batch_exists(["a", "a"]))
    assert (space.uses, space.served_at_once) == (uses + 5, 2), "long, repeated and empty ones are queued"


def test_what_fails_while_it_is_submitted_is_queued_and_its_error_is_a_result(host: Host, space: FakeSpace) -> None:
    def fail() -> None:
        raise InvalidArgument("planted")

    space.at_hand, space.error = fail, EngineUnreachable("the engine is gone")
    assert host.result(host.connector.submit_batch_exists(["a"]))[1:] == (False, "the engine is gone", [False])
    buffers = [memoryview(bytearray(4))]
    assert host.result(host.connector.submit_batch_get(["a"], buffers))[1:] == (False, "the engine is gone", [False])


def test_one_read_at_a_time_is_done_where_it_is_submitted_and_the_end_waits_for_it(
    host: Host, space: FakeSpace
) -> None:
    asked, begun, gate = host.connector, threading.Event(), threading.Event()
    assert host.result(asked.submit_batch_set(["a"], [memoryview(b"value")]))[1]

    def stay() -> None:
        begun.set()
        assert gate.wait(WAIT_S)

    space.at_hand = stay
    buffer = memoryview(bytearray(5))
    reading = threading.Thread(target=asked.submit_batch_get, args=(["a"], [buffer]))
    reading.start()
    assert begun.wait(WAIT_S)
    assert host.result(asked.submit_batch_exists(["a"]))[3] == [True], "by the other thread meanwhile"
    closing = threading.Thread(target=asked.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive(), "the buffer is in use"
    gate.set()
    closing.join(WAIT_S)
    reading.join(WAIT_S)
    assert not closing.is_alive()
    assert bytes(buffer) == b"value"
    served = space.served_at_once
    asked.submit_batch_get(["a"], [buffer])
    assert space.served_at_once == served == 1, "after the end no buffer is used"


def test_lmcache_may_name_an_object_twice(host: Host) -> None:
    asked, value = host.connector, memoryview(b"v" * 10)
    assert host.result(asked.submit_batch_set(["a", "a", "b"], [value] * 3))[1]
    buffers = [memoryview(bytearray(10)) for _ in range(3)]
    assert host.result(asked.submit_batch_get(["a", "b", "a"], buffers))[3] == [True] * 3
    assert all(buffer == value for buffer in buffers)
    assert [places for places, _ in batches([b"a", b"a", b"b", b"a"])] == [[0, 2], [1], [3]]


def test_lmcache_is_told_of_failures(host: Host, space: FakeSpace) -> None:
    values = [memoryview(b"full"), memoryview(b"good")]
    number, ok, reason, each = host.result(host.connector.submit_batch_set(["a", "b"], values))
    assert (number, ok, each) == (1, False, [False, True])
    assert reason == "1 of 2 objects were not stored: no room"
    space.error = EngineUnreachable("the engine is gone")
    for ask in (host.connector.submit_batch_exists, host.connector.submit_batch_delete):
        completion: Any = host.result(ask(["a", "b"]))
        assert completion[1:] == (False, "the engine is gone", [False, False])
    assert isinstance(space.error, LakeError)


def test_a_check_that_does_not_exist_is_refused_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_connector, "check_host", lambda *_: None)
    with pytest.raises(InvalidArgument, match="'md5'; it is one of BLAKE3, CRC32C, NONE"):
        LakeConnector(check="md5")


def test_lmcache_gets_its_last_completions_after_the_end_and_no_other_file_is_read(host: Host) -> None:
    asked = host.connector
    asked.submit_batch_exists(["a"])
    asked.close()
    read, write = os.pipe()
    try:
        os.dup2(read, asked.event_fd())
        os.write(write, b"for another")
        assert [completion[0] for completion in asked.drain_completions()] == [1]
        assert asked.drain_completions() == []
        number = asked.submit_batch_exists(["a"])
        assert number == 2
        assert os.read(read, 100) == b"for another"
    finally:
        for descriptor in {read, write, asked.event_fd()}:
            os.close(descriptor)
