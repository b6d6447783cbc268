"""The native ring of io_uring, and what happens where the kernel refuses it."""

from __future__ import annotations

import errno
import gc
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from engine.host.io_queue import SWITCHED_OFF, OffloadQueue, open_io_queue, opened_ring, running_ring_queue
from engine.host.local_disk import LocalDisk
from lakefs.errors import LakeError
from lakefs.host.offload import InlineOffload
from lakefs.ports import FileRead

_ring = pytest.importorskip("engine.host._io_uring", reason="engine.host._io_uring is not built here")

WRITING = (2, 3, 5, 17, 23)
"""WRITEV, FSYNC, WRITE_FIXED, FALLOCATE and WRITE of the kernel, which only reads are asked of."""


@pytest.fixture(params=[False, True], ids=["newest", "as on Linux 5.6"])
def ring(request: pytest.FixtureRequest) -> Iterator[Any]:
    if isinstance(opened := opened_ring(4), str):
        pytest.skip(opened)
    opened.close()
    made = _ring.Ring(4, plain=request.param)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"0123456789")
    yield descriptor
    os.close(descriptor)


def batch_of(*operations: tuple[int, int, Any, int]) -> Any:
    batch = _ring.Batch(len(operations))
    for operation in operations:
        batch.add(*operation)
    return batch


class _Place:
    """A file object, of which the ring only calls `fileno`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


def ended(ring: Any, batch: Any) -> list[int]:
    """Submit a batch, wait for it, and return its results."""
    assert ring.submit(batch) == batch.count
    ring.wait(batch.count)
    assert ring.reap() == [batch]
    assert batch.pending == ring.in_flight == 0
    results: list[int] = batch.results()
    return results


def test_reads_answer_with_their_counts(ring: Any, file: int) -> None:
    found = bytearray(4)
    os.pwrite(file, b"abcd", 2)
    read = batch_of((_ring.NOP, -1, None, 0), (_ring.READ, file, found, 1))
    assert ended(ring, read) == [0, 4]
    assert read.are_whole() == [True, True]
    assert found == b"1abc"
    assert ring.reap() == []


def test_one_memory_is_filled_from_many_places(ring: Any, file: int) -> None:
    memory = bytearray(b"........")
    batch = _ring.Batch(4)
    batch.add_reads([(_Place(file), 7, 2), (_Place(file), 9, 3), (_Place((1 << 31) - 1), 0, 1)], memory)
    with pytest.raises(BufferError):
        memory.append(0)
    assert ended(ring, batch) == [2, 1, -errno.EBADF]
    assert batch.are_whole() == [True, False, False]
    assert memory == b"789....."
    memory.append(0)


def test_no_more_is_taken_than_the_ring_has_room_for(ring: Any, file: int) -> None:
    buffers = [bytearray(1) for _ in range(10)]
    batch = batch_of(*((_ring.READ, file, buffer, index) for index, buffer in enumerate(buffers)))
    taken = 0
    told: list[Any] = []
    while not told:
        done = batch.count - batch.pending
        taken += ring.submit(batch)
        assert batch.submitted == taken <= done + 4
        assert ring.in_flight <= ring.entries == 4
        ring.wait(1)
        told = ring.reap()
    assert told == [batch]
    assert batch.results() == [1] * 10
    assert b"".join(buffers) == b"0123456789"
    assert ring.submit(batch) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_held_until_its_completion_is_taken(ring: Any, file: int, packed: bool) -> None:
    memory = bytearray(4)
    if packed:
        batch = _ring.Batch(1)
        batch.add_reads([(_Place(file), 0, 4)], memory)
    else:
        batch = batch_of((_ring.READ, file, memory, 0))
    ring.submit(batch)
    with pytest.raises(BufferError):
        memory.append(1)
    ring.wait(1)
    ring.reap()
    memory.append(1)


def test_what_the_caller_drops_lives_until_its_completion_is_taken(ring: Any) -> None:
    gone: list[bool] = []

    class Owner:
        def __del__(self) -> None:
            gone.append(True)

    inlet, outlet = os.pipe()
    batch = batch_of((_ring.READ, inlet, bytearray(1 << 20), 0))  # a read that has to wait
    batch.task = Owner()
    ring.submit(batch)
    del batch
    gc.collect()
    assert not gone
    assert ring.in_flight == 1
    os.write(outlet, b"x")
    ring.wait(1)
    assert [batch.results() for batch in ring.reap()] == [[1]]
    gc.collect()
    assert gone
    os.close(inlet)
    os.close(outlet)


def test_what_is_given_up_is_not_waited_for(ring: Any, file: int) -> None:
    buffers = [bytearray(1) for _ in range(6)]
    batch = batch_of(*((_ring.READ, file, buffer, index) for index, buffer in enumerate(buffers)))
    assert ring.submit(batch) == 4
    assert not batch.give_up()
    ring.wait(4)
    assert ring.reap() == [batch]
    assert batch.results() == [1, 1, 1, 1, -errno.ECANCELED, -errno.ECANCELED]
    for buffer in buffers:
        buffer.append(0)
    unsent = batch_of((_ring.READ, file, buffers[0], 0))
    assert unsent.give_up()
    assert ring.submit(unsent) == 0
    buffers[0].append(0)


def test_the_eventfd_tells_of_what_completes_after_the_submission(ring: Any) -> None:
    inlet, outlet = os.pipe()
    poll = select.poll()
    poll.register(ring.eventfd(), select.POLLIN)
    for _ in range(3):
        batch = batch_of((_ring.READ, inlet, bytearray(1), 0))
        ring.submit(batch)
        assert ring.reap() == []
        assert poll.poll(0) == []
        os.write(outlet, b"x")
        assert poll.poll(10_000)
        os.read(ring.eventfd(), 8)
        assert ring.reap() == [batch]
        assert batch.results() == [1]
        while poll.poll(0):
            os.read(ring.eventfd(), 8)
    os.close(inlet)
    os.close(outlet)


def test_what_completes_with_the_submission_wakes_nobody(file: int) -> None:
    ring = _ring.Ring(4)
    batch = batch_of((_ring.READ, file, bytearray(1), 0), (_ring.READ, file, bytearray(1), 0))
    ring.submit(batch)
    assert ring.reap() == [batch]
    assert select.select([ring.eventfd()], [], [], 0)[0] == []
    ring.close()


def test_a_bad_descriptor_is_the_answer_of_its_operation(ring: Any, file: int) -> None:
    found = bytearray(1)
    batch = batch_of((_ring.READ, (1 << 31) - 1, bytearray(1), 0), (_ring.READ, file, found, 3))
    assert ended(ring, batch) == [-errno.EBADF, 1]
    assert found == b"3"


def test_what_is_no_operation_is_not_added(ring: Any, file: int) -> None:
    good = bytearray(1)
    batch = _ring.Batch(2)
    for bad in [
        (_ring.READ, file, b"read-only", 0),
        (99, file, bytearray(1), 0),
        *((opcode, file, bytearray(1), 0) for opcode in WRITING),
        (_ring.READ, file),
        (_ring.READ, file, None, 0),
        (_ring.READ, file, bytearray(1), -1),
    ]:
        with pytest.raises((TypeError, ValueError, BufferError, OverflowError)):
            batch.add(*bad)
        assert batch.count == batch.pending == 0
    for places in ([(_Place(file), 0, 2)], [(_Place(file), 0, 0)], [(_Place(file), -1, 1)], [(file, 0, 1)]):
        with pytest.raises((TypeError, ValueError, OverflowError, AttributeError)):
            _ring.Batch(1).add_reads(places, good)
        good.append(0)
        del good[1:]
    batch.add(_ring.READ, file, good, 0)
    batch.add(_ring.READ, file, good, 1)
    with pytest.raises(ValueError, match="no more"):
        batch.add(_ring.READ, file, good, 2)
    assert ended(ring, batch) == [1, 1]


def test_a_closed_ring_is_not_used_and_may_be_closed_again(ring: Any, file: int) -> None:
    ring.submit(batch_of((_ring.READ, file, bytearray(1), 0)))
    ring.close()
    ring.close()
    for use in (ring.reap, ring.eventfd, lambda: ring.submit(_ring.Batch(1)), lambda: ring.wait(0)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_closing_waits_for_what_is_in_flight(ring: Any, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    descriptor = os.open(tmp_path / "large", os.O_RDONLY)
    buffers = [bytearray(b"x") * (1 << 18) for _ in range(4)]
    ring.submit(batch_of(*((_ring.READ, descriptor, buffer, at << 18) for at, buffer in enumerate(buffers))))
    ring.close()
    assert all(not any(buffer) for buffer in buffers)
    os.close(descriptor)


class _Refusing:
    """A ring that takes one submission and no more."""

    def __init__(self, ring: Any) -> None:
        self._ring = ring
        self._refuses = False

    def submit(self, batch: Any) -> int:
        if self._refuses:
            raise OSError(errno.EPERM, "planted")
        self._refuses = True
        taken: int = self._ring.submit(batch)
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def test_when_the_kernel_refuses_under_way_the_other_queue_reads_the_rest(ring: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    file = LocalDisk(tmp_path).open("f", read_only=True)

    async def main() -> None:
        threads = OffloadQueue(InlineOffload())
        async with running_ring_queue(cast(Any, _Refusing(ring)), threads) as queue:
            for _ in range(2):
                buffers = [bytearray(1) for _ in range(10)]
                reads = [FileRead(file, memoryview(buffer), at) for at, buffer in enumerate(buffers)]
                told: list[int | LakeError] = await queue.read_many(reads)
                assert told == [1] * 10
                assert b"".join(buffers) == b"0123456789"
            memory = memoryview(bytearray(3))
            assert await queue.read_packed([(file, 8, 2), (file, 0, 1)], memory) == [True, True]
            assert bytes(memory) == b"890"
            assert queue.kind == "threads"
            assert "planted" in queue.reason

    trio.run(main)
    file.close()


class _Unheard:
    """A ring whose completions arrive a second late, and without an event."""

    def __init__(self, ring: Any) -> None:
        self._ring = ring
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._heard_at = trio.current_time() + 1

    def eventfd(self) -> int:
        return self._event

    def reap(self) -> list[Any]:
        return self._ring.reap() if trio.current_time() >= self._heard_at else []

    def close(self) -> None:
        os.close(self._event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def test_a_completion_that_no_event_told_of_is_taken_all_the_same(ring: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    file = LocalDisk(tmp_path).open("f", read_only=True)
    buffer = bytearray(3)

    async def main() -> None:
        async with running_ring_queue(cast(Any, _Unheard(ring)), OffloadQueue(InlineOffload())) as queue:
            assert await queue.read_many([FileRead(file, memoryview(buffer), 0)]) == [3]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert buffer == b"abc"
    file.close()


def queue_here(*, wanted: bool = True) -> tuple[str, str]:
    async def main() -> tuple[str, str]:
        async with open_io_queue(InlineOffload(), wanted=wanted) as queue:
            return queue.kind, queue.reason

    return trio.run(main)


def test_a_refusal_at_the_start_is_told_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(entries: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(_ring, "Ring", refuse)
    kind, reason = queue_here()
    assert kind == "threads"
    assert "Operation not permitted" in reason
    assert "io_uring_disabled" in reason


def test_without_the_native_module_threads_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.host.io_queue._RING_IS_BUILT", False)
    kind, reason = queue_here()
    assert kind == "threads"
    assert "engine.host._io_uring" in reason


def test_it_can_be_switched_off() -> None:
    assert queue_here(wanted=False) == ("threads", SWITCHED_OFF)


@pytest.mark.parametrize(("refused", "code"), [(425, errno.EPERM), (426, errno.EPERM), (425, errno.ENOSYS)])
def test_a_filter_of_system_calls_leaves_threads(refused: int, code: int) -> None:
    program = f"""
        import ctypes, struct
        LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
        steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, {refused}), (RETURN, 0, 0, 0x00050000 | {code})]
        steps.append((RETURN, 0, 0, 0x7FFF0000))
        code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
        libc = ctypes.CDLL(None, use_errno=True)
        program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code)))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, program, 0, 0) == 0
        from engine.host.io_queue import opened_ring
        print(opened_ring())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "refuses io_uring" in done.stdout
    assert os.strerror(code) in done.stdout
