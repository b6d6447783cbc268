"""Requests that lend memory to the engine: which memory it takes, how much, and when that ends; on every client."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import trio
import trio.testing

from engine.memory import lent_memory
from engine.memory.lent_memory import LentMemory, put_into, read_into
from engine.sessions import lendings
from engine.sessions.references import Client
from lakefs.errors import EngineBusy, InvalidArgument, LakeError, SessionLost, SourceChanged
from lakefs.host.descriptors import close_all
from lakefs.limits import LENT_MEMORIES_PER_CONNECTION_MAX, LENT_MEMORY_BYTES_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import MEMORY_FOLDER, Body, Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask

BYTES = 64 * 1024
EXT4 = 0xEF53
F_ADD_SEALS, F_SEAL_FUTURE_WRITE = 1033, 0x0010  # linux/fcntl.h


@contextmanager
def memory_of(size_bytes: int = BYTES) -> Iterator[int]:
    descriptor = os.memfd_create("of a client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


async def lent(client: EngineClient, descriptor: int, *, size_bytes: int = BYTES, writable: bool = False) -> int:
    reply = await client.call(m.LendMemory(size_bytes, writable), (), [descriptor])
    assert isinstance(reply.message, m.MemoryLent)
    return reply.message.memory


def on_a_socket(kind: Kind, body: Body) -> None:
    """Run the body on kinds that can hand over descriptors; the clients of other kinds refuse."""

    async def checked(engine: Engine) -> None:
        if engine.client.carries_descriptors:
            await body(engine)
            return
        with memory_of() as descriptor:
            await refused(engine.client, InvalidArgument, m.LendMemory(BYTES), (), [descriptor])

    kind.run(checked)


def test_memory_is_lent_and_returned_and_told_of(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        with memory_of() as descriptor:
            numbers = [await lent(engine.client, descriptor, writable=writable) for writable in (False, True)]
        if engine.store is not None:
            assert engine.store.lent.statistics() == {"count": 2, "bytes": 2 * BYTES}
        for number in [*numbers, numbers[0], 4711, -1]:
            await ask(engine.client, m.ReturnMemory(number), m.Done)
        if engine.store is not None:
            assert (await engine.store.status())["lent_memory"] == {"count": 0, "bytes": 0}

    on_a_socket(kind, body)


def test_lendings_end_with_their_connection(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return  # this kind has only one connection
        async with engine.connect() as other:
            with memory_of() as descriptor:
                await lent(other, descriptor, writable=True)
            assert engine.store.lent.statistics()["count"] == 1
        with trio.fail_after(10):
            while engine.store.lent.statistics()["count"]:
                await trio.lowlevel.checkpoint()

    on_a_socket(kind, body)


def test_only_memory_that_is_open_as_needed_is_taken(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        path = engine.folder / "memory"
        path.write_bytes(bytes(BYTES))
        receiver, sender = os.pipe()
        folder = os.open(engine.folder, os.O_RDONLY)
        foreign = os.open("/proc/self/status", os.O_RDONLY)
        reading, writing = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY)
        place = os.open(path, os.O_PATH)
        refusals = [(descriptor, False) for descriptor in (receiver, sender, folder, foreign, writing, place)]
        try:
            for descriptor, writable in [*refusals, (reading, True), (writing, True), (place, True)]:
                request = m.LendMemory(1, writable)
                await refused(engine.client, InvalidArgument, request, (), [descriptor])
            if engine.folder.is_relative_to(MEMORY_FOLDER):
                await ask(engine.client, m.ReturnMemory(await lent(engine.client, reading)), m.Done)
            await refused(engine.client, InvalidArgument, m.LendMemory(1))
            await refused(engine.client, InvalidArgument, m.LendMemory(1), (), [reading, reading])
        finally:
            close_all([receiver, sender, folder, foreign, reading, writing, place])

    on_a_socket(kind, body)


def test_memory_is_not_used_before_it_was_looked_at(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    is_used, was_asked, really = threading.Event(), threading.Event(), LentMemory.open

    def slowly(memory: LentMemory) -> None:
        was_asked.set()
        assert is_used.wait(60)
        really(memory)

    async def body(engine: Engine) -> None:
        if engine.store is None:
            return  # this engine is another process
        with memory_of() as descriptor:
            number = await lent(engine.client, descriptor) + 1
            monkeypatch.setattr(LentMemory, "open", slowly)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: lent(engine.client, descriptor, writable=True))
                await trio.to_thread.run_sync(was_asked.wait, 60)
                try:
                    await refused(engine.client, SessionLost, m.LoadSlots(number, [], []))
                finally:
                    is_used.set()
            assert number in next(iter(engine.store.references._clients.values())).memories

    on_a_socket(kind, body)


def test_a_file_on_a_disk_is_no_memory(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "file_system", lambda _descriptor: EXT4)

    async def body(engine: Engine) -> None:
        with memory_of() as descriptor:
            error = await refused(engine.client, InvalidArgument, m.LendMemory(BYTES), (), [descriptor])
            assert "tmpfs" in error.message

    on_a_socket(kind, body)


@pytest.mark.parametrize("size_bytes", [0, -1, BYTES + 1, 1 << 62])
def test_memory_of_another_size_is_refused(kind: Kind, size_bytes: int) -> None:
    async def body(engine: Engine) -> None:
        with memory_of() as descriptor:
            await refused(engine.client, InvalidArgument, m.LendMemory(size_bytes), (), [descriptor])

    on_a_socket(kind, body)


def test_memory_that_is_sealed_against_writing_is_not_lent_for_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        with memory_of() as descriptor:
            fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            await refused(engine.client, InvalidArgument, m.LendMemory(BYTES, True), (), [descriptor])
            await ask(engine.client, m.ReturnMemory(await lent(engine.client, descriptor)), m.Done)

    on_a_socket(kind, body)


def test_lendings_of_a_connection_are_bounded_also_when_made_at_once(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        numbers: list[int] = []
        refusals: list[LakeError] = []
        with memory_of() as descriptor:

            async def lend_one() -> None:
                try:
                    numbers.append(await lent(engine.client, descriptor))
                except EngineBusy as error:
                    refusals.append(error)

            async with trio.open_nursery() as nursery:
                for _ in range(LENT_MEMORIES_PER_CONNECTION_MAX + 3):
                    nursery.start_soon(lend_one)
            assert (len(set(numbers)), len(refusals)) == (LENT_MEMORIES_PER_CONNECTION_MAX, 3)
            await ask(engine.client, m.ReturnMemory(numbers[0]), m.Done)
            await lent(engine.client, descriptor)

    on_a_socket(kind, body)


@pytest.mark.parametrize(("name", "value"), [("LENT_MEMORIES_MAX", 1), ("LENT_MEMORY_BYTES_MAX", 2 * BYTES - 1)])
def test_all_lendings_together_are_bounded(kind: Kind, name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lendings, name, value)

    async def body(engine: Engine) -> None:
        with memory_of() as descriptor:
            number = await lent(engine.client, descriptor)
            async with engine.connect() as other:
                await refused(other, EngineBusy, m.LendMemory(BYTES), (), [descriptor])
                await ask(engine.client, m.ReturnMemory(number), m.Done)
                await lent(other, descriptor)

    on_a_socket(kind, body)


def test_memory_that_can_never_fit_is_refused_for_good(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        with memory_of(LENT_MEMORY_BYTES_MAX + BYTES) as descriptor:
            request = m.LendMemory(LENT_MEMORY_BYTES_MAX + 1)
            error = await refused(engine.client, InvalidArgument, request, (), [descriptor])
        assert not error.retryable
        assert "at most 256 GiB" in error.message
        assert "can never" in error.message

    on_a_socket(kind, body)


# --- inside the engine ---------------------------------------------------------------------------------


def engine_side(engine: Engine) -> tuple[lendings.Lendings, Client]:
    assert engine.store is not None
    return engine.store.lent, engine.store.references.connect("inside", descriptors=True, trusted=True)


def test_the_engine_reads_what_the_client_wrote_and_notices_when_it_shrinks(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        lends, client = engine_side(engine)
        with memory_of() as descriptor:
            os.pwrite(descriptor, b"payload", 100)
            number = await lends.lend(client, os.dup(descriptor), BYTES, writable=False)
            buffer = bytearray(7)
            with lends.using(client, number) as memory:
                read_into(memory, 100, memoryview(buffer))
                assert buffer == b"payload"
                os.ftruncate(descriptor, 103)
                with pytest.raises(SourceChanged):
                    read_into(memory, 100, memoryview(buffer))
            with pytest.raises(InvalidArgument), lends.using(client, number, writable=True):
                raise AssertionError("it was lent for reading")
        lends.end_all(client)
        engine.store.references.disconnect(client)

    on_a_socket(kind, body)


def test_the_kernel_fills_lent_memory_and_fails_without_a_signal_when_it_shrank(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        lends, client = engine_side(engine)
        (engine.folder / "source").write_bytes(b"x" * BYTES)
        source = os.open(engine.folder / "source", os.O_RDONLY)
        with memory_of() as descriptor:
            number = await lends.lend(client, os.dup(descriptor), BYTES, writable=True)
            with lends.using(client, number, writable=True) as memory:
                assert os.preadv(source, [memory.mapping[8192:12288]], 0) == 4096
                assert os.pread(descriptor, 4096, 8192) == b"x" * 4096
                os.ftruncate(descriptor, 0)
                with pytest.raises(OSError, match="Bad address"):
                    os.preadv(source, [memory.mapping[:4096]], 0)
        os.close(source)
        lends.end_all(client)
        engine.store.references.disconnect(client)

    on_a_socket(kind, body)


def test_memory_in_use_is_returned_when_its_last_user_has_left(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        lends, client = engine_side(engine)
        returned: list[LentMemory] = []
        with memory_of() as descriptor:
            number = await lends.lend(client, os.dup(descriptor), BYTES, writable=True)

            async def give_back() -> None:
                await lends.give_back(client, number)
                returned.append(memory)

            async with trio.open_nursery() as nursery:
                with lends.using(client, number, writable=True) as memory:
                    nursery.start_soon(give_back)
                    await trio.testing.wait_all_tasks_blocked()
                    assert not returned
                    read_into(memory, 0, memoryview(bytearray(10)))
                    assert len(memory.mapping) == BYTES
            assert returned
            with pytest.raises(SessionLost), lends.using(client, number):
                raise AssertionError("it was returned")
        engine.store.references.disconnect(client)

    on_a_socket(kind, body)


def test_places_outside_of_lent_memory_are_refused() -> None:
    memory = LentMemory(-1, BYTES, writable=False)
    memory.check_range(0, BYTES)
    memory.check_range(BYTES, 0)
    for offset, length in ((0, BYTES + 1), (BYTES, 1), (-1, 1), (1, -1), (1 << 62, 1 << 62)):
        with pytest.raises(InvalidArgument):
            memory.check_range(offset, length)


def test_memory_of_many_pages_is_let_go_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "LET_GO_AT_ONCE_BYTES", BYTES - 1)
    gone: SimpleQueue[tuple[threading.Thread, int]] = SimpleQueue()
    original = lent_memory._close_later

    def close_later(mapped: list[memoryview | None], descriptor: int) -> None:
        original(mapped, descriptor)
        gone.put((threading.current_thread(), descriptor))

    monkeypatch.setattr(lent_memory, "_close_later", close_later)
    with memory_of() as descriptor:
        os.pwrite(descriptor, bytes(BYTES), 0)
        memory = LentMemory(os.dup(descriptor), BYTES, writable=True)
        memory.open()
        assert memory.end().is_set()
        thread, own = gone.get(timeout=30)
        assert thread is not threading.current_thread()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(own)


def test_an_engine_without_descriptors_or_memory_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with memory_of() as descriptor:
        monkeypatch.setattr(mmap, "mmap", none_left)
        with pytest.raises(EngineBusy):
            LentMemory(descriptor, BYTES, writable=True).open()
        monkeypatch.setattr(os, "memfd_create", none_left)
        with pytest.raises(EngineBusy):
            put_into(memoryview(bytearray(5)), b"bytes")
        monkeypatch.undo()
        monkeypatch.setattr(os, "pwrite", none_left)
        with pytest.raises(EngineBusy):
            put_into(memoryview(bytearray(5)), b"bytes")
