"""LMCache's `native_plugin`: the lake as the second level of an LMCache server.

    {"type": "native_plugin", "module_path": "lakefs.plugins.kv.lmcache_connector", "class_name": "LakeConnector",
     "adapter_params": {"server": "unix:/run/lake/lake.sock", "space": "llama-70b", "quota": "200G"}}

LMCache names an object by a text (model, rank, group, hash, salt), of which its key is made
(`lakefs.plugins.kv.lmcache_names`).  The interface is that of LMCache's `NativeConnectorL2Adapter`: operations are
submitted and numbered, an event descriptor says that some have ended, and `drain_completions` returns those.

Rules kept here:
- Only the two movers' threads wait: for the engine, or a disk.  Submitting and draining never do.  Look-ups, and small
  reads of objects that are all in memory, are done while they are submitted: LMCache submits from a thread of its own
  and expects the call to be brief, and handing such a read to another thread and back takes as long as the read.
- The buffers of an operation are referred to until it has ended.
- A read that brings other than exactly the buffer's length is a miss, and so is an object of another length when it is
  looked for; storing an object replaces such a one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from lakefs.client.blocking.spaces import Space
from lakefs.content.verify import check_named
from lakefs.errors import LakeError
from lakefs.limits import MIB
from lakefs.plugins.kv.lmcache_host import PACKAGE, offers_to
from lakefs.plugins.kv.lmcache_names import Lengths, Names
from lakefs.plugins.kv.movers import Connection, HasSpace, Mover, Movers, SpaceSettings
from lakefs.plugins.kv.offers import check_host
from lakefs.put.keyed import Outcome

_log: Final = logging.getLogger(__name__)
UNSEEN: Final = (
    "The keys of LMCache's objects do not stand for dtype and overrides of an engine, for other weights of a LoRA "
    "adapter under its path, nor for the content of a model that is no local path. Engines that differ in one of those "
    "need an option `salt` each, or have each other's blocks"
)
AT_ONCE_BYTES_MAX: Final = MIB
"""Most bytes of a read that is done while it is submitted: a tenth of a millisecond or two."""
AT_ONCE_KEYS_MAX: Final = 256
"""Most keys of a look-up that is: as long at most."""
Completion = tuple[int, bool, str, list[bool] | None]
"""Number of the operation, if it succeeded, the error's text, and one result for each key."""
Results = tuple[list[bool], str]
"""One result for each key, and the text of the first error."""


class LakeConnector:
    """The connector that LMCache makes from `adapter_params`.

    `salt`: text that stands for what LMCache's names do not tell.  UnsupportedVersion for an LMCache that does not
    offer what is used of it; else the errors of `lakefs.connect`.
    """

    def __init__(
        self,
        server: str | None = None,
        space: str = "lmcache",
        quota: str | int | None = None,
        ttl: str | float | None = None,
        check: str = "crc32c",
        salt: str | int = "",
    ) -> None:
        check_host(PACKAGE, offers_to(LakeConnector))
        settings = SpaceSettings(server, space, quota, ttl, check_named(check))
        if salt == "":
            _log.warning("%s", UNSEEN)
        self._begin(lambda: Connection(settings), str(salt))

    def _begin(self, connect_to: Callable[[], HasSpace], salt: str) -> None:
        self._names, self._lengths = Names(salt), Lengths()
        self._movers = Movers("lake-lmcache", connect_to)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ended: list[Completion] = []
        self._last = 0
        self._is_closed = False

    def event_fd(self) -> int:
        """Return the descriptor that is readable while completions wait."""
        return self._event

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Read objects into buffers of exactly their length; one result for each key.  Return the number."""
        buffers, names = list(memoryviews), list(keys)
        self._lengths.note(names, buffers)
        known = self._names.keys_now(names)
        found = batches(known or ())

        def try_get(space: Space) -> list[bool] | None:
            lengths = space.try_get_many_into(found[0][1], buffers)
            if lengths is None:
                return None
            return [0 < length == buffer.nbytes for length, buffer in zip(lengths, buffers, strict=True)]

        def get(space: Space) -> Results:
            results = [False] * len(buffers)
            for places, batch in found or batches(self._names.keys(names)):
                lengths = space.get_many_into(batch, [buffers[place] for place in places])
                for place, length in zip(places, lengths, strict=True):
                    results[place] = 0 < length == buffers[place].nbytes
            return results, ""

        if len(found) == 1 and sum(buffer.nbytes for buffer in buffers) <= AT_ONCE_BYTES_MAX:
            results = self._movers.reader.try_now(try_get)
            if results is not None:
                return self._ended_at_once(results)
        return self._submit(self._movers.reader, get, len(buffers), is_whole=False)

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Store objects, each unless it is present; it succeeds if all are stored or present.  Return the number."""
        buffers, names = list(memoryviews), list(keys)
        self._lengths.note(names, buffers)

        def put(space: Space) -> Results:
            results, reason = [True] * len(buffers), ""
            for places, batch in batches(self._names.keys(names)):
                done = space.put_many(batch, [buffers[place] for place in places], resize=True)
                for place, outcome in zip(places, done.outcomes, strict=True):
                    results[place] = outcome is not Outcome.FAILED
                reason = reason or next((error.message for error in done.failures.values()), "")
            return results, reason

        return self._submit(self._movers.writer, put, len(buffers), is_whole=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Find out which objects are present; one result for each key.  Return the operation's number."""
        names, sizes = list(keys), self._lengths.of(keys)
        known = self._names.keys_now(names)
        found = batches(known or ())
        if len(found) == 1 and len(names) <= AT_ONCE_KEYS_MAX:
            present = self._movers.reader.try_now(lambda space: space.try_match(found[0][1], sizes))
            if present is not None:
                return self._ended_at_once(present)

        def match(space: Space) -> Results:
            results = [False] * len(names)
            for places, batch in found or batches(self._names.keys(names)):
                matched = space.match(batch, [sizes[place] for place in places])
                for place, is_present in zip(places, matched.present, strict=True):
                    results[place] = is_present
            return results, ""

        return self._submit(self._movers.reader, match, len(names), is_whole=False)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove objects; for each key, if there was one.  Return the operation's number."""

        names = list(keys)

        def remove(space: Space) -> Results:
            results = [False] * len(names)
            for places, batch in batches(self._names.keys(names)):
                for place, was_present in zip(places, space.remove(batch), strict=True):
                    results[place] = was_present
            return results, ""

        return self._submit(self._movers.writer, remove, len(names), is_whole=False)

    def drain_completions(self) -> list[Completion]:
        """Return the operations that have ended since the last call; after `close`, the last.  Never waits."""
        with self._lock:
            if not self._is_closed:  # else the number of the descriptor may be another file's
                try:
                    os.eventfd_read(self._event)
                except BlockingIOError:
                    return []
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> None:
        """End both threads and close the descriptor; no buffer is used any more.  Idempotent."""
        self._movers.close()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._event)

    def _submit(self, mover: Mover, job: Callable[[Space], Results], count: int, *, is_whole: bool) -> int:
        """Submit an operation of `count` keys; with `is_whole` it fails if a key does."""
        number = self._next()

        def done(result: Results | LakeError) -> None:
            if isinstance(result, LakeError):
                self._end((number, False, result.message, [False] * count))
                return
            flags, reason = result
            if is_whole and not all(flags):
                text = f"{flags.count(False)} of {count} objects were not stored: {reason}"
                self._end((number, False, text, flags))
            else:
                self._end((number, True, "", flags))

        mover.submit(job, done)
        return number

    def _next(self) -> int:
        with self._lock:
            self._last += 1
            return self._last

    def _ended_at_once(self, results: list[bool]) -> int:
        """End an operation that was done while it was submitted.  Return its number."""
        number = self._next()
        self._end((number, True, "", results))
        return number

    def _end(self, completion: Completion) -> None:
        with self._lock:
            if not self._is_closed:
                self._ended.append(completion)
                os.eventfd_write(self._event, 1)


def batches(keys: Sequence[bytes]) -> list[tuple[list[int], list[bytes]]]:
    """Split keys into batches without a key twice: indexes, and the keys at them.  One batch unless one repeats."""
    wanted = list(keys)
    if wanted and len(set(wanted)) == len(wanted):
        return [(list(range(len(wanted))), wanted)]
    found: list[tuple[list[int], dict[bytes, None]]] = []
    for place, key in enumerate(wanted):
        batch = next((batch for batch in found if key not in batch[1]), None)
        if batch is None:
            batch = ([], {})
            found.append(batch)
        batch[0].append(place)
        batch[1][key] = None
    return [(places, list(keys)) for places, keys in found]
