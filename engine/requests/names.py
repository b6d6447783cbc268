"""Requests about names: look up, list, remove, rename, copy, attributes, folders, symlinks, buckets, access keys.

Each handler makes one synchronous decision on a view or in a transaction, then waits until that is durable, unless the
client asked for a reply as soon as it is visible (`durable` false).
In a batch every item has its own result; an item that failed has changed nothing.

Access keys: every client has presented the store's token, or uses the Unix socket, where the listener checked its user
as the kernel reports it, or runs in the engine's own process.  So each may ask for secrets, as a gateway has to.  A
reply holds secrets only if the request sets `secrets`, or makes the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from engine.format.features import ReadOnlyFeature
from engine.namespace.access_keys import (
    create_access_key,
    find_access_key,
    list_access_keys,
    new_key_pair,
    remove_access_key,
)
from engine.namespace.buckets import (
    BucketRef,
    create_bucket,
    ensure_bucket,
    find_bucket,
    list_buckets,
    remove_bucket,
    set_bucket,
    to_bucket_stat,
    whole_bucket_stat,
)
from engine.namespace.exchange import exchange
from engine.namespace.listing import list_names, list_versions
from engine.namespace.names import copy, make_folder, rename, require
from engine.namespace.node_changes import make_special, make_symlink, set_attributes
from engine.namespace.object_stat import to_object_stat
from engine.namespace.removal import remove, remove_folder, remove_version
from engine.namespace.tree import Resolved
from engine.namespace.versions import shown_version, version_id
from engine.requests.answers import Decisions, NamesRequest, failed, versions_of
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.names_store import NamesStore
from engine.tables.recorded_view import RecordedView
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument, RequestTooLarge, UserError
from lakefs.limits import BATCH_MAX, DELETE_BATCH
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class NameRequests:
    """Handlers of the requests about names and access keys."""

    def __init__(self, store: NamesStore) -> None:
        self._store = store
        self._decisions = Decisions(store.metadata)

    # --- looking -----------------------------------------------------------------------------------

    @handles(m.StatNames)
    async def stat_names(self, client: Client, request: m.StatNames) -> Reply:
        _check_count(request.names, BATCH_MAX)

        wanted = list(zip(request.names, versions_of(request), strict=True))

        def look(view: View) -> list[m.NameResult]:
            if not isinstance(view, RecordedView):
                return [_each(partial(_stat, view, *name, version)) for name, version in wanted]
            return [
                msgspec.structs.replace(_each(partial(_stat, view, *name, version)), stamps=view.take_stamps())
                for name, version in wanted
            ]

        stamps_for = client if request.stamps else None
        return Reply(m.NameResults(await self._decisions.look(look, request.durable, stamps_for=stamps_for)))

    @handles(m.ListNames)
    async def list_names(self, request: m.ListNames) -> Reply:
        def look(view: View) -> m.Listed:
            bucket = find_bucket(view, request.bucket)
            entries, next_after = list_names(
                view, bucket, request.prefix, request.after, request.delimiter, request.limit, request.folders
            )
            return m.Listed(entries, next_after)

        return Reply(await self._decisions.look(look, request.durable))

    @handles(m.ListVersions)
    async def list_versions(self, request: m.ListVersions) -> Reply:
        def look(view: View) -> m.ListedVersions:
            return list_versions(view, find_bucket(view, request.bucket), request)

        return Reply(await self._decisions.look(look))

    @handles(m.BucketList)
    async def bucket_list(self, request: m.BucketList) -> Reply:
        def look(view: View) -> list[m.BucketStat]:
            if request.name:
                return [whole_bucket_stat(view, find_bucket(view, request.name))]
            return [to_bucket_stat(bucket) for bucket in list_buckets(view)]

        return Reply(m.Buckets(await self._decisions.look(look)))

    # --- changing ----------------------------------------------------------------------------------

    @handles(m.DeleteNames)
    async def delete_names(self, client: Client, request: m.DeleteNames) -> Reply:
        _check_count(request.names, DELETE_BATCH)

        now_ns = self._store.clock.wall_ns()

        conditions = _conditions_of(request)
        wanted = list(zip(request.names, versions_of(request), conditions, strict=True))

        def remove_one(txn: Transaction, name: str, key: str, version: str, condition: m.Condition) -> m.NameResult:
            bucket = find_bucket(txn, name)
            if version:
                removed = remove_version(txn, bucket, key, version, now_ns, condition, request.keep_folder)
                return m.NameResult(None if removed is None else _stat_of(bucket, key, removed))
            removal = remove(txn, bucket, key, condition, now_ns, request.keep_folder)
            stat = None if removal.found is None else _stat_of(bucket, key, removal.found)
            return m.NameResult(stat, marker=removal.marker)

        def decide(txn: Transaction) -> list[m.NameResult]:
            return [_each(partial(remove_one, txn, *name, version, condition)) for name, version, condition in wanted]

        return await self._changed(client, request, request.names, decide, conditions, grows=False)

    @handles(m.Rename)
    async def rename(self, client: Client, request: m.Rename) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            now_ns = self._store.clock.wall_ns()
            source = find_bucket(txn, request.bucket)
            target = self._target(txn, request.to_bucket, request.create_bucket, now_ns)
            renamed = rename(
                txn,
                source,
                request.key,
                target,
                request.to_key,
                request.replace,
                now_ns,
                request.keep_folder,
                request.condition,
                request.to_condition,
            )
            return [one_result(request.to_bucket, request.to_key, renamed)]

        names = [(request.to_bucket, request.to_key), (request.bucket, request.key)]
        return await self._renamed(client, request, names, decide)

    @handles(m.Exchange)
    async def exchange(self, client: Client, request: m.Exchange) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            bucket, now_ns = find_bucket(txn, request.bucket), self._store.clock.wall_ns()
            conditions = request.condition, request.to_condition
            key, moved = exchange(txn, bucket, request.key, request.to_key, now_ns, *conditions)
            return [one_result(request.bucket, key, moved)]

        names = [(request.bucket, request.to_key), (request.bucket, request.key)]
        return await self._renamed(client, request, names, decide)

    @handles(m.Copy)
    async def copy(self, client: Client, request: m.Copy) -> Reply:
        def decide(txn: Transaction) -> Resolved:
            now_ns = self._store.clock.wall_ns()
            source = find_bucket(txn, request.bucket)
            target = self._target(txn, request.to_bucket, request.create_bucket, now_ns)
            return copy(
                txn,
                source,
                request.key,
                target,
                request.to_key,
                request.attributes,
                request.condition,
                now_ns,
                request.tags,
                request.version,
            )

        return one_name(request.to_bucket, request.to_key, await self._decisions.change(client, decide))

    @handles(m.MakeFolder)
    async def make_folder(self, client: Client, request: m.MakeFolder) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            now_ns = self._store.clock.wall_ns()
            bucket = self._target(txn, request.bucket, request.create_bucket, now_ns)
            made = make_folder(
                txn, bucket, request.key, request.exclusive, now_ns, request.attributes, request.condition
            )
            return [one_result(request.bucket, request.key, made)]

        inside = f"{request.key.removesuffix('/')}/-"  # any name in the folder: it stands for the folder itself
        names = [(request.bucket, request.key), (request.bucket, inside)]
        conditions = [request.condition]
        result, own = await self._decisions.change_names(client, names, decide, request, conditions=conditions)
        if own.folder is not None:
            result = msgspec.structs.replace(result, stamps=own.folder.stamps)
        return Reply(m.NameResults([result]))

    @handles(m.RemoveFolder)
    async def remove_folder(self, client: Client, request: m.RemoveFolder) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            now_ns = self._store.clock.wall_ns()
            bucket = find_bucket(txn, request.bucket)
            removed = remove_folder(txn, bucket, request.key, request.condition, now_ns, request.keep_folder)
            return [one_result(request.bucket, request.key, removed)]

        return await self._changed(
            client, request, [(request.bucket, request.key)], decide, [request.condition], grows=False
        )

    @handles(m.MakeSymlink)
    async def make_symlink(self, client: Client, request: m.MakeSymlink) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            now_ns = self._store.clock.wall_ns()
            bucket = find_bucket(txn, request.bucket)
            made = make_symlink(txn, bucket, request.key, request.target, request.attributes, now_ns, request.condition)
            return [one_result(request.bucket, request.key, made)]

        return await self._changed(client, request, [(request.bucket, request.key)], decide, [request.condition])

    @handles(m.MakeNode)
    async def make_node(self, client: Client, request: m.MakeNode) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            bucket = find_bucket(txn, request.bucket)
            made = make_special(txn, bucket, request, self._store.clock.wall_ns())
            self._store.features.need(ReadOnlyFeature.SPECIAL_NODES)
            return [one_result(request.bucket, request.key, made)]

        names = [(request.bucket, request.key)]
        change = partial(self._changed, client, request, names, decide, [request.condition])
        return await self._store.features.deciding(change)

    @handles(m.SetAttributes)
    async def set_attributes(self, client: Client, request: m.SetAttributes) -> Reply:
        def decide(txn: Transaction) -> list[m.NameResult]:
            bucket = find_bucket(txn, request.bucket)
            changed = set_attributes(txn, bucket, request, self._store.clock.wall_ns())
            return [m.NameResult(_stat_of(bucket, request.key, changed))]

        grows = bool(request.xattrs or request.tags)
        itself = (request.bucket, f"{request.key}-")  # of a folder, any name in it
        return await self._changed(client, request, [itself], decide, grows=grows)

    @handles(m.BucketCreate)
    async def bucket_create(self, client: Client, request: m.BucketCreate) -> Reply:
        def decide(txn: Transaction) -> BucketRef:
            return create_bucket(txn, request.name, self._store.clock.wall_ns())

        return Reply(m.Buckets([to_bucket_stat(await self._decisions.change(client, decide))]))

    @handles(m.BucketRemove)
    async def bucket_remove(self, client: Client, request: m.BucketRemove) -> Reply:
        await self._decisions.change(client, lambda txn: remove_bucket(txn, request.name), grows=False)
        return Reply(m.Done())

    @handles(m.BucketSet)
    async def bucket_set(self, client: Client, request: m.BucketSet) -> Reply:
        def decide(txn: Transaction) -> m.BucketStat:
            changed = whole_bucket_stat(txn, set_bucket(txn, request))
            if request.versioning is not None:
                self._store.features.need(ReadOnlyFeature.VERSIONS)
            return changed

        change = partial(self._decisions.change, client, decide, grows=bool(request.tags or request.cors))
        return Reply(m.Buckets([await self._store.features.deciding(change)]))

    # --- access keys -------------------------------------------------------------------------------

    @handles(m.AccessKeyCreate)
    async def access_key_create(self, client: Client, request: m.AccessKeyCreate) -> Reply:
        key_pair = new_key_pair()

        def decide(txn: Transaction) -> m.AccessKeyStat:
            now_ns = self._store.clock.wall_ns()
            return create_access_key(txn, key_pair, request.buckets, request.read_only, now_ns)

        return Reply(m.AccessKeys([await self._decisions.change(client, decide)]))

    @handles(m.AccessKeyList)
    async def access_key_list(self, request: m.AccessKeyList) -> Reply:
        def look(view: View) -> m.AccessKeys:
            if request.access_key:
                found = find_access_key(view, request.access_key, with_secret=request.secrets)
                return m.AccessKeys([] if found is None else [found])
            return m.AccessKeys(*list_access_keys(view, request.after, request.limit, with_secret=request.secrets))

        return Reply(await self._decisions.look(look))

    @handles(m.AccessKeyRemove)
    async def access_key_remove(self, client: Client, request: m.AccessKeyRemove) -> Reply:
        await self._decisions.change(client, lambda txn: remove_access_key(txn, request.access_key), grows=False)
        return Reply(m.Done())

    # --- below -------------------------------------------------------------------------------------

    async def _changed(
        self,
        client: Client,
        request: NamesRequest,
        names: Sequence[tuple[str, str]],
        decide: Callable[[Transaction], list[m.NameResult]],
        conditions: Sequence[m.Condition] = (),
        *,
        grows: bool = True,
    ) -> Reply:
        results = await self._decisions.change_names(client, names, decide, request, conditions=conditions, grows=grows)
        return Reply(m.NameResults(results))

    async def _renamed(
        self,
        client: Client,
        request: m.Rename | m.Exchange,
        names: Sequence[tuple[str, str]],
        decide: Callable[[Transaction], list[m.NameResult]],
    ) -> Reply:
        """Make a change of the new and the old name; the one result has the folders of both."""
        conditions = [request.to_condition, request.condition]
        result, old = await self._decisions.change_names(
            client, names, decide, request, conditions=conditions, grows=False
        )
        return Reply(m.NameResults([msgspec.structs.replace(result, from_folder=old.folder)]))

    @staticmethod
    def _target(txn: Transaction, name: str, create: bool, now_ns: int) -> BucketRef:
        return ensure_bucket(txn, name, now_ns) if create else find_bucket(txn, name)


def _check_count(names: Sequence[object], limit: int) -> None:
    if len(names) > limit:
        raise RequestTooLarge(f"{len(names)} names in one request; the limit is {limit}")


def _conditions_of(request: m.DeleteNames) -> Sequence[m.Condition]:
    """Return the condition of each name.  InvalidArgument when the counts differ."""
    if len(request.conditions) not in (0, len(request.names)):
        raise InvalidArgument(f"{len(request.conditions)} conditions for {len(request.names)} names")
    return request.conditions or [request.condition] * len(request.names)


def _each(call: Callable[[], m.NameResult]) -> m.NameResult:
    try:
        return call()
    except UserError as error:
        return failed(error)


def _stat(view: View, name: str, key: str, version: str) -> m.NameResult:
    bucket = find_bucket(view, name)
    return m.NameResult(_stat_of(bucket, key, require(view, bucket, key, version)))


def _stat_of(bucket: BucketRef, key: str, found: Resolved) -> m.ObjectStat:
    return to_object_stat(bucket.name, key, found.node_id, found.node, version_id(bucket, found.node))


def one_result(bucket: str, key: str, found: Resolved) -> m.NameResult:
    """Return the result about one name."""
    version = shown_version(found.node) if found.node.attributes.version else ""
    return m.NameResult(to_object_stat(bucket, key, found.node_id, found.node, version))


def one_name(bucket: str, key: str, found: Resolved) -> Reply:
    """Return the reply about one name."""
    return Reply(m.NameResults([one_result(bucket, key, found)]))
