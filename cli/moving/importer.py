"""Imports: objects of another S3 store bound in the lake, several at once, and those that are there already left alone.

Rules kept here:
- An object is bound when all its bytes arrived and have its ETag; a name has its old content or the new one, whole.
- The lake keeps the source's ETag.  An object that has size and ETag of the source's is there already, so an import
  that was killed goes on where it stopped.
- Nothing is removed, and what the lake has under a name of the source is replaced.
- Workers fetch and store; outcomes are reported by the thread that runs the import.
- Memory: for each worker one chunk, and two that are stored.
"""

from __future__ import annotations

import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from cli.moving.etags import BrokenOff, CheckedBody, is_of_content, kept_etag, part_count
from cli.moving.s3_source import Fetched, Found, S3Source
from lakefs.errors import BucketNotFound, InvalidArgument, LakeError
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import CHUNK_BYTES
from lakefs.names import Name
from lakefs.put.objects import put, put_stream
from lakefs.put.sources import memory_source
from lakefs.put.upload import result_of
from lakefs.steps.steps import Steps, send
from lakefs.sync.entries import Entry, Pair, Pairing
from lakefs.sync.filters import Rules
from lakefs.sync.report import Done, SyncOutcome
from lakefs.sync.sides import BucketSide
from lakefs.trees.walk import is_fatal
from lakefs.wire.messages import (
    DeleteNames,
    ListedVersions,
    ListEntry,
    ListVersions,
    NameChange,
    NameResults,
    ObjectAttributes,
    VersionEntry,
)

T = TypeVar("T")
BY_SIZE: Final = "checked by its size only"
FETCHES: Final = 3
"""Times that an object is fetched, when its bytes broke off."""
_KEPT: Final = ("Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Expires")
_MTIME: Final = re.compile(r"(-?\d{1,11})(?:\.(\d{1,9})\d*)?")
_QUEUED_PER_JOB: Final = 2


class Runner(Protocol):
    """A client of the lake."""

    @property
    def steps(self) -> LakeSteps: ...

    def run(self, steps: Steps[T], /) -> T: ...


@dataclass(frozen=True)
class ImportOptions:
    """`tags`: ask for the tags of objects that have some.  `dry_run`: report what would be imported, and do nothing."""

    rules: Rules
    tags: bool = True
    dry_run: bool = False


@dataclass
class Callbacks:
    """`outcome`, `planned` and `unchanged` are called by the thread that runs the import, `moved` by each worker."""

    outcome: Callable[[SyncOutcome], None]
    planned: Callable[[int, int], None]
    unchanged: Callable[[], None]
    moved: Callable[[int], None]


class Importer:
    """One import.  `runners`: clients of the lake, at least one; as many objects are stored at once."""

    def __init__(
        self,
        source: S3Source,
        prefix: str,
        target: Name,
        runners: Sequence[Runner],
        options: ImportOptions,
        callbacks: Callbacks,
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._target = target
        self._main = runners[0]
        self._free: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        for runner in runners:
            self._free.put(runner)
        self._options = options
        self._callbacks = callbacks
        self._has_failed = threading.Event()
        """Set by what ends everything, an error or Ctrl-C, so that workers read no more."""

    def run(self, jobs: int) -> int:
        """Import the current objects; return how many the source has.  Raises what ends everything."""
        seen = 0

        def wanted() -> Iterator[Callable[[], list[SyncOutcome]]]:
            nonlocal seen
            for pair in self._pairs():
                if pair.source is None or pair.source.listed is None:
                    continue
                seen += 1
                found = _found_of(pair.source.listed)
                if pair.target is not None and _is_there(pair.target, found):
                    self._callbacks.unchanged()
                    continue
                self._callbacks.planned(1, found.size_bytes)
                yield lambda path=pair.path, found=found: [self._import(path, found)]  # type: ignore[misc]

        self._work(jobs, wanted())
        return seen

    def run_versions(self, jobs: int) -> int:
        """Import all versions and delete markers, of each key the oldest first; return how many keys there are."""
        seen = 0

        def wanted() -> Iterator[Callable[[], list[SyncOutcome]]]:
            nonlocal seen
            for versions in self._source.keys_with_versions(self._prefix):
                path = versions[0].key[len(self._prefix) :]
                if path and self._options.rules.takes(path):
                    seen += 1
                    yield lambda path=path, versions=versions: self._import_versions(path, versions)  # type: ignore[misc]

        self._work(jobs, wanted())
        return seen

    # --- what there is to do -------------------------------------------------------------------------

    def _pairs(self) -> Iterator[Pair]:
        """Yield the names of source and lake, paired."""
        pages = self._source.pages(self._prefix)
        target = BucketSide(self._main.steps, self._target, may_miss=True)
        pairing = Pairing()
        while (side := pairing.wants) is not None:
            if side:
                pairing.add(side, self._main.run(target.next_page()))
            else:
                page = next(pages, None)
                pairing.add(side, None if page is None else self._entries(page))
            yield from pairing.pairs()

    def _entries(self, page: Sequence[Found]) -> list[Entry]:
        entries: list[Entry] = []
        for found in page:
            path = found.key[len(self._prefix) :]
            if path and self._options.rules.takes(path):
                listed = ListEntry(found.key, size_bytes=found.size_bytes, etag=found.etag, mtime_ns=found.mtime_ns)
                entries.append(Entry(path, found.size_bytes, found.mtime_ns, listed=listed))
        return entries

    def _work(self, jobs: int, wanted: Iterator[Callable[[], list[SyncOutcome]]]) -> None:
        """Run calls in `jobs` threads, a bounded number ahead, and report their outcomes in order."""
        waiting: deque[Future[list[SyncOutcome]]] = deque()
        with ThreadPoolExecutor(jobs, "lake-import") as threads:
            try:
                for call in wanted:
                    waiting.append(threads.submit(self._guarded, call))
                    if len(waiting) >= _QUEUED_PER_JOB * jobs:
                        self._report(waiting.popleft().result())
                while waiting:
                    self._report(waiting.popleft().result())
            except BaseException:
                self._has_failed.set()
                for future in waiting:
                    future.cancel()
                raise

    def _guarded(self, call: Callable[[], list[SyncOutcome]]) -> list[SyncOutcome]:
        """Run a worker's call; an error of it ends the other workers too, at once."""
        try:
            return call()
        except BaseException:
            self._has_failed.set()
            raise

    def _report(self, outcomes: Sequence[SyncOutcome]) -> None:
        for outcome in outcomes:
            self._callbacks.outcome(outcome)

    # --- one object, in a worker ---------------------------------------------------------------------

    def _import(self, path: str, found: Found) -> SyncOutcome:
        """Import one object, or one version; return its outcome.  Raises what ends everything."""
        if self._options.dry_run:
            return SyncOutcome(path, Done.COPIED, "not in the lake with this ETag", found.size_bytes)
        try:
            for attempt in range(FETCHES):
                try:
                    return self._import_once(path, found)
                except BrokenOff as error:
                    if attempt == FETCHES - 1:
                        return SyncOutcome(path, Done.FAILED, str(error), found.size_bytes)
        except _Ended:
            return SyncOutcome(path, Done.SKIPPED, "the import ended", found.size_bytes)
        except LakeError as error:
            if is_fatal(error):
                raise
            return SyncOutcome(path, Done.FAILED, error.message, found.size_bytes, error=error)
        raise AssertionError("unreachable")

    def _moved(self, count_bytes: int) -> None:
        """Report bytes that moved.  Raises _Ended once the import has."""
        if self._has_failed.is_set():
            raise _Ended
        self._callbacks.moved(count_bytes)

    def _import_once(self, path: str, found: Found) -> SyncOutcome:
        self._moved(0)
        with self._source.fetched(found) as fetched:
            part_bytes = self._part_bytes(fetched, found)
            tags = self._source.tags(found) if self._options.tags and fetched.fields.get("TagCount") else {}
            change = NameChange(self._target.bucket, self._target.key + path, b"", attributes_of(fetched, found, tags))
            body = _Moved(CheckedBody(fetched.body, found, part_bytes), self._moved)
            payload = body.read() if found.size_bytes <= CHUNK_BYTES else None
            with self._runner() as runner:
                new_bytes = runner.run(_stored(runner.steps, change, body, payload))
        reason = BY_SIZE if part_bytes is None else ""
        return SyncOutcome(path, Done.COPIED, reason, found.size_bytes, new_bytes)

    def _part_bytes(self, fetched: Fetched, found: Found) -> int | None:
        """Return the length of the parts over which the ETag was computed; None if that cannot be known."""
        if not is_of_content(fetched, found.etag):
            return None
        count = part_count(found.etag)
        return self._source.part_bytes(found, count) if count else max(1, found.size_bytes)

    @contextmanager
    def _runner(self) -> Iterator[Runner]:
        """Context manager: a client of the lake that no other worker uses."""
        runner = self._free.get()
        try:
            yield runner
        finally:
            self._free.put(runner)

    # --- versions of one key, in a worker -------------------------------------------------------------

    def _import_versions(self, path: str, versions: Sequence[Found]) -> list[SyncOutcome]:
        name = Name(self._target.bucket, self._target.key + path)
        try:
            return self._import_missing_versions(path, name, versions)
        except LakeError as error:
            if is_fatal(error):
                raise
            return [SyncOutcome(path, Done.FAILED, error.message, error=error)]

    def _import_missing_versions(self, path: str, name: Name, versions: Sequence[Found]) -> list[SyncOutcome]:
        with self._runner() as runner:
            present = self._present_versions(runner, name)
        there = [(entry.is_marker, entry.size_bytes, entry.etag) for entry in present]
        wanted = [(found.is_marker, found.size_bytes, found.etag) for found in versions]
        if there != wanted[: len(there)]:
            reason = f"{name} has versions that are not the source's; nothing was added to them"
            return [SyncOutcome(path, Done.FAILED, reason, error=InvalidArgument(reason, subject=str(name)))]
        outcomes: list[SyncOutcome] = []
        for found in versions[len(there) :]:
            outcomes.append(self._import_marker(path, name) if found.is_marker else self._import(path, found))
            if outcomes[-1].done is not Done.COPIED:
                break  # those that follow would stand in the wrong order
        return outcomes

    def _present_versions(self, runner: Runner, name: Name) -> list[VersionEntry]:
        try:
            return runner.run(_versions_of(name))
        except BucketNotFound:
            if not self._options.dry_run:
                raise
            return []  # the import would make it

    def _import_marker(self, path: str, name: Name) -> SyncOutcome:
        if not self._options.dry_run:
            with self._runner() as runner:
                runner.run(_removed(name))
        return SyncOutcome(path, Done.COPIED, "a delete marker")


class _Ended(Exception):
    """The import has ended, and what this worker does is of no use."""


class _Moved:
    """A body that reports the bytes that moved."""

    def __init__(self, body: CheckedBody, moved: Callable[[int], None]) -> None:
        self._body = body
        self._moved = moved

    def read(self, length: int = -1, /) -> bytes:
        """Return `length` bytes, fewer only at the end."""
        piece = self._body.read(length)
        self._moved(len(piece))
        return piece


def attributes_of(fetched: Fetched, found: Found, tags: dict[str, str]) -> ObjectAttributes:
    """Return the attributes with which the lake shows an object as its source does.

    Its modification time is that of `x-amz-meta-mtime` (rclone's way), else the time at which it was stored.
    """
    fields = fetched.fields
    metadata = {name: str(value) for name, value in fields.get("Metadata", {}).items()}
    kind, etag = kept_etag(found.etag)
    return ObjectAttributes(
        mtime_ns=mtime_of(metadata.get("mtime", "")) or found.mtime_ns,
        content_type=fields.get("ContentType", ""),
        user_metadata=metadata,
        headers={name: fetched.headers[name.lower()] for name in _KEPT if name.lower() in fetched.headers},
        etag_kind=kind,
        etag=etag,
        tags=tags,
    )


def mtime_of(text: str) -> int:
    """Return the nanoseconds of a time as rclone writes it, seconds with a fraction; 0 if it is none."""
    match = _MTIME.fullmatch(text.strip())
    if match is None:
        return 0
    fraction = int((match[2] or "").ljust(9, "0"))
    seconds = int(match[1])
    return seconds * 1_000_000_000 + (-fraction if text.strip().startswith("-") else fraction)


def _found_of(listed: ListEntry) -> Found:
    return Found(listed.key, listed.size_bytes, listed.etag, listed.mtime_ns)


def _is_there(target: Entry, found: Found) -> bool:
    """Return True if the lake has an object: with its ETag, or with its time if the lake cannot keep the ETag."""
    if not kept_etag(found.etag)[0]:
        return (target.size_bytes, target.mtime_ns) == (found.size_bytes, found.mtime_ns)
    return target.listed is not None and (target.size_bytes, target.listed.etag) == (found.size_bytes, found.etag)


def _stored(steps: LakeSteps, change: NameChange, body: _Moved, payload: bytes | None) -> Steps[int]:
    """Store an object under its name, from memory or as it arrives; return how many of its bytes are new."""
    transfer = steps.transfer(None)
    if payload is not None:
        result = yield from put(transfer, change, memory_source(payload))
    else:
        result = yield from put_stream(transfer, change, body)  # type: ignore[arg-type]  # of BinaryIO, `read` is used
    return result.new_bytes


def _removed(name: Name) -> Steps[None]:
    reply = yield from send(DeleteNames([name]))
    assert isinstance(reply.message, NameResults)
    for item in reply.message.results:
        if item.failure is not None:
            result_of(item)


def _versions_of(name: Name) -> Steps[list[VersionEntry]]:
    """Return the versions of a key, the oldest first."""
    found: list[VersionEntry] = []
    after, after_version = "", ""
    while True:
        reply = yield from send(ListVersions(name.bucket, name.key, after, after_version))
        assert isinstance(reply.message, ListedVersions)
        page = reply.message
        found += [entry for entry in page.entries if entry.key == name.key]
        after, after_version = page.next_after, page.next_version
        if not after or after != name.key:
            return found[::-1]
