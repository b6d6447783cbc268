"""Known names and what they depend on: connections, processes, threads, and what an engine shares."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.connect_trio import connect_trio
from lakefs.client.facade import driver_of
from lakefs.errors import EngineUnreachable
from lakefs.known import known_names
from lakefs.limits import HOT_INDEX_SLOTS_MIN
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import table_bytes
from lakefs.shares import stamps_in_use
from lakefs.shares.shared_content import SharedContent
from lakefs.stamps.stamps import StampReader
from tests.e2e.served import Served
from tests.known.clients import learned, reader, requests
from tests.known.history import BUCKET
from tests.served_devices import SHORT

pytestmark = pytest.mark.one_engine(SHORT)
ONE = f"{BUCKET}/one"


def _frozen_stamps() -> Any:
    """Let clients read a copy of the stamps, as if no engine that had them ever ended or changed anything."""

    class Frozen(StampReader):
        def __init__(self, descriptor: int) -> None:
            length = os.fstat(descriptor).st_size
            copy = os.memfd_create("frozen", os.MFD_ALLOW_SEALING)
            try:
                os.write(copy, os.pread(descriptor, length, 0))
                fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                super().__init__(copy)
            finally:
                os.close(copy)

    return mock.patch.object(stamps_in_use, "StampReader", Frozen)


def forgets_with_its_connection(folder: Path, kind: str) -> None:
    """Kill an engine whose stamps never tell, and change a name by the next one."""
    served = Served(folder)
    try:
        with connect(served.server) as writer:
            writer.put(ONE, b"old", create_bucket=True)
            with _frozen_stamps(), reader(kind, served.server) as client:
                learned(client, ONE)
                served.kill()
                served.start()
                writer.put(ONE, b"new")
                assert client.get(ONE) == b"new", "an answer of an engine that has ended"
                assert client.stat(ONE).size_bytes == 3
    finally:
        served.kill()


def test_answers_are_forgotten_with_their_connection_even_if_the_mutex_says_nothing(tmp_path: Path, kind: str) -> None:
    forgets_with_its_connection(tmp_path, kind)


def test_a_client_that_keeps_answers_over_a_new_connection_is_noticed(tmp_path: Path, kind: str) -> None:
    with (
        mock.patch.object(SharedContent, "standing", lambda content: content.epoch),
        mock.patch.object(SharedContent, "_forget"),
        pytest.raises((AssertionError, ValueError), match=r"an engine that has ended|other stamps"),
    ):
        forgets_with_its_connection(tmp_path, kind)


def test_a_killed_and_a_stopped_engine_are_noticed_by_their_stamps(tmp_path: Path, kind: str) -> None:
    """Also by a client that does not look at its connection."""
    served = Served(tmp_path)
    try:
        with connect(served.server) as writer, reader(kind, served.server) as client:
            for number, end in enumerate((served.kill, served.stop)):
                writer.put(ONE, b"%d" % number, create_bucket=True)
                learned(client, ONE)
                before = client.known.answered
                end()
                served.start()
                with mock.patch.object(SharedContent, "standing", lambda content: content.epoch):
                    assert client.get(ONE) == b"%d" % number
                assert client.known.answered == before
    finally:
        served.kill()


def test_a_suspended_engine_changes_nothing_so_its_clients_go_on(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        with connect(served.server) as lake:
            lake.put(ONE, b"1", create_bucket=True)
            learned(lake, ONE)
            assert served.process is not None
            served.process.send_signal(signal.SIGSTOP)
            assert lake.get(ONE) == b"1"
            served.process.send_signal(signal.SIGCONT)
    finally:
        served.kill()


def test_a_closed_lake_answers_nothing(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1")
    lake = connect(engine.server)
    learned(lake, ONE)
    lake.close()
    with pytest.raises(EngineUnreachable, match="closed"):
        lake.get(ONE)
    assert lake.known.names == 0


def test_a_forked_child_learns_anew_and_its_parent_goes_on(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1")
    with connect(engine.server) as lake:
        learned(lake, ONE)
        child = os.fork()
        if child == 0:
            is_good = lake.known.names == 0 and [lake.get(ONE) for _ in range(5)] == [b"1"] * 5
            os._exit(0 if is_good and lake.known.answered > 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        sent = requests(lake)
        assert lake.get(ONE) == b"1"
        assert sent == []


def test_threads_of_one_lake_read_while_others_learn_and_the_engine_changes_everything(
    engine: Served, writer: Lake
) -> None:
    names = [f"{BUCKET}/{number}" for number in range(32)]
    writer.put_many([(name, b"0" * 1000) for name in names])
    errors: list[BaseException] = []
    with connect(engine.server) as lake:
        learned(lake, *names)
        stop = threading.Event()

        def read() -> None:
            try:
                while not stop.is_set():
                    for content in lake.get_many(names):
                        assert len(set(content)) == 1
                        assert len(content) == 1000
                    lake.stat(names[0])
            except BaseException as error:  # noqa: BLE001 - raised by the test
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(1, 30):
            writer.put_many([(name, b"%d" % (number % 10) * 1000) for name in names[number % 3 :: 3]])
            if number % 10 == 0:
                known = driver_of(lake)._known
                assert known is not None
                known.content.close()
                known.content.ask_again()
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert lake.known.answered > 1000


def test_a_replaced_index_is_replaced_here_whoever_asked_for_the_new_one(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1")
    with connect(engine.server) as lake:
        learned(lake, ONE)
        driver = driver_of(lake)
        assert driver._known is not None
        driver._known._table.use_places(SharedTable(bytearray(table_bytes(HOT_INDEX_SLOTS_MIN)), HOT_INDEX_SLOTS_MIN))
        driver.run(driver.shares.index.renewal())
        learned(lake, ONE)


def test_a_cancelled_first_read_does_not_keep_others_from_learning(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1")

    async def main() -> None:
        async with connect_trio(engine.server) as lake:
            with trio.CancelScope() as scope:
                scope.cancel()
                await lake.get(ONE)
            for _ in range(3):
                assert await lake.get(ONE) == b"1"
            assert lake.known.answered > 0

    trio.run(main)


def test_a_long_operation_of_another_thread_keeps_no_known_name_waiting(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1")
    with connect(engine.server) as lake:
        learned(lake, ONE)
        driver = driver_of(lake)
        assert driver._known is not None
        driver._known.content._is_index_due = True
        with driver._lock:
            thread = threading.Thread(target=lambda: [lake.get(ONE) for _ in range(10)])
            thread.start()
            thread.join(30)
            assert not thread.is_alive()


# --- engines that share less -----------------------------------------------------------------------------


def test_without_a_shared_index_only_content_is_asked_for(tmp_path: Path, kind: str) -> None:
    served = Served(tmp_path, "--hot-index", "off")
    try:
        with connect(served.server) as writer, reader(kind, served.server) as client:
            writer.put(ONE, b"1", create_bucket=True)
            for _ in range(4):
                assert client.get(ONE) == b"1"
                assert client.stat(ONE).size_bytes == 1
            assert client.known.answered > 0
            before = client.known.answered
            client.get(ONE)
            assert client.known.answered == before
    finally:
        served.kill()


def test_what_is_known_is_bounded(engine: Served, writer: Lake) -> None:
    names = [f"{BUCKET}/{number:04}" for number in range(400)]
    writer.put_many([(name, b"x") for name in names])
    with mock.patch.object(known_names, "KNOWN_NAMES_BYTES", 40_000), connect(engine.server) as lake:
        lake.stat(names[0])
        for _ in range(3):
            assert lake.get_many(names) == [b"x"] * len(names)
            assert 0 < lake.known.held_bytes <= 40_000
            assert lake.known.names < len(names)
