"""Memory for the content of streamed answers: bounded, shared fairly among clients, and warm.

An answer's content lies in this memory from the read until the socket has taken its last byte.  Memory that was just
used is used again first: its pages are allocated already, and partly in the processor's cache.

Rules kept here:
- A client holds at most `client_bytes`, or one answer: it gets memory for the next when earlier ones have been sent.
  So a client that does not take its answers holds about as much as its socket's buffer does.
- All clients together hold at most `total_bytes`, or one answer.  Where that is short, clients get memory in turn.
- Each client's answers get memory in the order in which they ask.
- At most `kept_bytes` are kept for reuse; that not used for longest is given back first.

Contents are not cleared between answers.  Used on the loop.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import outcome
import trio

from lakefs.limits import ANSWER_CLIENT_BYTES, ANSWER_KEPT_BYTES, ANSWER_MEMORY_BYTES, BODY_BYTES_MAX

_UNIT_BYTES: Final = 128 << 10
"""Memory has this length, or twice, four times ... as much, so that it fits the next answer."""


class AnswerBuffer:
    """Memory of one answer.  `release` exactly once; `view` must not be touched afterwards."""

    __slots__ = ("_memory", "_of", "_owner", "view")

    def __init__(self, owner: AnswerMemory, of: _Client, memory: memoryview, size_bytes: int) -> None:
        self._owner = owner
        self._of = of
        self._memory: memoryview | None = memory
        self.view = memory[:size_bytes]
        """The memory: writable, as long as asked for."""

    def release(self) -> None:
        """Give the memory back."""
        memory, self._memory = self._memory, None
        assert memory is not None, "the memory was released twice"
        self._owner._take_back(self._of, memory)


@dataclass(eq=False)
class _Client:
    """A client: the bytes that it holds, and its tasks that wait, with the length that each needs."""

    key: Hashable
    held_bytes: int = 0
    waiting: deque[tuple[trio.lowlevel.Task, int]] = field(default_factory=deque)
    in_turn: bool = False
    """It is in the queue of clients for which only the memory of all is short."""


class AnswerMemory:
    """The memory of one engine's streamed answers."""

    def __init__(
        self,
        *,
        client_bytes: int = ANSWER_CLIENT_BYTES,
        total_bytes: int = ANSWER_MEMORY_BYTES,
        kept_bytes: int = ANSWER_KEPT_BYTES,
    ) -> None:
        self._client_bytes = client_bytes
        self._total_bytes = total_bytes
        self._kept_bytes_max = kept_bytes
        self._clients: dict[Hashable, _Client] = {}
        """Clients that hold memory or wait for it."""
        self._turns: deque[_Client] = deque()
        self._kept: list[memoryview] = []
        """Free memory, the last used at the end."""
        self.kept_bytes = 0
        """Bytes kept for reuse."""
        self.held_bytes = 0
        """Bytes of all answers that are being read or sent."""

    @property
    def waiting(self) -> int:
        """Tasks that wait for memory."""
        return sum(len(client.waiting) for client in self._clients.values())

    async def take(self, client: Hashable, size_bytes: int) -> AnswerBuffer:
        """Return memory for an answer to this client; waits while too much is held.  Cancelled: nothing is taken.

        MemoryError or OSError if the system has none.
        """
        of, needed = await self._reserved(client, size_bytes)
        try:
            memory = self._memory(needed)
        except BaseException:
            self._give_back(of, needed)
            raise
        return AnswerBuffer(self, of, memory, size_bytes)

    async def room(self, client: Hashable, size_bytes: int) -> Callable[[], None]:
        """Like `take`, for an answer whose memory the caller has; returns what gives the room back, called once."""
        of, needed = await self._reserved(client, size_bytes)
        return partial(self._give_back, of, needed)

    async def _reserved(self, client: Hashable, size_bytes: int) -> tuple[_Client, int]:
        """Reserve room for an answer; return whose it is, and its length."""
        assert 0 < size_bytes <= BODY_BYTES_MAX, "an answer has a limit"
        await trio.lowlevel.checkpoint_if_cancelled()
        needed = _UNIT_BYTES << (-(-size_bytes // _UNIT_BYTES) - 1).bit_length()
        of = self._clients.get(client)
        if of is None:
            of = self._clients[client] = _Client(client)
        if of.waiting or self._turns or not self._is_due(of, needed) or not self._has_room(needed):
            await self._wait(of, needed)
        else:
            self._reserve(of, needed)
        return of, needed

    async def _wait(self, of: _Client, needed: int) -> None:
        """Wait until `needed` bytes are reserved."""
        entry = trio.lowlevel.current_task(), needed
        of.waiting.append(entry)
        self._queue(of)

        def leave(raise_cancel: object) -> trio.lowlevel.Abort:
            of.waiting.remove(entry)
            if of.in_turn:  # the next of this client may need more than it may have now
                self._turns.remove(of)
                of.in_turn = False
            self._go_on(of)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)

    def _is_due(self, of: _Client, needed: int) -> bool:
        return not of.held_bytes or of.held_bytes + needed <= self._client_bytes

    def _has_room(self, needed: int) -> bool:
        return not self.held_bytes or self.held_bytes + needed <= self._total_bytes

    def _reserve(self, of: _Client, needed: int) -> None:
        of.held_bytes += needed
        self.held_bytes += needed

    def _take_back(self, of: _Client, memory: memoryview) -> None:
        self._kept.append(memory)
        self.kept_bytes += len(memory)
        while self.kept_bytes > self._kept_bytes_max:
            self.kept_bytes -= len(self._kept.pop(0))
        self._give_back(of, len(memory))

    def _give_back(self, of: _Client, needed: int) -> None:
        of.held_bytes -= needed
        self.held_bytes -= needed
        assert self.held_bytes >= of.held_bytes >= 0
        self._go_on(of)

    def _go_on(self, of: _Client) -> None:
        """Wake the tasks that may go on, after a change of this client's."""
        self._queue(of)
        while self._turns:
            first = self._turns[0]
            task, needed = first.waiting[0]
            if not self._has_room(needed):
                break
            self._turns.popleft()
            first.in_turn = False
            first.waiting.popleft()
            self._reserve(first, needed)
            trio.lowlevel.reschedule(task, outcome.Value(None))
            self._queue(first)
        if not of.held_bytes and not of.waiting:
            self._clients.pop(of.key, None)

    def _queue(self, of: _Client) -> None:
        """Give the client a turn if its first task waits for nothing but the memory of all."""
        if of.waiting and not of.in_turn and self._is_due(of, of.waiting[0][1]):
            self._turns.append(of)
            of.in_turn = True

    def _memory(self, needed: int) -> memoryview:
        for index in range(len(self._kept) - 1, -1, -1):
            if len(self._kept[index]) == needed:
                self.kept_bytes -= needed
                return self._kept.pop(index)
        return memoryview(mmap.mmap(-1, needed))
