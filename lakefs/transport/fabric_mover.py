"""Moves bytes over a link: pieces of any length, cut into slices, with a bounded number in flight.

Two forms: `Mover` for threads, and `TrioMover`, which posts from a thread and waits in the loop.

Rules kept here:
- When a move has ended, however it ended, nothing of it touches memory any more: every slice was completed, or the link
  was closed.  So memory may be used again behind a failure, a passed deadline and a cancellation, too; but the link is
  gone then, and the next move of this mover raises FabricFailed.
- A link has one move at a time; others wait for it, and their time to wait counts.
- Completions are looked for a few times, then the link is armed, polled once more, and only then waited for: none is
  missed.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import trio

from lakefs.errors import DeadlineExceeded, FabricFailed
from lakefs.ports import Offload
from lakefs.transport.fabric import SEND_WINDOW, SLICE_BYTES, Link, Region

_POLLS_BEFORE_A_WAIT: Final = 16
"""Looks for completions before waiting for the descriptor: some 15 us, about what that wait would cost."""


class Piece(NamedTuple):
    """One range to move: by READ from the peer into the region, or with `is_write` by WRITE from there to the peer."""

    region: Region
    offset: int
    remote_address: int
    remote_key: int
    length: int
    is_write: bool = False


class Mover:
    """Moves pieces over a link; its methods block, and may be called by any thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()

    @property
    def is_broken(self) -> bool:
        """True if the link is broken or closed: another one is needed."""
        return self._link.is_broken

    def move(self, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Move all pieces, in their order.

        FabricFailed: one failed, and what was moved is undefined.  DeadlineExceeded.  Both leave the link closed; so
        does any other exception behind the first post.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            raise _late(timeout_s)
        move: _Move | None = None
        try:
            move = _Move(self._link, pieces)
            waiter = select.poll()
            waiter.register(self._link.descriptor, select.POLLIN)
            while move.is_under_way:
                if move.post_and_look() or move.settle_armed():
                    continue
                if not waiter.poll(max(deadline - time.monotonic(), 0) * 1000):
                    raise _late(timeout_s)
                self._link.take_events()
        finally:
            if move is not None and (move.in_flight or move.failed):
                self._link.close()
            self._lock.release()

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
                if await self._offload.run(move.post_and_look) or move.settle_armed():
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
        self.in_flight = 0
        self.failed = False

    @property
    def is_under_way(self) -> bool:
        """True until all slices are posted and completed."""
        return self._next is not None or self.in_flight > 0

    def post_and_look(self) -> bool:
        """Post slices until the window is full, then look for completions; True if any came.  FabricFailed.

        The adapter may move the bytes here.
        """
        while self._next is not None and self.in_flight < SEND_WINDOW:
            piece = self._next
            begin = self._link.post_write if piece.is_write else self._link.post_read
            self._ticket += 1
            begin(self._ticket, piece.region, piece.offset, piece.remote_address, piece.remote_key, piece.length)
            self.in_flight += 1
            self._next = next(self._slices, None)
        return any(self.settle() for _ in range(_POLLS_BEFORE_A_WAIT))

    def settle(self) -> bool:
        """Count what has completed; return True if anything has, or nothing is in flight.  FabricFailed."""
        completed = self._link.poll()
        self.in_flight -= len(completed)
        for completion in completed:
            if completion.failure:
                self.failed = True
                raise FabricFailed(f"an RDMA operation failed: {completion.failure}")
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
