"""Queue pairs give the library exactly what was asked for, in one call, while other threads run.

The library is replaced by functions that read the memory which they are given, as its own do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from typing import Any

import pytest

from lakefs.transport import queue_pair
from lakefs.transport.queue_pair import READ, WRITE, QueuePair, Request
from lakefs.transport.verbs import VerbsError

WINDOW = 8
POST = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
POLL = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
NOTIFY = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)


class FakeContext:
    """An adapter whose functions are the test's; also the library, and the protection domain."""

    def __init__(self, post: Any = None, poll: Any = None, notify: Any = None, refuses: str = "") -> None:
        self.verbs = self.context = self
        self.descriptor, self._other = os.pipe()
        self._refuses = refuses
        self._memory = (c_uint64 * 64)()
        self._channel = (c_uint64 * 2)(0, self.descriptor)
        self._pair = (c_uint64 * 20)()
        c_uint32.from_address(ctypes.addressof(self._pair) + queue_pair.PAIR_NUMBER).value = 77
        self.address = ctypes.addressof(self._memory)
        self.ended_ones: list[str] = []
        self.functions = (POST(post or self._nothing), POLL(poll or self._nothing), NOTIFY(notify or self._nothing))
        for place, function in zip((queue_pair.OP_POST, queue_pair.OP_POLL, queue_pair.OP_NOTIFY), self.functions,
                                   strict=True):  # fmt: skip
            self.set(place, ctypes.cast(function, c_void_p).value or 0)

    @staticmethod
    def _nothing(*_: object) -> int:
        return 0

    def set(self, place: int, function: int) -> None:
        c_uint64.from_address(self.address + place).value = function

    def made(self, name: str, *_: object) -> int:
        if name == self._refuses:
            raise VerbsError(f"{name}: Cannot allocate memory")
        made = self._channel if name == "ibv_create_comp_channel" else self._pair
        return ctypes.addressof(made)

    def ended(self, name: str, address: int) -> None:
        assert address
        self.ended_ones.append(name)

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._other)


def pair_of(context: Any) -> QueuePair:
    return QueuePair(context, WINDOW)


def requests(count: int) -> list[Request]:
    return [
        Request((1 << 64) - 1 - at, WRITE if at % 2 else READ, 0x7000_0000_0000 + at, 1 + at, 3 * at, (1 << 63) + at,
                (1 << 32) - 1 - at)
        for at in range(count)
    ]  # fmt: skip


def chain(first: int) -> list[tuple[Request, int, int, int, int]]:
    """Read a chain of work requests as C does: with its own places, count of pieces and flags."""
    found: list[tuple[Request, int, int, int, int]] = []
    at: int | None = first
    while at:
        assert len(found) < WINDOW, "the chain has no end"
        ticket, following, pieces = (c_uint64 * 3).from_address(at)
        count, operation, flags = (c_uint32 * 3).from_address(at + 24)
        remote_address = c_uint64.from_address(at + 40).value
        remote_key = c_uint32.from_address(at + 48).value
        assert pieces, "a work request without memory"
        address = c_uint64.from_address(pieces).value
        length, local_key = (c_uint32 * 2).from_address(pieces + 8)
        found.append((Request(ticket, operation, address, length, local_key, remote_address, remote_key), count, flags,
                      at, following))  # fmt: skip
        at = following
    return found


@pytest.mark.parametrize("counts", [[1], [WINDOW], [WINDOW, 1, 3]])
def test_requests_are_one_chain_of_the_library_s_structures(counts: list[int]) -> None:
    seen: list[list[Request]] = []

    def post(pair: int, works: int, refused: int) -> int:
        assert pair
        assert refused
        found = chain(works)
        assert all((pieces, flags) == (1, 2) for _, pieces, flags, _, _ in found)
        seen.append([request for request, *_ in found])
        return 0

    context = FakeContext(post)
    pair = pair_of(context)
    assert (pair.number, pair.descriptor) == (77, context.descriptor)
    for count in counts:
        assert pair.post(requests(count)) == (count, "")
    assert seen == [requests(count) for count in counts]
    context.close()


@pytest.mark.parametrize("good", [0, 1, 5])
def test_the_first_request_that_was_refused_is_known(good: int) -> None:
    def post(_: int, works: int, refused: int) -> int:
        c_uint64.from_address(refused).value = chain(works)[good][3]
        return errno.ENOMEM

    context = FakeContext(post)
    assert pair_of(context).post(requests(6)) == (good, os.strerror(errno.ENOMEM))
    context.close()


def test_other_threads_run_while_the_library_posts() -> None:
    """The library's function is sem_timedwait, on a semaphore that a thread of Python sets free."""
    semaphore = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    assert libc.sem_init(semaphore, 0, 0) == 0
    context = FakeContext()
    context.set(queue_pair.OP_POST, ctypes.cast(libc.sem_timedwait, c_void_p).value or 0)
    pair = pair_of(context)
    pair._pair = ctypes.addressof(semaphore)
    deadline = int(time.time()) + 20  # a work request begins with its ticket, and 0 if it is alone: a struct timespec
    other = threading.Timer(0.05, lambda: libc.sem_post(semaphore))
    other.start()
    begin = time.monotonic()
    assert pair.post([Request(deadline, READ, 1, 1, 1, 1, 1)]) == (1, "")
    assert time.monotonic() - begin < 15
    other.join()
    context.close()


def answering(count: int, written: bytes) -> Callable[[int, int, int], int]:
    def poll(queue: int, room: int, found: int) -> int:
        assert queue
        assert room == WINDOW
        ctypes.memmove(found, written, len(written))
        return count

    return poll


def test_completions_are_those_that_the_library_wrote() -> None:
    written = b"".join(
        ticket.to_bytes(8, "little") + status.to_bytes(4, "little") + b"\xee" * 36
        for ticket, status in [((1 << 64) - 1, 0), (7, 12), (8, 5)]
    )
    context = FakeContext(poll=answering(3, written))
    assert pair_of(context).poll() == [((1 << 64) - 1, 0), (7, 12), (8, 5)]
    context.close()


def test_failures_of_the_library_have_its_reason() -> None:
    context = FakeContext(poll=lambda *_: -errno.EIO, notify=lambda *_: errno.EBADF)
    pair = pair_of(context)
    with pytest.raises(VerbsError, match=f"ibv_poll_cq: {os.strerror(errno.EIO)}"):
        pair.poll()
    with pytest.raises(VerbsError, match=os.strerror(errno.EBADF)):
        pair.arm()
    pair.close()
    assert context.ended_ones == ["ibv_destroy_qp", "ibv_destroy_cq", "ibv_destroy_comp_channel"]
    context.close()


@pytest.mark.parametrize(
    ("refused", "ended"),
    [
        ("ibv_create_comp_channel", []),
        ("ibv_create_cq", ["ibv_destroy_comp_channel"]),
        ("ibv_create_qp", ["ibv_destroy_cq", "ibv_destroy_comp_channel"]),
    ],
)
def test_what_was_made_before_a_refusal_is_ended(refused: str, ended: list[str]) -> None:
    context = FakeContext(refuses=refused)
    with pytest.raises(VerbsError, match=refused):
        pair_of(context)
    assert context.ended_ones == ended
    context.close()
