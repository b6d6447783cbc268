"""Two threads that move blocks for a host: one reads, one writes, each over a connection of its own.

    host's thread  --submit-->  queue  -->  thread: job(space)  -->  done(result or error)

Rules kept here:
- `submit` never waits: a job that finds its queue full fails at once, and the host recomputes the block.
- Every job that was submitted is done once, by a call of `done` in the thread, also when the movers are closed: a job
  that has not begun fails then, one that has begun ends first.  So no memory of the host is touched after `close`.
- `try_now` runs a job in the caller's thread that neither waits nor sends a request that is waited for.  One at a time,
  and none after `close`.
- A space that was removed is made again, once for a job.
- A job has JOB_S in all: an engine behind a disk that hangs still answers Pings.  Then its connection is closed, which
  ends what was lent over it, and with the job all fail that wait behind it.  Later jobs connect anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from lakefs.client.address import silence_limit
from lakefs.client.blocking.lake import Lake
from lakefs.client.blocking.spaces import Space
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import EngineBusy, EngineUnreachable, InternalError, LakeError, SpaceNotFound
from lakefs.limits import ENGINE_WAIT_S

T = TypeVar("T")
JOB_S: Final = ENGINE_WAIT_S
"""Most seconds of one job, once it has begun, with all its requests and with connecting."""
JOBS_MAX: Final = 4096
"""Jobs that wait for one thread; each refers to the host's memory and holds none of its own."""


class HasSpace(Protocol):
    """A source of the space that jobs work on."""

    def use(self, job: Callable[[Space], T]) -> T:
        """Return what the job returns."""

    def try_use(self, job: Callable[[Space], T]) -> T:
        """Return what the job returns, which never waits; from any thread."""

    def close(self) -> None:
        """End the connection."""


@dataclass(frozen=True)
class SpaceSettings:
    """Settings of a plug-in's space: the engine's address, the name, and quota and TTL, if they are to be set."""

    server: str | None
    name: str
    quota: str | int | None = None
    ttl: str | float | None = None
    check: Check = Check.CRC32C


class Connection:
    """A connection to the engine, and the space on it.  Making it connects; errors are those of `lakefs.connect`."""

    def __init__(self, settings: SpaceSettings) -> None:
        self._settings = settings
        self._lake: Lake = connect(settings.server, check=settings.check, timeout=min(JOB_S, silence_limit(None)))
        try:
            self._space = self._opened()
        except BaseException:
            self._lake.close()
            raise

    def _opened(self) -> Space:
        settings = self._settings
        return self._lake.space(settings.name, quota=settings.quota, ttl=settings.ttl)

    @property
    def is_local(self) -> bool:
        """True if the engine is on this machine, and can be lent memory."""
        return self._lake.address.startswith("unix:")

    def use(self, job: Callable[[Space], T]) -> T:
        """Return what the job returns; a space that is gone is made again first.  EngineUnreachable after JOB_S."""
        with driver_of(self._lake).job(JOB_S):
            try:
                return job(self._space)
            except SpaceNotFound:
                self._space = self._opened()
                return job(self._space)

    def try_use(self, job: Callable[[Space], T]) -> T:
        """Return what the job returns; it calls methods of the space that never wait."""
        return job(self._space)

    def close(self) -> None:
        """Close the connection."""
        self._lake.close()


class _Job:
    """A job, and whom to tell of its end; without `run` it only marks a place in the queue."""

    def __init__(self, run: Callable[[Space], Any] | None, done: Callable[[Any], None]) -> None:
        self.run = run
        self.done = done


class Mover:
    """One thread with a queue.  `submit` from any thread; `done` is called in the mover's thread.

    Its locks are such that a host's thread may be interrupted anywhere (`lakefs.host.work_threads`).
    """

    def __init__(self, name: str, connection: HasSpace) -> None:
        self._connection = connection
        self.is_local: Final = isinstance(connection, Connection) and connection.is_local
        """True if the engine is on this machine, and loads into lent memory."""
        self._lock = threading.Lock()
        """Held while a job is queued, and while this is closed."""
        self._now = threading.Lock()
        """Held while a job runs in a caller's thread."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_closed = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[Space], T], done: Callable[[T | LakeError], None]) -> None:
        """Queue a job.  `done` gets its result or its error; at once, and from here, if the job cannot be queued."""
        with self._lock:
            if not self._is_closed and self._jobs.qsize() < JOBS_MAX:
                self._jobs.put(_Job(run, done))
                return
        done(EngineBusy(f"{JOBS_MAX} jobs wait for the lake, or the plug-in was closed"))

    def try_now(self, run: Callable[[Space], T | None]) -> T | None:
        """Run a job here if it can be done without waiting; None if it cannot, and for every error: submit it then."""
        if not self._now.acquire(blocking=False):
            return None
        try:
            return None if self._is_closed else self._connection.try_use(run)
        except (LakeError, ValueError, TypeError, BufferError):  # submitted, the job has the same error as its result
            return None
        finally:
            self._now.release()

    def wait_idle(self) -> None:
        """Wait until every job that was submitted is done."""
        reached = threading.Lock()
        reached.acquire()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._jobs.put(_Job(None, lambda _: reached.release()))
        if is_closed:
            self._thread.join()
        else:
            reached.acquire()

    def close(self) -> None:
        """Fail the jobs that have not begun, wait for the one that has, and close the connection.  Idempotent.

        After an interrupt it is called again.
        """
        with self._lock:
            self._is_closed = True
            left = self._taken()
            self._jobs.put(None)
        for job in left:
            job.done(EngineUnreachable("the plug-in was closed"))
        self._thread.join()
        with self._now:  # a job in a caller's thread ends first; those behind it see that this is closed
            if not self._has_ended:
                self._connection.close()
                self._has_ended = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            result = None if job.run is None else self._result_of(job.run)
            left: list[_Job] = []
            if isinstance(result, EngineUnreachable):
                with self._lock:
                    left = [] if self._is_closed else self._taken()
            for ended in (job, *left):
                ended.done(result)
            del job, left, ended, result  # their memory is the host's again

    def _taken(self) -> list[_Job]:
        """Take all jobs out of the queue."""
        left: list[_Job] = []
        with suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                left.append(job)
        return left

    def _result_of(self, run: Callable[[Space], Any]) -> Any:
        try:
            return self._connection.use(run)
        except LakeError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the edge to the host, which waits for the end of the job
            return InternalError(f"a job of the plug-in failed: {type(error).__name__}: {error}")


class Movers:
    """The reading and the writing thread of one plug-in."""

    def __init__(self, name: str, connect_to: Callable[[], HasSpace]) -> None:
        """Connect twice.  Errors are those of `connect_to`."""
        reading = connect_to()
        try:
            writing = connect_to()
        except BaseException:
            reading.close()
            raise
        self.reader = Mover(f"{name}-read", reading)
        self.writer = Mover(f"{name}-write", writing)

    def wait_idle(self) -> None:
        """Wait until every job of both threads is done."""
        self.reader.wait_idle()
        self.writer.wait_idle()

    def close(self) -> None:
        """Close both; on return no memory of the host is used any more."""
        self.reader.close()
        self.writer.close()
