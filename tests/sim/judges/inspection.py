"""Looks at a simulated store when nobody works at it: its names, whether it is whole, the room that it takes."""

from __future__ import annotations

from engine.format.layouts import SegmentKind, Table, unpack_chunk_record
from engine.namespace.buckets import BucketRef, list_buckets
from engine.namespace.listing import list_versions
from engine.namespace.names import resolve
from engine.namespace.object_stat import to_object_stat
from engine.namespace.tree import Resolved, load_node
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.store.store import Store
from engine.tables.views import View
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import LakeError
from lakefs.ids import NodeId
from lakefs.lake.multipart import UploadName
from lakefs.limits import PAGE_BYTES
from lakefs.names import Name
from lakefs.wire.messages import ListVersions, ObjectStat
from tests.sim.judges.history import SimFailure
from tests.sim.judges.model import NO_BLOB, Bound, State
from tests.sim.judges.upload_model import NO_PART, UPLOADS, part_bound, part_name, upload_name
from tests.sim.judges.version_model import bind, with_old, with_setting
from tests.sim.judges.witness import bound_of, version_of
from tests.sim.world.disk import SimDisk


async def names_of(store: Store) -> State:
    """Return all names of the store and what they are bound to."""
    lake = TrioLake(EmbeddedEngine(Service(store), descriptors=False), store.offload)
    state: dict[str, dict[str, Bound]] = {}
    driver = driver_of(lake)
    for bucket in await lake.buckets():
        names = [Name(bucket.name, entry.key) async for entry in lake.ls(bucket.name)]
        state[bucket.name] = {}
        for name, found in zip(names, await driver.run(driver.steps.stat_many(names)), strict=True):
            bound = bound_of(found) if isinstance(found, ObjectStat) else None
            if bound is None:
                raise SimFailure(f"{name} is listed, and not there: {found!r}")
            state[bucket.name][name.key] = bound
        await _note_uploads(lake, bucket.name, state)
    return _with_versions(store, state)


def _with_versions(store: Store, names: State) -> State:
    """Return the names with their versions, the old versions, and the buckets' settings."""
    state = names
    with store.metadata.view() as view:
        for bucket in list_buckets(view):
            state = with_setting(state, bucket.name, bucket.versioning)
            old: dict[str, list[Bound]] = {}
            for key, node in _all_versions(view, bucket):
                found = Resolved(node, load_node(view, node))
                order, is_null = version_of(found)
                bound = resolve(view, bucket, key)
                if bound is not None and bound.node_id == node:
                    known = state[bucket.name][key]
                    state = bind(state, bucket.name, key, known._replace(order=order, is_null=is_null))
                    continue
                stat = bound_of(to_object_stat(bucket.name, key, node, found.node)) or Bound(NO_BLOB)
                old.setdefault(key, []).append(stat._replace(order=order, is_null=is_null))
            for key, versions in old.items():
                state = with_old(state, bucket.name, key, versions)
    return state


def _all_versions(view: View, bucket: BucketRef) -> list[tuple[str, NodeId]]:
    """Return key and node of all versions but folders, newest first, read page by page."""
    found: list[tuple[str, NodeId]] = []
    after, after_version = "", ""
    while True:
        request = ListVersions(bucket.name, "", after, after_version, limit=3)
        page = list_versions(view, bucket, request)
        found += [(e.key, NodeId(e.node)) for e in page.entries if not e.key.endswith("/")]
        after, after_version = page.next_after, page.next_version
        if not after:
            return found


async def _note_uploads(lake: TrioLake, bucket: str, state: dict[str, dict[str, Bound]]) -> None:
    """Add the unfinished uploads of a bucket, and their parts."""
    uploads = state.setdefault(UPLOADS, {})
    for entry in [entry async for entry in lake.uploads(f"{bucket}/")]:
        upload = UploadName(bucket, entry.key, entry.upload)
        uploads[upload_name(*upload)] = NO_PART
        async for part in lake.parts(upload):
            uploads[part_name(*upload, part.number)] = part_bound(part.blob, part.etag)
    if not uploads:
        del state[UPLOADS]


async def check_whole(store: Store) -> dict[str, object]:
    """Check that fsck of every byte finds no damage; return its report."""
    try:
        report = await store.check(full=True)
    except LakeError as error:
        if isinstance(store.disk, SimDisk) and store.disk.is_dead:
            raise
        raise SimFailure(f"fsck failed: {error!r}") from error
    if report["damage"]:
        raise SimFailure(f"fsck found damage: {report['findings']}")
    return report


async def check_tidy(store: Store) -> None:
    """Check that after gc nothing is left that no name needs.

    Sealed segments take the pages that live extents touch, their headers, and at most a page at their ends.
    """
    report = await check_whole(store)
    if report["notes"]:
        raise SimFailure(f"after gc there are notes: {report['findings']}")
    pages: set[tuple[int, int]] = set()
    with store.metadata.view() as view:
        for _, value in view.scan(Table.CHUNKS, b"", b"\xff"):
            record = unpack_chunk_record(value)
            end = record.offset + record.extent_bytes
            first, last = record.offset // PAGE_BYTES, -(-end // PAGE_BYTES)
            pages.update((record.segment, page) for page in range(first, last))
    segments = sorted(store.segments.register.kinds)
    bound = (len(pages) + 2 * len(segments)) * PAGE_BYTES
    taken = await store.segments.room.allocated_bytes()
    if taken > bound:
        kinds = [SegmentKind(store.segments.register.kinds[segment]).name for segment in segments]
        raise SimFailure(f"segments take {taken} bytes, live extents need {bound}; {kinds}")
