"""The ring itself, and what happens where the kernel refuses it."""

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

from engine.disk import LocalDisk
from engine.io_queue import SWITCHED_OFF, OffloadQueue, open_io_queue
from engine.ring import opened_ring, running_ring_queue
from lakefs.errors import LakeError
from lakefs.offload import InlineOffload
from lakefs.ports import FileRead

_ring = pytest.importorskip("engine._ring", reason="engine._ring is not built here")


@pytest.fixture
def ring() -> Iterator[Any]:
    opened = opened_ring(4)
    if isinstance(opened, str):
        pytest.skip(opened)
    yield opened
    opened.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"0123456789")
    yield descriptor
    os.close(descriptor)


def test_reads_writes_and_syncs_answer_with_their_token_and_count(ring: Any, file: int) -> None:
    found = bytearray(4)
    assert ring.submit("w", [(_ring.WRITE, file, b"abcd", 2)]) == 1
    ring.wait(1)
    assert ring.reap() == [("w", 0, 4)]
    assert ring.submit("s", [(_ring.SYNC_DATA, file, None, 0), (_ring.READ, file, found, 1)]) == 2
    ring.wait(2)
    assert sorted(ring.reap()) == [("s", 0, 0), ("s", 1, 4)]
    assert found == b"1abc"
    assert ring.reap() == []


def test_no_more_is_taken_than_the_ring_has_room_for(ring: Any, file: int) -> None:
    reads = [(_ring.READ, file, bytearray(1), index) for index in range(10)]
    taken, done = 0, 0
    while done < 10:
        taken += ring.submit("r", reads, taken)
        assert ring.in_flight <= ring.entries == 4
        assert taken <= done + 4
        ring.wait(1)
        done += len(ring.reap())
    assert b"".join(bytes(read[2]) for read in reads) == b"0123456789"
    assert ring.submit("r", reads, 10) == 0


def test_a_buffer_is_held_until_its_completion_is_taken(ring: Any, file: int) -> None:
    buffer = bytearray(4)
    ring.submit(None, [(_ring.READ, file, buffer, 0)])
    with pytest.raises(BufferError):
        buffer.append(1)
    ring.wait(1)
    ring.reap()
    buffer.append(1)


def test_what_the_caller_drops_lives_until_its_completion_is_taken(ring: Any) -> None:
    gone: list[bool] = []

    class Token:
        def __del__(self) -> None:
            gone.append(True)

    inlet, outlet = os.pipe()
    ring.submit(Token(), [(_ring.READ, inlet, bytearray(1 << 20), 0)])  # nothing comes yet
    gc.collect()
    assert not gone
    assert ring.in_flight == 1
    os.write(outlet, b"x")
    ring.wait(1)
    assert [result for _, _, result in ring.reap()] == [1]
    gc.collect()
    assert gone
    os.close(inlet)
    os.close(outlet)


def test_the_eventfd_tells_of_what_completes_after_the_submission(ring: Any) -> None:
    inlet, outlet = os.pipe()
    ring.submit("pipe", [(_ring.READ, inlet, bytearray(1), 0)])
    assert ring.reap() == []
    poll = select.poll()
    poll.register(ring.eventfd(), select.POLLIN)
    assert poll.poll(0) == []
    os.write(outlet, b"x")
    assert poll.poll(10_000)
    assert ring.reap() == [("pipe", 0, 1)]
    os.close(inlet)
    os.close(outlet)


def test_a_bad_descriptor_is_the_answer_of_its_operation(ring: Any, file: int) -> None:
    found = bytearray(1)
    ring.submit("r", [(_ring.READ, (1 << 31) - 1, bytearray(1), 0), (_ring.READ, file, found, 3)])
    ring.wait(2)
    assert sorted(ring.reap()) == [("r", 0, -errno.EBADF), ("r", 1, 1)]


def test_what_is_no_operation_hands_nothing_over(ring: Any, file: int) -> None:
    good = bytearray(1)
    for bad in [
        (_ring.READ, file, b"read-only", 0),
        (99, file, bytearray(1), 0),
        (_ring.READ, file),
        (_ring.READ, file, None, 0),
        (_ring.READ, file, bytearray(1), -1),
        "four",
    ]:
        with pytest.raises((TypeError, ValueError, BufferError, OverflowError)):
            ring.submit("bad", [(_ring.READ, file, good, 0), bad])
        assert ring.in_flight == 0
        good.append(0)
    ring.submit("good", [(_ring.READ, file, good, 0)] * 4)
    ring.wait(4)
    assert len(ring.reap()) == 4


def test_a_closed_ring_is_not_used_and_may_be_closed_again(ring: Any, file: int) -> None:
    ring.submit(None, [(_ring.READ, file, bytearray(1), 0)])
    ring.close()
    ring.close()
    for use in (ring.reap, ring.eventfd, lambda: ring.submit(None, []), lambda: ring.wait(0)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_closing_waits_for_what_is_in_flight(ring: Any, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    descriptor = os.open(tmp_path / "large", os.O_RDONLY)
    buffers = [bytearray(b"x") * (1 << 18) for _ in range(4)]
    ring.submit(None, [(_ring.READ, descriptor, buffer, at << 18) for at, buffer in enumerate(buffers)])
    ring.close()
    assert all(not any(buffer) for buffer in buffers)
    os.close(descriptor)


class _Refusing:
    """A ring that stops taking anything after so many operations."""

    def __init__(self, ring: Any, count: int) -> None:
        self._ring = ring
        self._left = count

    def submit(self, token: object, operations: Any, first: int = 0) -> int:
        if not self._left:
            raise OSError(errno.EPERM, "planted")
        end = first + self._left
        taken: int = self._ring.submit(token, operations[:end], first)
        self._left -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def test_when_the_kernel_refuses_under_way_the_other_queue_reads_the_rest(ring: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    file = LocalDisk(tmp_path).open("f", read_only=True)

    async def main() -> None:
        threads = OffloadQueue(InlineOffload())
        async with running_ring_queue(cast(Any, _Refusing(ring, 3)), threads) as queue:
            for _ in range(2):
                buffers = [bytearray(1) for _ in range(10)]
                reads = [FileRead(file, memoryview(buffer), at) for at, buffer in enumerate(buffers)]
                told: list[int | LakeError] = await queue.read_many(reads)
                assert told == [1] * 10
                assert b"".join(buffers) == b"0123456789"
            assert queue.kind == "threads"
            assert "planted" in queue.reason

    trio.run(main)
    file.close()


class _Unheard:
    """A ring whose completions come a second late, and without an event."""

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
    monkeypatch.setattr("engine.ring._RING_IS_BUILT", False)
    kind, reason = queue_here()
    assert kind == "threads"
    assert "engine._ring" in reason


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
        from engine.ring import opened_ring
        print(opened_ring())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "refuses io_uring" in done.stdout
    assert os.strerror(code) in done.stdout
