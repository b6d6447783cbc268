"""`WorkThreads`: a few threads for a client's reads and checks, whose waiting thread may be interrupted anywhere.

`concurrent.futures` will not do.  Python runs a signal's handler between two steps of the main thread, also inside its
own library: a KeyboardInterrupt behind the `acquire` of a `threading.Condition.__enter__` leaves that lock held, and
the thread that needs it next never ends (CPython issue 74174).  Here the two sides share only what Python takes and
gives back in one step: locks without a class around them, a `SimpleQueue`, a `deque`.

The threads end with `close`, or when nothing refers to their `WorkThreads` any more.  The end of the process does not
wait for them.
"""

from __future__ import annotations

from _thread import LockType, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")


class Work(Generic[T]):
    """One call that a thread was given."""

    __slots__ = ("_args", "_call", "_claim", "_done", "_error", "_keywords", "_result")

    def __init__(self, call: Callable[..., T], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._call: Callable[..., T] | None = call
        self._args = args
        self._keywords = keywords
        self._claim = allocate_lock()
        """Taken once, by the thread that makes the call or by `cancel`."""
        self._done = allocate_lock()
        """Held until the call has ended, or will never begin."""
        self._done.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def cancel(self) -> bool:
        """Return True if the call has not begun, and never will."""
        if not self._claim.acquire(blocking=False):
            return False
        self._forget_call()
        self._done.release()
        return True

    def wait(self) -> None:
        """Wait until the call has ended, or is cancelled."""
        with self._done:
            pass

    def result(self) -> T:
        """Wait; return the call's result, or raise its exception, once.  The work was not cancelled."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return cast(T, self._result)

    def run(self) -> None:
        """Make the call, unless it was cancelled.  In the thread of the pool."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            assert self._call is not None
            self._result = self._call(*self._args, **self._keywords)
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            self._error = error
        finally:
            self._forget_call()
            self._done.release()

    def _forget_call(self) -> None:
        """Let go of the memory that the call was about."""
        self._call, self._args, self._keywords = None, (), {}


class _Shared:
    """Shared by a pool and its threads, which do not keep the pool alive."""

    def __init__(self, threads: int) -> None:
        self.queue: SimpleQueue[Work[Any] | None] = SimpleQueue()
        self.idle: deque[None] = deque(maxlen=threads)
        """One entry for each thread that waits for work and is not promised to any yet; more once all are started."""
        self.alive: deque[LockType] = deque()
        """A lock for each thread, which holds it until it ends."""


class WorkThreads:
    """At most `count` threads, each started when there is work that no idle one could take."""

    def __init__(self, count: int) -> None:
        assert count > 0
        self._count = count
        self._started = 0
        self._shared = _Shared(count)

    def submit(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> Work[T]:
        """Give a thread a call.  RuntimeError if there is no thread, and the system starts none."""
        work = Work(call, args, keywords)
        self._shared.queue.put(work)
        try:
            self._shared.idle.pop()
        except IndexError:
            if self._started < self._count:
                self._start(work)
        return work

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and end the threads."""
        with suppress(Empty):
            while True:
                work = self._shared.queue.get_nowait()
                if work is not None:
                    work.cancel()
        # A thread that has only just been started, and is not among those alive yet, finds nothing but this.
        self._shared.queue.put(None)
        for alive in tuple(self._shared.alive):
            with alive:
                pass

    def _start(self, work: Work[Any]) -> None:
        try:
            start_new_thread(_run, (self._shared,))
        except RuntimeError:
            if self._started == 0:
                work.cancel()
                raise
            return  # the threads that there are will do
        self._started += 1

    def __del__(self) -> None:
        self._shared.queue.put(None)


def _run(shared: _Shared) -> None:
    """Do work until the end; the body of each thread."""
    with (alive := allocate_lock()):
        shared.alive.append(alive)
        while (work := shared.queue.get()) is not None:
            work.run()
            del work  # otherwise its result would be kept until the next
            shared.idle.append(None)
        shared.queue.put(None)  # for the next thread
