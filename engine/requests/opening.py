"""Opens objects by name: looks names up, takes leases and stamps.  `engine.requests.open` adds where the bytes are.

Rules kept here:
- An opened object's lease is taken in the same synchronous step in which its name was read.
- Stamps are taken in that step too, only if they are wanted.  A result that rests on more than records of names has
  none: damaged bytes, no room for a lease.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.format.layouts import ChunkRecord, NodeKind
from engine.namespace.buckets import BucketRef, find_bucket
from engine.namespace.names import require
from engine.namespace.object_stat import to_object_stat
from engine.namespace.refusals import is_a_marker
from engine.namespace.versions import version_id
from engine.requests.answers import failure_of, versions_of
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.names_store import NamesStore
from engine.tables.recorded_view import Record, RecordedView
from engine.tables.views import View
from engine.tiers.shared_index import NO_GRANT
from engine.upkeep.index_upkeep import with_what_happens
from lakefs.errors import IndexDamaged, InvalidArgument, IsAFolder, KeyNotFound, LakeError, RequestTooLarge, UserError
from lakefs.ids import EMPTY_CHUNK, ChunkId, ChunkKind, kind_of
from lakefs.limits import BATCH_MAX, SMALL_PAYLOAD_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


@dataclass(slots=True)
class Opening:
    """One object being opened."""

    stat: m.ObjectStat
    lease: int = 0
    chunks: list[ChunkId] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    grants: list[m.Grant] = field(default_factory=list)
    small: ChunkRecord | None = None
    worth_it: bool = False
    """True if its small chunk should be copied into the DRAM tier."""

    def add_only_chunk(self) -> bool:
        """Note the chunk of a blob without manifest; True if its payload is empty or may be sent inline."""
        chunk = ChunkId(self.stat.blob)
        if chunk == EMPTY_CHUNK:
            return True
        if kind_of(chunk) is ChunkKind.MANIFEST:
            return False
        self.chunks, self.lengths = [chunk], [self.stat.size_bytes]
        return self.stat.size_bytes < SMALL_PAYLOAD_BYTES

    @property
    def needs_layout(self) -> bool:
        """True if its chunks are in a manifest that was not read yet."""
        return not self.chunks and self.stat.size_bytes > 0


class Openings:
    """Opens names for clients, on views of the caller."""

    def __init__(self, store: NamesStore) -> None:
        self._store = store

    def open_all(
        self, view: View, client: Client, request: m.OpenObjects, stamps: list[bytes]
    ) -> list[Opening | LakeError]:
        """Open each object; a recorded view also adds a set of stamps for each to `stamps`."""
        wanted = zip(request.names, versions_of(request), strict=True)
        if not request.stamps or not isinstance(view, RecordedView):
            buckets: dict[str, BucketRef] = {}
            return [self._open(view, buckets, client, *name, version, request) for name, version in wanted]
        opening: list[Opening | LakeError] = []
        found: dict[str, tuple[BucketRef, list[Record]]] = {}
        for name, version in wanted:
            buckets = {}
            if name[0] in found:
                buckets[name[0]], records = found[name[0]]
                view.note(records)  # each name rests on its bucket too
            opening.append(self._open(view, buckets, client, *name, version, request, found))
            stamps.append(view.take_stamps())
        return opening

    def _open(
        self,
        view: View,
        buckets: dict[str, BucketRef],
        client: Client,
        bucket: str,
        key: str,
        version: str,
        request: m.OpenObjects,
        rests: dict[str, tuple[BucketRef, list[Record]]] | None = None,
    ) -> Opening | LakeError:
        """Open one object.  `buckets` caches the buckets found in this view so far.

        `rests`: gets each bucket with the records that it was read from, if they are wanted.
        """
        try:
            ref = buckets.get(bucket)
            if ref is None:
                ref = buckets[bucket] = find_bucket(view, bucket)
                if rests is not None and isinstance(view, RecordedView):
                    rests[bucket] = ref, view.noted()
            found = require(view, ref, key, version)
            if found.node.is_marker:
                raise is_a_marker(ref, key, version)
            if found.kind is NodeKind.FOLDER and (found.node.blob is None or not key.endswith("/")):
                raise IsAFolder(
                    f"{bucket}/{key} is a folder; use -r, or name an object in it", subject=f"{bucket}/{key}"
                )
            if found.kind is NodeKind.SYMLINK:
                raise InvalidArgument(
                    f"{bucket}/{key} is a symlink and has no content; name what it points to", subject=f"{bucket}/{key}"
                )
            if found.kind.is_special:
                what = m.SPECIAL_KINDS[found.kind]
                raise KeyNotFound(f"{bucket}/{key} is a {what}, and has no content", subject=f"{bucket}/{key}")
            if found.node.blob is None:
                raise InvalidArgument(f"{bucket}/{key} has no content to read", subject=f"{bucket}/{key}")
            stat = to_object_stat(bucket, key, found.node_id, found.node, version_id(ref, found.node))
            opening = Opening(stat)
            is_inline = opening.add_only_chunk()
            if _wants_lease(request, stat, is_inline=is_inline):
                opening.lease = self._store.references.lease(client, found.node.blob)
        except IndexDamaged as error:
            return with_what_happens(self._store, error)
        except LakeError as error:
            return error
        return opening


class OpenRequests:
    """Handler of OpenObjects where names are kept without content: stats and leases; grants name no place."""

    def __init__(self, store: NamesStore) -> None:
        self._metadata = store.metadata
        self._references = store.references
        self._openings = Openings(store)

    @handles(m.OpenObjects)
    async def open_objects(self, client: Client, request: m.OpenObjects) -> Reply:
        check_count(request)
        stamps: list[bytes] = []
        metadata, durable = self._metadata, request.durable
        with metadata.recorded_view(client.stamps_of, durable=durable) if request.stamps else metadata.view() as view:
            opening = self._openings.open_all(view, client, request, stamps)
            sequence = view.sequence
        leases = [item.lease for item in opening if isinstance(item, Opening) and item.lease]
        for item in opening:
            if isinstance(item, Opening):
                item.grants = [NO_GRANT] * len(item.chunks)
        try:
            await (metadata.wait_durable(sequence) if durable else metadata.wait_visible())
        except BaseException:
            self._references.end_leases(client, leases)  # the client never receives their ids
            raise
        return Reply(m.OpenResults(open_results(opening, stamps)))


def check_count(request: m.OpenObjects) -> None:
    """Raise RequestTooLarge for too many names."""
    if len(request.names) > BATCH_MAX:
        raise RequestTooLarge(f"{len(request.names)} names in one request; the limit is {BATCH_MAX}")


def open_results(opening: Seq[Opening | LakeError], stamps: Seq[bytes]) -> list[m.OpenResult]:
    """Return a result for each name, with its set of stamps if there are any."""
    sets = stamps or [b""] * len(opening)
    return [open_result(*each) for each in zip(opening, sets, strict=True)]


def open_result(item: Opening | LakeError, stamps: bytes) -> m.OpenResult:
    """Return the result about one name."""
    if isinstance(item, LakeError):
        # Other failures rest on more than the records of names.
        return m.OpenResult(None, failure_of(item), stamps if isinstance(item, UserError) else b"")
    opened = m.OpenedObject(item.stat, item.lease, list(item.chunks), item.lengths, item.grants)
    return m.OpenResult(opened, None, stamps)


def _wants_lease(request: m.OpenObjects, stat: m.ObjectStat, *, is_inline: bool) -> bool:
    """Return True if the reader of an object needs its content kept, judged before the payload is read."""
    if not request.lease or stat.size_bytes < request.lease_from:
        return False
    return request.lease_inline or not is_inline
