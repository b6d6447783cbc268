"""State shared by all parts of one mount, and its requests to the engine.

`Mount` sends requests, gives leases back (many in one request), and sets how long the kernel may cache names and
attributes.

Short content that was opened before is opened without a request, while the engine's stamps say that neither its name
nor the content has changed (`lakefs.known`): what is visible is promised here, not what is durable, so answers about
visible changes are learned too.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
import structlog
import trio

from fuse.kernel.attach import MountOptions
from fuse.reading.blob_reader import ReadBuffers
from fuse.staging.folder import StagingFolder
from fuse.staging.room import Emptying
from fuse.state.attributes import Owner
from fuse.state.inodes import EXPIRED, Inode, InodeTable
from fuse.state.kept import Absences, Answer, Changed, Kept
from fuse.state.open_content import OpenContent
from fuse.state.unsettled import Unsettled
from fuse.state.writers import Failures, Writers
from lakefs.client.trio.driver import TrioDriver
from lakefs.client.trio.reconnecting import ReconnectingEngine
from lakefs.errors import DiskFailed, EngineUnreachable, KeyNotFound, LakeError, PreconditionFailed
from lakefs.get.objects import close_leases, open_object
from lakefs.get.opened import Opened
from lakefs.limits import FILE_BYTES_MAX, SMALL_PAYLOAD_BYTES, WRITE_BEHIND_FILES
from lakefs.names import Name
from lakefs.ports import Offload
from lakefs.wire.messages import (
    FEATURE_PLACES,
    DeleteNames,
    Done,
    Exchange,
    ListEntry,
    MakeFolder,
    MakeSymlink,
    Message,
    NameResult,
    NameResults,
    ObjectStat,
    PutObjects,
    RemoveFolder,
    Rename,
    Request,
    SetAttributes,
    StatNames,
    Sync,
)

M = TypeVar("M", bound=Message)
Change = PutObjects | DeleteNames | Rename | Exchange | MakeFolder | MakeSymlink | RemoveFolder | SetAttributes
_GATHER_S = 0.02
_log: Final = structlog.get_logger()
UNWATCHED_TIMEOUT_S = 1.0
"""Longest time that the kernel may cache entries and attributes of a bucket without a watch."""


async def _no_pages(_: Inode) -> None:
    """Default for `forget_pages`, before there is a kernel."""


@dataclass
class Mount:
    """One mounted lake."""

    driver: TrioDriver
    engine: ReconnectingEngine
    offload: Offload
    staging: StagingFolder
    table: InodeTable
    owner: Owner
    options: MountOptions
    background: trio.Nursery
    """For tasks that no operation waits for; it ends with the mount."""
    writers_behind: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(WRITE_BEHIND_FILES))
    emptying: trio.Lock = field(default_factory=trio.Lock)
    """Held while a staging file is emptied."""
    read_buffers: ReadBuffers = field(default_factory=ReadBuffers)
    watched: set[str] = field(default_factory=set)
    """Buckets whose watch is running; "" for all."""
    want_watch: Callable[[str], None] = lambda bucket: None
    """Asks for a watch on a bucket, where an engine has none of all; does not wait."""
    absences: Absences = field(init=False)
    """Names that are known to be absent."""

    forget_attributes: Callable[[Inode], None] = lambda inode: None
    """Makes the kernel ask for the inode's attributes when it next needs them; does not wait."""
    forget_pages: Callable[[Inode], Awaitable[None]] = _no_pages
    """Makes the kernel forget the inode's cached pages."""
    unsettled: Unsettled = field(default_factory=Unsettled)
    """Changes that are visible and not known to be durable."""
    leases: list[int] = field(default_factory=list)
    """Leases to close, many in one request."""
    has_leases: trio.Event = field(default_factory=trio.Event)

    failures: Failures = field(default_factory=Failures)
    """Names that could not be stored, of which no caller knows."""
    device: str = ""
    """The mount's device as `MAJOR:MINOR`; set when the mount serves."""

    mapped: set[OpenContent] = field(default_factory=set)
    """Files whose last handle is closed, and which a mapping may still write to; each counts one handle for it."""

    end_by: float = math.inf
    """Time by which the mount must have ended, on trio's clock; set when it begins to end."""
    unstored_count: int = 0
    """Number of files that could not be stored since the mount began to end; they stay in the staging folder."""
    unstored_error: LakeError | None = None
    """The first error that kept one of them from being stored."""

    def __post_init__(self) -> None:
        self.absences = Absences(self.stands)

    @property
    def is_ending(self) -> bool:
        """True once the mount has begun to end."""
        return self.end_by < math.inf

    def begin_to_end(self) -> None:
        """Set the time by which the mount must have ended, and count unstored files from now on."""
        self.end_by = trio.current_time() + self.options.stop_wait_s
        self.unstored_count, self.unstored_error = 0, None

    def note_unstored(self, error: LakeError) -> None:
        """Note a file whose written bytes stay in the staging folder."""
        self.unstored_count += 1
        self.unstored_error = self.unstored_error or error

    def note_failure(self, inode: Inode, writers: Writers, error: LakeError) -> None:
        """Keep the error of a release for the next open of the name, unless a caller had it."""
        _log.error("a closed file could not be stored", name=inode.name, error=error.message)
        place = inode.place
        if not writers.is_reported and place is not None and self.table.is_below(place[0], self.table.root):
            writers.is_reported = True
            self.failures.note(str(self.table.child_name(*place)), error)

    def raise_failure(self, folder: Inode, name: str) -> None:
        """Raise the error of the last release of a name, once, if no caller has had it."""
        if self.failures and self.table.is_below(folder, self.table.root):
            self.failures.raise_once(str(self.table.child_name(folder, name)))

    def show_stored(self, inode: Inode) -> None:
        """Show what the store has of an inode, in place of what could not be stored."""
        inode.cached_blob = None
        if self.is_ending:
            return
        if inode.is_pending and inode.parent is not None:
            self.table.detach(inode)
        else:
            inode.confirmed_at = EXPIRED
            self.forget_attributes(inode)

    async def is_kept_open(self, inode: Inode, writers: Writers, handle: int) -> bool:
        """Return True if the program that opened a handle of the inode still has a descriptor of it."""
        return await writers.is_kept_open(handle, frozenset({inode.number, inode.st_ino}), self.device, self.offload)

    async def follow(self, found: ObjectStat | ListEntry) -> None:
        """Have open handles of a node follow what was appended elsewhere, before the store's record of it is taken."""
        inode = self.table.by_node(found.node)
        if inode is None or inode.file is None or inode.is_dirty or inode.attributes.blob == found.blob:
            return  # nor wait for a commit
        await inode.file.follow(found)

    def give_back(self, lease: int) -> None:
        """Close a lease soon; does not wait."""
        if lease:
            self.leases.append(lease)
            self.has_leases.set()

    async def empty_beside(self, emptying: Emptying) -> None:
        """Empty a staging file in a thread, one at a time."""
        async with self.emptying:
            await self.offload.run(emptying.run)
        self.staging.emptied(emptying)

    async def give_leases_back(self) -> None:
        """Close the leases that were given back, until cancelled."""
        while True:
            await self.has_leases.wait()
            await trio.sleep(_GATHER_S)
            leases, self.leases = self.leases, []
            self.has_leases = trio.Event()
            await self.driver.run(close_leases(leases))

    async def ask(self, request: Request, reply: type[M]) -> M:
        """Send a request and return the engine's answer."""
        answer = (await self.engine.call(request)).message
        assert isinstance(answer, reply)
        return answer

    def engine_boot(self) -> bytes:
        """Return the id of the engine run that answers now."""
        return self.engine.hello.boot_id

    async def sync(self, inode: Inode) -> None:
        """Make all visible changes durable.  DiskFailed if the engine restarted: a change of `inode` may be lost."""
        boots = self.unsettled.take(inode.number)
        async with self.settling():
            await self.ask_sync()
        if boots - {self.engine_boot()}:
            raise DiskFailed(
                f"{inode.name or '/'}: the engine was restarted; what was changed just before that may be lost",
                subject=inode.name,
            )

    async def ask_sync(self) -> None:
        """Make durable all that the engine has visible; the caller checks that it is the same engine run as before."""
        try:
            await self.ask(Sync(), Done)
        except EngineUnreachable:
            await self.ask(Sync(), Done)

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Note, if the block made something durable, that all earlier changes of the same engine run are durable."""
        boot, count = self.engine_boot(), self.unsettled.count
        yield
        if boot == self.engine_boot():
            self.unsettled.settled(boot, count)

    def may_have_lost(self, inode: Inode) -> bool:
        """Return True if a killed engine may have lost the inode: it, or its folder, was changed just before by this
        mount, and the present engine has never been seen to have it.  Else somebody has removed it."""
        boot, place = self.engine_boot(), inode.place
        if inode.seen_boot == boot or place is None:
            return False
        return any(self.unsettled.may_be_lost(at.number, boot) for at in (inode, place[0]))

    def note_visible(self, *inodes: Inode | None) -> None:
        """Note that changes of these inodes are visible in this engine run and may not be durable."""
        if not self.options.sync:
            self.unsettled.note(self.engine_boot(), [inode.number for inode in inodes if inode is not None])

    async def settle(self) -> None:
        """Sync changes that nothing else syncs, until cancelled."""
        await self.unsettled.settle(self.engine_boot, lambda: self.ask(Sync(), Done))

    # --- answers and changes -------------------------------------------------------------------------

    @property
    def checks_places(self) -> bool:
        """True if the engine refuses a change whose conditions on places do not hold; else the mount asks first."""
        return bool(self.engine.hello.features & FEATURE_PLACES)

    def stands(self, kept: tuple[bytes, int] | None) -> bool:
        """Return True if a kept answer still holds; False too if there is no way to know without a request."""
        return kept is not None and self.driver.stand(*kept)

    async def change(self, request: Change) -> Changed:
        """Change one name; a failure is raised.  KeyNotFound if the name did not exist.

        Visible to all on return, which the caller notes (`note_visible`); on a mount with the option `sync` durable.
        """
        if self.options.sync:
            request = msgspec.structs.replace(request, durable=True)
        reply = await self.engine.call(request)
        assert isinstance(reply.message, NameResults)
        (result,) = reply.message.results
        stat = stat_or_error(result)
        if isinstance(stat, LakeError):
            raise stat
        return Changed(stat, stat.ctime_ns, result.folder, result.from_folder, result.stamps, reply.epoch)

    async def change_again(self, request: Change, done: Callable[[LakeError], Awaitable[bool | ObjectStat]]) -> Changed:
        """Like `change`, but sent again if the engine was lost before it answered.

        `done` returns True, or the record of the name, if the error of the second request means that the first was
        done: the change has met its own success.
        """
        try:
            return await self.change(request)
        except EngineUnreachable:
            try:
                return await self.change(request)
            except EngineUnreachable:
                raise
            except LakeError as error:
                found = await done(error)
                if not found:
                    raise
                return Changed(found, found.ctime_ns) if isinstance(found, ObjectStat) else Changed(None, now_ns())

    async def stat(self, names: Sequence[Name]) -> list[ObjectStat | LakeError]:
        """Return the store's record of each name, or the error for it."""
        return [answer.found for answer in await self.look_up(names)]

    async def look_up(self, names: Sequence[Name]) -> list[Answer]:
        """Ask the engine for the record of each name; the answers may be kept where the engine has stamps."""
        known = await self.driver.known_names()
        has_stamps = known is not None and known.wants_stamps
        request = StatNames([(name.bucket, name.key) for name in names], durable=False, stamps=has_stamps)
        reply = await self.engine.call(request)
        assert isinstance(reply.message, NameResults)
        return [
            Answer(stat_or_error(result), Kept(result.stamps, reply.epoch) if result.stamps else None)
            for result in reply.message.results
        ]

    # --- content -------------------------------------------------------------------------------------

    async def opened(self, name: Name, size_bytes: int) -> Opened:
        """Open what a name has now, of about that length: held by a lease, or all of it in memory.  KeyNotFound, ..."""
        if size_bytes > SMALL_PAYLOAD_BYTES:
            return await self.leased(name)
        known = await self.driver.known_names()
        if known is not None and (at_hand := known.open_at_hand(str(name))) is not None:
            return at_hand
        access, lease = self.driver.steps.access(None), size_bytes == SMALL_PAYLOAD_BYTES
        opened = await self.driver.run(open_object(access, name, lease=lease, durable=False, learns=True))
        if not opened.lease and len(opened.inline) != len(opened.pieces):
            return await self.leased(name)  # its content was not in the answer
        return opened

    async def leased(self, name: Name) -> Opened:
        """Open what a name has now, held by a lease, whatever its length.  KeyNotFound, ..."""
        access = self.driver.steps.access(None)
        return await self.driver.run(open_object(access, name, lease=True, durable=False))

    async def stat_of_small(self, name: Name, size_bytes: int) -> ObjectStat | LakeError:
        """Like `stat`, for one name; without a request for short content that was opened before, if nothing changed."""
        known = await self.driver.known_names() if size_bytes <= SMALL_PAYLOAD_BYTES else None
        if known is not None and (at_hand := known.stat_at_hand(str(name))) is not None:
            return at_hand
        (found,) = await self.stat([name])
        return found

    def bucket_of(self, inode: Inode) -> str:
        """Return the bucket of the inode; empty for the list of buckets, and for an inode without a name."""
        if self.table.bucket:
            return self.table.bucket
        at = inode
        while at.parent is not None and at.parent is not self.table.root:
            at = at.parent
        return at.name if at.parent is not None else ""

    def timeouts(self, bucket: str) -> tuple[float, float]:
        """Return how long the kernel may cache an entry of the bucket, and its attributes, in s."""
        options = self.options
        if self.is_watched(bucket):
            return options.entry_timeout_s, options.attribute_timeout_s
        return (
            min(options.entry_timeout_s, UNWATCHED_TIMEOUT_S),
            min(options.attribute_timeout_s, UNWATCHED_TIMEOUT_S),
        )

    def is_watched(self, bucket: str) -> bool:
        """Return True if changes in the bucket by others are noticed."""
        return bool(bucket) and ("" in self.watched or bucket in self.watched)

    def is_fresh(self, inode: Inode) -> bool:
        """Return True if the kernel may be given the inode's attributes as they are known: no older than its caches."""
        if self.stands(inode.kept):
            return True
        _, timeout_s = self.timeouts(self.bucket_of(inode))
        return inode.kept is None and trio.current_time() < inode.confirmed_at + timeout_s

    def names_stand(self, folder: Inode) -> bool:
        """Return True if the table has all names of a folder, as they are now."""
        return bool(folder.names_ns) and self.stands(folder.kept)

    def names_are_fresh(self, folder: Inode) -> bool:
        """Return True if the table has all names of a folder, no older than those in the kernel's caches."""
        if not folder.names_ns:
            return False
        return self.stands(folder.kept) or (folder.kept is None and self.is_watched(self.bucket_of(folder)))

    def take(self, inode: Inode, found: ObjectStat) -> None:
        """Show the store's record of an inode; the kernel forgets what differs."""
        if inode.take(self.owner.shown(found)):
            self.forget_attributes(inode)

    def has_name(self, inode: Inode, name: Name) -> bool:
        """Return True if the inode still has the name that was asked for: what was answered concerns it."""
        return self.table.is_below(inode, self.table.root) and self.table.name_of(inode) == name

    def touch(self, inode: Inode) -> None:
        """Note that this mount has changed the inode: answers to earlier requests are out of date."""
        inode.changed_at = inode.confirmed_at = trio.current_time()
        if not inode.is_folder:  # a folder's answer ends with a stored change: `fuse.state.kept.note_change`
            inode.kept = None


def stat_or_error(result: NameResult) -> ObjectStat | LakeError:
    """Return the record or the error of one result of a batch."""
    if result.stat is not None:
        return result.stat
    if result.failure is None:
        return KeyNotFound("there is nothing of this name")
    return result.failure.as_error()


def replaced(name: Name) -> PreconditionFailed:
    """Return the error for a name that has other content than the kernel knows: it is looked up anew."""
    return PreconditionFailed(f"{name} was replaced since it was looked up", subject=str(name))


def check_size(inode: Inode, size: int) -> None:
    """Raise OSError EFBIG if a file may not have this length."""
    if size > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"{inode.name}: a file of {size} bytes; the limit of a mount is {FILE_BYTES_MAX}")


def now_ns() -> int:
    """Return the wall clock, for the times of files."""
    return time.time_ns()
