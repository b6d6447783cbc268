"""Copies at a head: by the names, or from one names shard to another, which know nothing of each other.

    open     the source, with a lease that keeps its content
    hold     its chunks are offered in a session of the copy's own, as those of any put: no bytes are moved
    bind     the name in the other shard, with all that a copy within one shard keeps (`engine.namespace.names.copy`)
    end      session and lease

Rules kept here:
- The copy is of what the source was when it was opened; it is bound at one moment, as every name.
- Results and errors are those of a copy within one shard.
"""

from __future__ import annotations

from engine.format.layouts import NodeKind
from engine.head.head_binds import HeadBinds
from engine.head.head_clients import HeadClient, HeadSession
from engine.head.names_link import end_leases
from engine.namespace.keys import subject_of
from engine.requests.handlers import handles
from lakefs.content.manifest import kept_etag
from lakefs.errors import AcrossShards, InvalidArgument, IsAFolder, KeyNotFound
from lakefs.names import shown
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class HeadCopies:
    """Handler of Copy."""

    def __init__(self, binds: HeadBinds) -> None:
        self._binds = binds

    @handles(m.Copy)
    async def copy(self, client: HeadClient, request: m.Copy) -> Reply:
        try:
            return Reply(await client.names.call(request))
        except AcrossShards:
            pass
        stat, lease = await self._open(client, request)
        try:
            return Reply(await self._bind(client, request, stat))
        finally:
            if lease:
                await end_leases(client.names.call, [lease])

    async def _open(self, client: HeadClient, request: m.Copy) -> tuple[m.ObjectStat, int]:
        """Return the stat of the source, and its lease; 0 for what has no content.

        KeyNotFound, KeyDeleted, VersionNotFound, VersionIsMarker, BucketNotFound.
        """
        if not request.key:
            raise _not_found(request)
        names, versions = [(request.bucket, request.key)], [request.version] if request.version else []
        opening = m.OpenObjects(names, layout_max=0, inline_bytes=0, versions=versions)
        (result,) = (await client.names.ask(opening, m.OpenResults)).results
        if result.opened is not None:
            return result.opened.stat, result.opened.lease
        assert result.failure is not None, "it was opened or not"
        error = result.failure.as_error()
        if isinstance(error, IsAFolder):
            raise _not_found(request)
        if not isinstance(error, (InvalidArgument, KeyNotFound)):
            raise error
        (looked,) = (await client.names.ask(m.StatNames(names, versions=versions), m.NameResults)).results
        if looked.stat is None or not _is_empty(looked.stat):
            raise error
        return looked.stat, 0

    async def _bind(self, client: HeadClient, request: m.Copy, stat: m.ObjectStat) -> m.Message:
        """Hold the content for a session, and bind the copy to it."""
        references, blobs = self._binds.references, self._binds.blobs
        session = references.begin_session(client)
        assert isinstance(session, HeadSession)
        change = m.NameChange(
            request.to_bucket,
            request.to_key,
            stat.blob,
            copied_attributes(stat, request),
            request.condition,
            request.create_bucket,
        )

        async def hold() -> tuple[int, int]:
            if _is_empty(stat):
                return 0, 1
            held = await blobs.hold(session, stat.blob)
            return held.size_bytes, held.chunk_count

        def request_for(held: tuple[int, int], answered: m.Answered) -> m.BindCopy:
            special = stat.kind if stat.kind in m.SPECIAL_KINDS else 0
            return m.BindCopy(answered, change, *held, stat.symlink_target, special, stat.device)

        try:
            _, answer = await self._binds.bind(client, session, hold, request_for)
        finally:
            references.end_session(session.identifier)
        assert answer is not None, "it was asked for"
        return answer


def _is_empty(stat: m.ObjectStat) -> bool:
    """Return True for a symlink or special node."""
    return stat.kind == NodeKind.SYMLINK or stat.kind in m.SPECIAL_KINDS


def copied_attributes(stat: m.ObjectStat, request: m.Copy) -> m.ObjectAttributes:
    """Return the attributes of a copy: those given, or the source's; its tags, and values computed from its content.

    The times are those given; else a modification time that somebody has set stays, and any other is that of the copy.
    """
    given = request.attributes
    shown_by = stat if given is None else given
    etag_kind, etag = kept_etag(stat.etag, stat.blob, stat.chunk_count)
    return m.ObjectAttributes(
        mode=shown_by.mode,
        uid=shown_by.uid,
        gid=shown_by.gid,
        mtime_ns=given.mtime_ns if given is not None else stat.mtime_ns if stat.bound_ns else 0,
        content_type=shown_by.content_type,
        user_metadata=shown_by.user_metadata,
        headers=shown_by.headers,
        etag_kind=etag_kind,
        etag=etag,
        checksums=stat.checksums,
        xattrs=shown_by.xattrs,
        atime_ns=shown_by.atime_ns,
        tags=stat.tags if request.tags is None else request.tags,
    )


def _not_found(request: m.Copy) -> KeyNotFound:
    return KeyNotFound(
        f"{shown(f'{request.bucket}/{request.key}')} does not exist; see what does with: lake ls {request.bucket}/",
        subject=subject_of(request.bucket, request.key),
    )
