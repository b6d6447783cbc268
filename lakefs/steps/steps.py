"""Steps: put, get and the other operations, written once as generators that any client can drive.

An operation is a generator.  It yields `Start(effect)` and is sent a ticket at once; it yields `Wait(ticket)` and is
sent the effect's result, or has its exception thrown in.  An effect is a request to the engine (`Send`) or a blocking
or CPU-heavy call in the client itself (`Work`), which drivers run in threads.  Three drivers exist: the blocking
client, the trio client, and the trio client over an embedded engine.

Rules kept here:
- An operation never blocks and never touches trio or sockets.
- When an operation ends, by return or raise, its driver waits for all `Work` still running and forgets `Send`s.
- A cancellation is not delivered between a request that takes something of the engine (`takes`) and its answer, so
  that the operation can give it back.
- `Pipeline` keeps at most `window` effects in flight and completes them in the order they were started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from lakefs.errors import LakeError
from lakefs.ids import Buffer
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    KeyedMatch,
    LendMemory,
    OpenKeyedIndex,
    OpenObjects,
    OpenSegments,
    OpenSharedIndex,
    OpenSlabs,
    OpenStamps,
    PinChunks,
    Request,
    SessionOpen,
    SourceOpen,
)

T = TypeVar("T")
Ticket = object


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to the engine.  `into`: memory for the reply's body (exactly as long as the body will be)."""

    request: Request
    body: Sequence[Buffer] = ()
    descriptors: Sequence[int] = ()
    into: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """Run a blocking or CPU-heavy call in a thread."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()


Effect = Send | Work


_TAKING: Final = (
    SessionOpen,
    SourceOpen,
    LendMemory,
    OpenKeyedIndex,
    OpenSharedIndex,
    OpenObjects,
    OpenSegments,
    OpenSlabs,
    OpenStamps,
    PinChunks,
    KeyedMatch,
)


def takes(effect: Effect) -> bool:
    """Return True if the answer is something that the operation has to give back: a session, a lease, a descriptor,
    pins."""
    return isinstance(effect, Send) and isinstance(effect.request, _TAKING)


class Start(NamedTuple):
    """Begin an effect; the driver sends its ticket."""

    effect: Effect


class Wait(NamedTuple):
    """Wait for an effect; the driver sends its result."""

    ticket: Ticket


class Tell(NamedTuple):
    """Send a request whose answer does not matter; the driver sends None, in some drivers at once."""

    request: Request


Step = Start | Wait | Tell
Steps = Generator[Step, Any, T]


class Page(NamedTuple, Generic[T]):
    """Entries of a long list, and the steps that read on; None behind the last page."""

    entries: Sequence[T]
    rest: Steps[Page[T]] | None


Pages = Steps[Page[T]]
"""The first page of a list, to be read page by page."""


def send(
    request: Request, body: Sequence[Buffer] = (), descriptors: Sequence[int] = (), into: Sequence[memoryview] = ()
) -> Steps[Reply]:
    """Send one request; return its reply."""
    ticket = yield Start(Send(request, body, descriptors, into))
    reply: Reply = yield Wait(ticket)
    return reply


def work(call: Callable[..., T], *args: Any) -> Steps[T]:
    """Run one piece of work; return its result."""
    ticket = yield Start(Work(call, args))
    result: T = yield Wait(ticket)
    return result


Completion = Callable[[Any], "Steps[None] | None"]
"""Called with an effect's result; may return further steps, which run before the next completion."""


class Pipeline:
    """Keeps at most `window` effects in flight, and completes them in order.

    A completion may submit to the pipeline again (it returns steps that do so).  An effect that fails raises out of
    the `submit` or `drain` that waits for it, unless its `failed` handler takes the error.
    """

    def __init__(self, window: int) -> None:
        assert window >= 1
        self._window = window
        self._flight: deque[tuple[Ticket, Completion, Callable[[Exception], Steps[None] | None] | None]] = deque()

    def submit(
        self, effect: Effect, done: Completion, failed: Callable[[Exception], Steps[None] | None] | None = None
    ) -> Steps[None]:
        """Start the effect, first completing the oldest ones while the window is full."""
        yield from self.make_room()
        ticket = yield Start(effect)
        self._flight.append((ticket, done, failed))

    def make_room(self) -> Steps[None]:
        """Complete the oldest effects while the window is full, so that the next `submit` completes none."""
        while len(self._flight) >= self._window:
            yield from self._complete_oldest()

    def drain(self) -> Steps[None]:
        """Complete all effects, also those that completions submit."""
        while self._flight:
            yield from self._complete_oldest()

    def settle(self) -> Steps[None]:
        """Wait for the effects in flight after a failure; further failures are ignored."""
        while self._flight:
            try:
                yield from self._complete_oldest()
            except LakeError:
                continue

    def _complete_oldest(self) -> Steps[None]:
        ticket, done, failed = self._flight.popleft()
        try:
            result = yield Wait(ticket)
        except Exception as error:
            if failed is None:
                raise
            further = failed(error)
        else:
            further = done(result)
        if further is not None:
            yield from further
