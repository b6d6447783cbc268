"""`ShardNames` over a store of names in this process, and the names of what roots belong to."""

from __future__ import annotations

from engine.fsck.report import Problem
from engine.fsck.upload_check import UploadCheck
from engine.fsck.version_check import VersionCheck
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from engine.namespace.walk import paths_of
from engine.sessions.references import References
from engine.store.names_store import NamesStore
from engine.upkeep.roots import Owner, Roots, RootsWalk, Visit
from engine.uploads.expiry import UploadExpiry
from lakefs.ids import BlobId, GcGeneration, RingEpoch
from lakefs.limits import GC_BATCH


class NamesInProcess:
    """The names of one shard that this process leads.  Used on the loop."""

    def __init__(
        self, store: NamesStore, joined: JoinedGeneration, *, expiry_s: float = 0.0, batch: int = GC_BATCH
    ) -> None:
        """`expiry_s`: age at which unfinished uploads are removed; 0: never."""
        self._metadata: Metadata = store.metadata
        self._references: References = store.references
        self._joined = joined
        self._expiry = UploadExpiry(store.metadata, store.clock, expiry_s, batch=batch)
        self._batch = batch

    async def join(self, generation: GcGeneration) -> int:
        """See the port."""
        expired = await self._expiry.run()
        self._references.expire()
        await self._joined.join(generation)
        return expired

    async def refuse_below(self, epoch: RingEpoch) -> None:
        """See the port."""
        await self._joined.refuse_below(epoch)

    async def walk(self, visit: Visit, pacing: Pacing) -> None:
        """See the port."""
        walk = self.begin_walk(pacing)
        try:
            while (page := walk.next()) is not None:
                await visit(page)
                await pacing.rest()
        finally:
            walk.close()
        await self._metadata.sync()

    def begin_walk(self, pacing: Pacing, rebound_max: int | None = None) -> RootsWalk:
        """Return a walk through the roots, to be asked to its end or closed; see `Roots` for `rebound_max`."""
        roots = Roots(self._metadata, self._references, batch=self._batch, rebound_max=rebound_max)
        return RootsWalk(roots, lambda: pacing.step(self._batch))

    def pacing(self) -> Pacing:
        """Return the pace of a walk that begins now."""
        return Pacing(self._metadata)

    async def sync(self) -> None:
        """Return when all that was decided until now is durable.  StoreReadOnly, CoordinatorLost."""
        await self._metadata.sync()

    async def name_of(self, owner: Owner) -> str:
        """See the port."""
        if owner is None:
            return "an object that is open for reading"
        if isinstance(owner, bytes):
            return await UploadCheck(self._metadata, _no_problem).name_of(owner)
        paths = await paths_of(self._metadata, [owner]) or await VersionCheck(self._metadata).paths_of([owner])
        return paths.get(owner, f"node {owner}, whose name was removed")


async def _no_problem(blob: BlobId, size_bytes: int) -> Problem | None:
    return None
