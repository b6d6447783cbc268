"""Looking at a simulated store when nobody works at it: its names, its wholeness, the room that it takes."""

from __future__ import annotations

from engine.embedded import EmbeddedEngine
from engine.format import SegmentKind, Table, unpack_chunk_record
from engine.service import Service
from engine.store import Store
from lakefs.client.trio_lake import TrioLake
from lakefs.errors import LakeError
from lakefs.limits import PAGE_BYTES
from lakefs.multipart import UploadName
from lakefs.names import Name
from lakefs.wire.messages import ObjectStat
from tests.sim.disk import SimDisk
from tests.sim.history import SimFailure
from tests.sim.model import Bound, State
from tests.sim.upload_model import NO_PART, UPLOADS, part_bound, part_name, upload_name
from tests.sim.witness import bound_of


async def names_of(store: Store) -> State:
    """All names of the store and what they are bound to."""
    lake = TrioLake(EmbeddedEngine(Service(store), descriptors=False), store.offload)
    state: dict[str, dict[str, Bound]] = {}
    for bucket in await lake.buckets():
        names = [Name(bucket.name, entry.key) async for entry in lake.ls(bucket.name)]
        state[bucket.name] = {}
        for name, found in zip(names, await lake.run(lake.steps.stat_many(names)), strict=True):
            bound = bound_of(found) if isinstance(found, ObjectStat) else None
            if bound is None:
                raise SimFailure(f"{name} is listed, and not there: {found!r}")
            state[bucket.name][name.key] = bound
        await _note_uploads(lake, bucket.name, state)
    return state


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
    """fsck of every byte finds no damage; its report."""
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
    """After gc nothing is left that no name needs.

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
    segments = store.segments.all_ids()
    bound = (len(pages) + 2 * len(segments)) * PAGE_BYTES
    taken = await store.segments.allocated_bytes()
    if taken > bound:
        kinds = [SegmentKind(store.segments.kind(segment)).name for segment in segments]
        raise SimFailure(f"segments take {taken} bytes, live extents need {bound}; {kinds}")
