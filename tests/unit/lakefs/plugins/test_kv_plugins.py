"""Shared by plug-ins for KV caches: movers and block moves, with a fake space."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pytest

from lakefs.client.blocking.spaces import Space
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument, StoreFull
from lakefs.get.keyed import Matched
from lakefs.get.pools import Pool
from lakefs.limits import KEYED_VALUE_BYTES_MAX
from lakefs.plugins.kv import movers as moving
from lakefs.plugins.kv.block_moves import BlockMoves, Ended
from lakefs.plugins.kv.movers import Movers
from lakefs.put.keyed import KeyedResult, Outcome
from lakefs.put.shared_memory import Slot
from tests.interrupts import WAIT_S, Interrupter, ends

T = TypeVar("T")


class FakeSpace:
    """A space in memory, shared by all connections of a test."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.depths: dict[bytes, int] = {}
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0
        self.uses = 0
        self.lent_loads = 0
        self.lent_puts = 0
        self.at_hand: Callable[[], None] | None = None
        """Called by jobs that never wait; None: nothing is in memory."""
        self.served_at_once = 0

    def try_use(self, job: Callable[[Space], T]) -> T:
        return job(cast("Space", self))

    def try_match(self, keys: Sequence[bytes], sizes: Sequence[int] = ()) -> list[bool] | None:
        return self.match(keys, sizes).present if self._is_at_hand() else None

    def try_get_many_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int] | None:
        return self.get_many_into(keys, buffers) if self._is_at_hand() else None

    def _is_at_hand(self) -> bool:
        if self.at_hand is None:
            return False
        self.at_hand()
        self.served_at_once += 1
        return True

    def use(self, job: Callable[[Space], T]) -> T:
        self.uses += 1
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return job(cast("Space", self))

    def close(self) -> None:
        self.closed += 1

    def match(self, keys: Sequence[bytes], sizes: Sequence[int] = ()) -> Matched:
        assert len(set(keys)) == len(keys), "a batch with a key twice is refused"
        lengths = [len(self.values.get(key, b"")) for key in keys]
        wanted = sizes or [0] * len(keys)
        return Matched(0, [bool(length) and size in (0, length) for length, size in zip(lengths, wanted, strict=True)])

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        assert len(set(keys)) == len(keys), "a batch with a key twice is refused"
        lengths = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(key, b"")
            fits = len(value) <= len(buffer)
            buffer[: len(value) if fits else 0] = value if fits else b""
            lengths.append(len(value) if fits else 0)
        return lengths

    def load(self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int]) -> list[int]:
        self.lent_loads += 1
        return self.get_many_into(keys, [pool.slot(at, room) for at, room in zip(offsets, rooms, strict=True)])

    def put_many(
        self,
        keys: Sequence[bytes],
        values: Sequence[memoryview | Slot],
        *,
        depths: Sequence[int] = (),
        resize: bool = False,
    ) -> KeyedResult:
        assert len(set(keys)) == len(keys), "a batch with a key twice is refused"
        result = KeyedResult([Outcome.STORED] * len(keys))
        for place, (key, given) in enumerate(zip(keys, values, strict=True)):
            self.lent_puts += isinstance(given, Slot)
            value = given.buffer if isinstance(given, Slot) else given
            if bytes(value[:4]) == b"full":
                result.outcomes[place], result.failures[place] = Outcome.FAILED, StoreFull("no room")
            elif key in self.values and not (resize and len(self.values[key]) != len(value)):
                result.outcomes[place] = Outcome.PRESENT
            else:
                self.values[key] = bytes(value)
        self.depths.update(zip(keys, depths, strict=False))
        return result

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.values.pop(key, None) is not None for key in keys]


# --- movers ----------------------------------------------------------------------------------------------


@contextmanager
def movers_of(space: FakeSpace) -> Iterator[Movers]:
    movers = Movers("test", lambda: space)
    try:
        yield movers
    finally:
        space.gate.set()
        movers.close()
        movers.close()
        assert space.closed == 2
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_jobs_run_in_the_movers_threads_and_errors_are_results() -> None:
    space = FakeSpace()
    ended: list[Any] = []
    with movers_of(space) as movers:
        movers.reader.submit(lambda found: found.match([b"a"]).present, ended.append)
        movers.writer.submit(lambda found: 1 / 0, ended.append)
        movers.wait_idle()
        space.error = EngineUnreachable("gone")
        movers.reader.submit(lambda found: 5, ended.append)
        movers.wait_idle()
    assert space.threads == {"test-read", "test-write"}
    assert [False] in ended
    assert sorted(type(item).__name__ for item in ended) == ["EngineUnreachable", "InternalError", "list"]


def test_a_full_queue_fails_a_job_at_once_and_a_closed_mover_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "JOBS_MAX", 2)
    space = FakeSpace()
    ended: list[Any] = []
    space.gate.clear()
    with movers_of(space) as movers:
        movers.reader.submit(lambda _: "first", ended.append)
        while movers.reader._jobs.qsize():  # until the thread has begun it
            threading.Event().wait(0.001)
        for _ in range(3):
            movers.reader.submit(lambda _: "more", ended.append)
        assert [type(item) for item in ended] == [EngineBusy]
        closing = threading.Thread(target=movers.close)
        closing.start()
        while len(ended) < 3:
            threading.Event().wait(0.001)
        assert [type(item) for item in ended[1:]] == [EngineUnreachable] * 2, "jobs that had not begun"
        space.gate.set()
        closing.join(WAIT_S)
        assert ended[3] == "first", "a job that had begun ends as itself"
        movers.writer.submit(lambda _: 1, ended.append)
        assert isinstance(ended[4], EngineBusy)


def test_a_lost_engine_fails_the_jobs_that_wait_with_the_one_that_waited_for_it() -> None:
    space = FakeSpace()
    ended: list[Any] = []
    space.gate.clear()
    with movers_of(space) as movers:
        for _ in range(4):
            movers.reader.submit(lambda _: "read", ended.append)
        while movers.reader._jobs.qsize() > 3:  # until the thread has begun the first
            threading.Event().wait(0.001)
        movers.writer.submit(lambda _: "written", ended.append)
        space.error = EngineUnreachable("gone")
        space.gate.set()
        movers.wait_idle()
        assert [type(item) for item in ended] == [EngineUnreachable] * 5
        assert space.uses <= 2, "one for each thread: nobody waits for the engine twice"
        space.error = None
        movers.reader.submit(lambda _: "later", ended.append)
        movers.wait_idle()
        assert ended[5:] == ["later"]


def test_an_interrupt_of_the_host_anywhere_leaves_no_mover_wedged() -> None:
    for at in range(1, 1000):
        mover, ended = moving.Mover("test", FakeSpace()), list[Any]()

        def use(mover: moving.Mover = mover, ended: list[Any] = ended) -> None:
            mover.submit(lambda _: "done", ended.append)
            mover.wait_idle()
            mover.close()

        tracer = Interrupter(moving, at)
        was_interrupted = tracer.interrupt(use)
        assert ends(mover.close), f"interrupted at {tracer.where}"
        assert ends(mover.wait_idle), f"interrupted at {tracer.where}"
        assert len(ended) <= 1
        if not was_interrupted:
            assert ended == ["done"]
            assert at > 10
            return
    raise AssertionError("the calls have no end")


# --- blocks ----------------------------------------------------------------------------------------------


def test_blocks_are_stored_loaded_and_missed() -> None:
    space, memory = FakeSpace(), bytearray(b"".join(bytes([65 + row]) * 8 for row in range(6)))
    with movers_of(space) as movers:
        moves = BlockMoves(movers, memoryview(memory), 8)
        moves.store(1, [b"a", b"b"], [0, 1], [3, 4])
        movers.wait_idle()
        assert moves.is_busy, "an end that nobody has collected"
        (ended,) = moves.collect()
        assert (ended.number, ended.is_load, ended.moved, ended.failed, ended.moved_bytes) == (
            1, False, [b"a", b"b"], [], 16
        )  # fmt: skip
        assert (space.values, space.depths) == ({b"a": b"A" * 8, b"b": b"B" * 8}, {b"a": 3, b"b": 4})
        space.values[b"short"] = b"123"
        moves.load(2, [b"b", b"none", b"short", b"a"], [5, 4, 3, 2])
        movers.wait_idle()
        (ended,) = moves.collect()
        assert (ended.moved, ended.failed) == ([b"b", b"a"], [b"none", b"short"])
        assert (bytes(memory[40:]), bytes(memory[16:24])) == (b"B" * 8, b"A" * 8)
        assert not moves.is_busy


def test_a_value_of_another_length_is_replaced_by_the_block_that_is_stored() -> None:
    space = FakeSpace()
    space.values.update({b"short": b"123", b"a": b"12345678"})
    with movers_of(space) as movers:
        moves = BlockMoves(movers, memoryview(bytearray(b"A" * 8 + b"B" * 8)), 8)
        moves.store(1, [b"short", b"a"], [0, 1], [0, 0])
        movers.wait_idle()
        (ended,) = moves.collect()
        assert ended.moved == [b"short", b"a"]
        assert space.values == {b"short": b"A" * 8, b"a": b"12345678"}


def test_failed_jobs_end_with_a_reason() -> None:
    space = FakeSpace()
    with movers_of(space) as movers:
        moves = BlockMoves(movers, memoryview(bytearray(b"full" * 8)), 8)
        moves.store(1, [b"a"], [0], [0])
        moves.store(2, [b"a"], [4], [0])
        moves.load(3, [b"a", b"b"], [0])
        moves.load(4, [b"a"], [-1])
        movers.wait_idle()
        space.error = EngineUnreachable("gone")
        moves.load(5, [b"a"], [0])
        movers.wait_idle()
        found: dict[int, Ended] = {ended.number: ended for ended in moves.collect()}
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert all(ended.failed and not ended.moved for ended in found.values())
    assert (found[1].reason, found[5].reason) == ("no room", "gone")


@contextmanager
def mapped_memfd(size_bytes: int) -> Iterator[tuple[int, mmap.mmap]]:
    descriptor = os.memfd_create("test-region")
    try:
        os.ftruncate(descriptor, size_bytes)
        yield descriptor, mmap.mmap(descriptor, size_bytes)  # unmapped with the last view of it
    finally:
        os.close(descriptor)


def test_blocks_of_lent_memory_are_moved_as_slots_and_into_a_pool() -> None:
    space = FakeSpace()
    with mapped_memfd(6 * 4096) as (descriptor, mapping), movers_of(space) as movers:
        for row in range(6):
            mapping[row * 4096 : (row + 1) * 4096] = bytes([65 + row]) * 4096
        moves = BlockMoves(movers, memoryview(mapping), 4096, descriptor)
        assert moves.is_lent
        moves.store(1, [b"a", b"b"], [0, 5], [3, 4])
        movers.wait_idle()
        assert (space.values, space.depths) == ({b"a": b"A" * 4096, b"b": b"F" * 4096}, {b"a": 3, b"b": 4})
        space.values[b"short"] = b"123"
        moves.load(2, [b"b", b"none", b"short", b"a"], [4, 3, 2, 1])
        moves.load(3, [b"b"], [6])
        movers.wait_idle()
        found = {ended.number: ended for ended in moves.collect()}
        assert (found[2].moved, found[2].failed, found[3].failed) == ([b"b", b"a"], [b"none", b"short"], [b"b"])
        assert (mapping[4 * 4096 : 5 * 4096], mapping[4096:8192]) == (b"F" * 4096, b"A" * 4096)
        assert (space.lent_loads, space.lent_puts) == (1, 2), "nothing was copied through buffers"
        movers.close()
        moves.close()
        moves.close()


def test_memory_that_cannot_be_mapped_once_more_is_copied() -> None:
    space = FakeSpace()
    with mapped_memfd(4096) as (descriptor, _), movers_of(space) as movers:
        moves = BlockMoves(movers, memoryview(bytearray(8192)), 4096, descriptor)
        assert not moves.is_lent, "the file has fewer bytes"
        moves.store(1, [b"a"], [1], [0])
        movers.wait_idle()
        assert (space.values, space.lent_puts) == ({b"a": bytes(4096)}, 0)
        moves.close()


@pytest.mark.parametrize("size", [0, KEYED_VALUE_BYTES_MAX + 1])
def test_a_block_that_no_space_keeps_is_refused_at_the_start(size: int) -> None:
    with movers_of(FakeSpace()) as movers, pytest.raises(InvalidArgument):
        BlockMoves(movers, memoryview(bytearray(8)), size)
