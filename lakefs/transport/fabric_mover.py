"""Moves bytes over a link: pieces of any length, cut into slices, with a bounded number in flight.

Two forms: `Mover` for threads, and `TrioMover`, which posts from a thread and waits in the loop.

Rules kept here:
- When a move has ended, however it ended, nothing of it touches memory any more: every slice was completed, or the link
  was closed.  So memory may be used again behind a failure, a passed deadline and a cancellation, too; but the link is
  gone then, and the next move of this mover raises FabricFailed.
- A link has one move at a time; others wait for it, and their time to wait counts.
- As many slices as the window has room for are posted by one call.
- Completions are looked for a few times, then the link is armed, polled once more, and only then waited for: none is
  missed.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import trio

from lakefs.errors import DeadlineExceeded, FabricFailed
from lakefs.ports import Offload
from lakefs.transport.fabric import SEND_WINDOW, SLICE_BYTES, Link, Piece

_POLLS_BEFORE_A_WAIT: Final = 16
"""Looks for completions before waiting for the descriptor: some 15 us, about what that wait would cost."""


class Mover:
    """Moves pieces over a link; its methods block, and may be called by any thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()

    @property
    def is_broken(self) -> bool:
        """True if the link is broken or closed: another one is needed."""
        return self._link.is_broken

    def move(self, pieces: Sequence[Piece], timeout_s: float, meanwhile: Callable[[int], None] | None = None) -> None:
        """Move all pieces, in their order.

        `meanwhile` is called with the bytes that were moved so far, counted over the pieces in their order, while
        others are still being moved.  It is not called for the last ones: others may use the link by then.
        FabricFailed: one failed, and what was moved is undefined.  DeadlineExceeded.  Both leave the link closed; so
        does any other exception while a slice is in flight.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            raise _late(timeout_s)
        move: _Move | None = None
        try:
            move = _Move(self._link, pieces)
            while move.is_under_way:
                if move.post_and_look() or move.settle_armed():
                    if meanwhile is not None and move.is_under_way:
                        meanwhile(move.moved_bytes)
                    continue
                self._wait(deadline, timeout_s)
        finally:
            if move is not None and (move.in_flight or move.failed):
                self._link.close()
            self._lock.release()

    def _wait(self, deadline: float, timeout_s: float) -> None:
        waiter = select.poll()
        waiter.register(self._link.descriptor, select.POLLIN)
        if not waiter.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise _late(timeout_s)
        self._link.take_events()

    def close(self) -> None:
        """Close the link, when a move under way has ended.  A second call does nothing."""
        with self._lock:
            self._link.close()


class TrioMover:
    """Moves pieces over a link for tasks of one loop; posts and closes through `offload`."""

    def __init__(self, link: Link, offload: Offload) -> None:
        self._link = link
        self._offload = offload
        self._lock = trio.Lock()

    @property
    def is_broken(self) -> bool:
        """True if the link is broken or closed: another one is needed."""
        return self._link.is_broken

    async def move(self, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Move all pieces, in their order; like `Mover.move`.  Cancelled: the link is closed, as behind a failure."""
        with trio.move_on_after(timeout_s) as scope:
            async with self._lock:
                await self._move(pieces)
        if scope.cancelled_caught:
            raise _late(timeout_s)

    async def _move(self, pieces: Sequence[Piece]) -> None:
        move = _Move(self._link, pieces)
        try:
            while move.is_under_way:
                moved = await self._offload.run(move.post_and_look) if move.has_to_post else move.settle()
                if moved or move.settle_armed():
                    continue
                await trio.lowlevel.wait_readable(self._link.descriptor)
                self._link.take_events()
        finally:
            if move.in_flight or move.failed:
                with trio.CancelScope(shield=True):
                    await self._offload.run(self._link.close)

    async def aclose(self) -> None:
        """Close the link, when a move under way has ended; not interruptible.  A second call does nothing."""
        with trio.CancelScope(shield=True):
            async with self._lock:
                await self._offload.run(self._link.close)


class _Move:
    """The slices of one call: those to post, and the number in flight."""

    def __init__(self, link: Link, pieces: Sequence[Piece]) -> None:
        if link.is_broken:
            raise FabricFailed("the link is broken or closed")
        self._link = link
        self._slices = _slices(pieces)
        self._next = next(self._slices, None)
        self._ticket = 0
        self._lengths: deque[int] = deque()
        """Lengths of what is in flight, the oldest first."""
        self.moved_bytes = 0
        self.failed = False

    @property
    def in_flight(self) -> int:
        """Slices that were posted and not completed."""
        return len(self._lengths)

    @property
    def is_under_way(self) -> bool:
        """True until all slices are posted and completed."""
        return self._next is not None or bool(self._lengths)

    @property
    def has_to_post(self) -> bool:
        """True if a slice can be posted now."""
        return self._next is not None and self.in_flight < SEND_WINDOW

    def post_and_look(self) -> bool:
        """Post slices until the window is full, then look for completions; True if any came.  FabricFailed.

        The adapter may move the bytes here.
        """
        batch: list[Piece] = []
        while self._next is not None and self.in_flight + len(batch) < SEND_WINDOW:
            batch.append(self._next)
            self._next = next(self._slices, None)
        if batch:
            self.failed = True  # until it is known what is in flight
            self._link.post(self._ticket, batch)
            self.failed = False
            self._ticket += len(batch)
            self._lengths.extend(piece.length for piece in batch)
        return any(self.settle() for _ in range(_POLLS_BEFORE_A_WAIT))

    def settle(self) -> bool:
        """Count what has completed; return True if anything has, or nothing is in flight.  FabricFailed."""
        completed = self._link.poll()
        for completion in completed:
            if completion.failure:
                self.failed = True
                raise FabricFailed(f"an RDMA operation failed: {completion.failure}")
            assert self._lengths, "a link has one move at a time"
            self.moved_bytes += self._lengths.popleft()
        if not completed and self._link.is_broken:
            raise FabricFailed("the link was closed in the middle of a move")
        return bool(completed) or not self.in_flight

    def settle_armed(self) -> bool:
        """Arm the link, then settle once more; False: wait for the descriptor."""
        self._link.arm()
        return self.settle()


def _slices(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        if 0 < piece.length <= SLICE_BYTES:
            yield piece
            continue
        for done in range(0, piece.length, SLICE_BYTES):
            yield piece._replace(
                offset=piece.offset + done,
                remote_address=piece.remote_address + done,
                length=min(SLICE_BYTES, piece.length - done),
            )


def _late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"an RDMA transfer did not end within {timeout_s:g} s")
