"""Watches: changes made elsewhere are passed on to the kernel's caches, and to its watchers (inotify).

One watch serves all buckets.  Of an engine that has none, at most 15 of the buckets that are looked into are watched.
No change by this mount rests on what a watch has told, or has not told yet: see `fuse.state.kept`.

An event arrives late: this mount may have changed the same name since.  So the names that an event touches are compared
with the store, many in one request, and only differences are passed on.  Changes by this mount itself send no events.
While a bucket is watched the kernel may rely on entries and attributes for long (the mount's timeouts), else for a
second.

After the connection was lost, or the watch did not keep up, everything known of the bucket is out of date at once.
After a lost connection open files also lease their content again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

import pyfuse3
import structlog
import trio
from pyfuse3 import FileNameT, InodeT

from fuse.state.inodes import EXPIRED, Inode
from fuse.state.mount import Mount
from lakefs.client.trio.reconnecting import ReconnectingEngine
from lakefs.errors import BucketNotFound, InvalidName, KeyNotFound, LakeError
from lakefs.limits import WATCHES_PER_CONNECTION_MAX
from lakefs.wire.messages import FEATURE_WATCH_ALL, ObjectStat, WatchEvent

_log: Final = structlog.get_logger(__name__)
_BUCKETS_MAX: Final = WATCHES_PER_CONNECTION_MAX - 1
_WAITING_MAX: Final = 256
_ALL: Final = ""
_RETRY_S: Final = 0.2
_ANOTHER_ENGINE_S: Final = 2.0
_GATHER_S: Final = 0.02
_STAT_BATCH: Final = 256
_ROUNDS_MAX: Final = 40
"""Rounds for which a name that is gone waits for the event that says why, 0.8 s: it is sent when that is durable."""


@dataclass
class _Doubt:
    """Why an inode is compared with the store: the kind of the last event that took its name away ("" for none)."""

    kind: str = ""
    rounds: int = 0


class Watcher:
    """Watches the buckets that one mount looks into."""

    def __init__(self, mount: Mount, engine: ReconnectingEngine) -> None:
        self._mount = mount
        self._table = mount.table
        self._engine = engine
        self._begun: set[str] = set()
        self._doubtful: dict[Inode, _Doubt] = {}
        """Inodes to compare with the store."""
        self._has_doubt = trio.Event()
        self._epoch = engine.epoch
        self._send, self._receive = trio.open_memory_channel[str](_WAITING_MAX)
        mount.want_watch = self._request_watch
        mount.table.on_lost = _invalidate_entry
        mount.table.on_changed = _invalidate_attributes
        mount.forget_attributes = _invalidate_attributes
        mount.forget_pages = _invalidate_pages

    @property
    def _has_one_for_all(self) -> bool:
        return not self._table.bucket and bool(self._engine.hello.features & FEATURE_WATCH_ALL)

    def _request_watch(self, bucket: str) -> None:
        if self._has_one_for_all or bucket in self._begun or len(self._begun) >= _BUCKETS_MAX:
            return
        try:
            self._send.send_nowait(bucket)
        except trio.WouldBlock:
            return
        self._begun.add(bucket)

    async def run(self) -> None:
        """Watch the buckets that are asked for, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_about_doubtful)
            nursery.start_soon(self._watch_all)
            async for bucket in self._receive:
                nursery.start_soon(self._watch, bucket)

    async def _watch_all(self) -> None:
        """Watch all buckets of engines that can, until cancelled."""
        while True:
            if self._has_one_for_all:
                await self._watch(_ALL)
            await trio.sleep(_ANOTHER_ENGINE_S)

    async def _watch(self, bucket: str) -> None:
        while True:
            try:
                async with self._engine.watch(bucket, others_only=True) as events:
                    await self._expire(bucket)
                    self._mount.watched.add(bucket)
                    async for event in events:
                        await self._apply(event)
            except (BucketNotFound, InvalidName):
                self._begun.discard(bucket)
                return
            except LakeError as error:
                _log.warning("changes of a bucket are not seen for the moment", bucket=bucket, error=error.message)
            finally:
                self._mount.watched.discard(bucket)
            await trio.sleep(_RETRY_S)
            await self._renew_leases()

    # --- events --------------------------------------------------------------------------------------

    async def _apply(self, event: WatchEvent) -> None:
        """Doubt the names of an event.  It may be older than changes by this mount, so the store is asked."""
        if event.kind == "resync":
            await self._expire(event.bucket)
            return
        self._name_changed(event.bucket, event.key, event.kind if event.kind in ("delete", "rename") else "")
        if event.kind == "rename":
            self._name_changed(event.to_bucket, event.to_key)

    def _name_changed(self, bucket: str, key: str, taken_by: str = "") -> None:
        place = self._place(bucket, key)
        if place is None:
            return
        parent, name = place
        self._doubt(parent)  # a folder's times change with its names
        if not name:
            return
        child = parent.children.get(name)
        if child is not None:
            self._doubt(child, taken_by)
        else:
            _renew_names(parent)
        if child is None or not child.lookups:  # the kernel may have the name as absent
            _invalidate_entry(parent, name)

    def _detach(self, parent: Inode, child: Inode, *, is_removed: bool = False) -> None:
        _renew_names(parent)
        self._table.detach(child, is_removed=is_removed)

    def _place(self, bucket: str, key: str) -> tuple[Inode, str] | None:
        """Return the folder of a key, and the component in it ("" for the bucket's own); None if it is unknown."""
        at: Inode | None = self._table.root
        if not self._table.bucket:
            at = self._table.root.children.get(bucket)
        elif bucket != self._table.bucket:
            return None
        *folders, name = key.removesuffix("/").split("/")
        for folder in folders:
            at = None if at is None else at.children.get(folder)
        return None if at is None else (at, name)

    # --- inodes that may be out of date --------------------------------------------------------------

    def _doubt(self, inode: Inode, kind: str = "", rounds: int = 0) -> None:
        doubt = self._doubtful.setdefault(inode, _Doubt(rounds=rounds))
        doubt.kind = kind or doubt.kind
        self._has_doubt.set()

    async def _ask_about_doubtful(self) -> None:
        while True:
            await self._has_doubt.wait()
            await trio.sleep(_GATHER_S)
            batch = dict(islice(self._doubtful.items(), _STAT_BATCH))
            for inode in batch:
                del self._doubtful[inode]
            if not self._doubtful:
                self._has_doubt = trio.Event()
            try:
                await self._compare({inode: batch[inode] for inode in batch if self._is_in_store(inode)})
            except LakeError as error:
                _log.warning("names could not be compared with the store", error=error.message)
                for inode in batch:
                    inode.confirmed_at = EXPIRED

    def _is_in_store(self, inode: Inode) -> bool:
        if inode is self._table.root:
            return bool(self._table.bucket)
        return inode.node != 0 and self._table.has_name(inode)

    async def _compare(self, inodes: dict[Inode, _Doubt]) -> None:
        if not inodes:
            return
        asked_at = trio.current_time()
        names = [self._table.name_of(inode) for inode in inodes]
        answers = await self._mount.look_up(names)
        for (inode, doubt), name, answer in zip(inodes.items(), names, answers, strict=True):
            found = answer.found
            if isinstance(found, ObjectStat):
                await self._mount.follow(found)
            parent = inode.parent
            if (parent is None and inode is not self._table.root) or inode.is_dirty:
                continue
            if inode.is_ahead_of(asked_at) or not self._mount.has_name(inode, name):
                self._doubt(inode, doubt.kind)
            elif isinstance(found, ObjectStat):
                self._apply_difference(parent, inode, doubt, found, asked_at)
                inode.kept = answer.kept
            elif isinstance(found, KeyNotFound) and not doubt.kind and doubt.rounds < _ROUNDS_MAX:
                self._doubt(inode, rounds=doubt.rounds + 1)  # its event is on the way: removed or renamed?
            elif isinstance(found, (KeyNotFound, BucketNotFound)) and parent is not None:
                self._detach(parent, inode, is_removed=doubt.kind == "delete")

    def _apply_difference(
        self, parent: Inode | None, inode: Inode, doubt: _Doubt, found: ObjectStat, asked_at: float
    ) -> None:
        shown = self._mount.owner.shown(found)
        is_other = found.node != inode.node or (not inode.is_folder and shown.blob != inode.attributes.blob)
        if is_other and parent is not None:
            self._detach(parent, inode, is_removed=doubt.kind == "delete" and found.node != inode.node)
            return
        inode.confirm(asked_at)
        if inode.take(shown):
            _invalidate_attributes(inode)
        inode.xattrs = found.xattrs

    async def _expire(self, bucket: str) -> None:
        """Mark everything known of the bucket, or of all, as out of date: it is asked anew when it is next used."""
        for number, inode in enumerate(self._table):
            if bucket in (_ALL, self._mount.bucket_of(inode)):
                inode.confirmed_at = EXPIRED
                inode.kept = None
                _renew_names(inode)
                if inode.parent is not None and inode.node and not inode.is_dirty:
                    _invalidate_entry(inode.parent, inode.name)
                if inode.file is not None or inode is self._table.root:  # `fstat` needs no entry
                    _invalidate_attributes(inode)
            if number % 1000 == 999:
                await trio.lowlevel.checkpoint()

    async def _renew_leases(self) -> None:
        """Lease the content of open files again after a new connection, where the names still have it."""
        if self._engine.epoch == self._epoch:
            return
        self._epoch = self._engine.epoch
        for inode in self._table:
            if inode.file is not None:
                try:
                    if self._mount.may_have_lost(inode):
                        await self._see(inode)
                    if inode.file is not None:  # nobody has closed it meanwhile
                        await inode.file.renew_lease()
                except LakeError as error:
                    _log.warning("an open file is not held any more", name=inode.name, error=error.message)

    async def _see(self, inode: Inode) -> None:
        """Note if the present engine has an open file: if its name is gone later, somebody has removed it."""
        assert inode.place is not None, "what may be lost had a name"
        (found,) = await self._mount.stat([self._table.child_name(*inode.place)])
        if isinstance(found, ObjectStat) and found.node == inode.node:
            inode.seen_boot = self._mount.engine_boot()


def _renew_names(folder: Inode) -> None:
    folder.doubt_names()
    folder.names_changed_at = trio.current_time()


def _invalidate_entry(parent: Inode, name: str, removed: int = 0) -> None:
    """Make the kernel forget a name; inotify watchers of the inode `removed` are notified."""
    pyfuse3.invalidate_entry_async(
        InodeT(parent.number), FileNameT(name.encode()), deleted=InodeT(removed), ignore_enoent=True
    )


async def _invalidate_pages(inode: Inode) -> None:
    """Make the kernel forget cached pages.  In a thread of its own, not of the offload: it waits for reads under way,
    which wait for those threads."""
    await trio.to_thread.run_sync(_invalidate_content, inode.number)


def _invalidate_content(number: int) -> None:
    try:
        pyfuse3.invalidate_inode(InodeT(number), attr_only=False)
    except OSError:
        return  # the kernel has forgotten it already


def _invalidate_attributes(inode: Inode) -> None:
    """Make the kernel ask for attributes anew.

    Not while it asks: it would drop the answer, and a read that began with that would end at the old length.
    """
    if inode.asked:
        inode.is_doubted = True
        return
    try:
        pyfuse3.invalidate_inode(InodeT(inode.number), attr_only=True)
    except OSError:
        return  # the kernel has forgotten it already
