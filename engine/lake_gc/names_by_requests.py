"""`ShardNames` by requests to the leader of a names shard (`engine.lake_gc.names_requests`).

Each call has a connection of its own: a walk is of one connection, so of one leader's term, and when either ends the
walk ends with an error.
"""

from __future__ import annotations

from functools import partial

from engine.lake_gc.names_port import OtherNames
from engine.lake_gc.root_owners import packed_owner, unpacked_owner
from engine.lake_gc.shard_links import ConnectShard, linked
from engine.metadata.pacing import Pacing
from engine.upkeep.roots import Owner, Visit
from lakefs.errors import LakeError
from lakefs.ids import BlobId, GcGeneration, NamesShard, RingEpoch
from lakefs.wire import messages as m


def names_by_requests(connect: ConnectShard) -> OtherNames:
    """Return what asks the leaders of other shards."""
    return partial(NamesByRequests, connect)


class NamesByRequests:
    """The names of one shard, led by another process.  Used on the loop."""

    def __init__(self, connect: ConnectShard, shard: NamesShard) -> None:
        self._connect = connect
        self._shard = shard

    async def join(self, generation: GcGeneration) -> int:
        """See the port."""
        async with linked(self._shard, self._connect) as link:
            return (await link.ask(m.JoinGeneration(generation), m.GenerationJoined)).expired_uploads

    async def refuse_below(self, epoch: RingEpoch) -> None:
        """See the port."""
        async with linked(self._shard, self._connect) as link:
            await link.ask(m.RefuseEpochs(epoch), m.Done)

    async def walk(self, visit: Visit, pacing: Pacing) -> None:
        """See the port."""
        async with linked(self._shard, self._connect) as link:
            await link.ask(m.BeginRoots(), m.Done)
            number, is_done = 0, False
            while not is_done:
                page = await link.ask(m.NextRoots(number), m.RootsPage)
                owners = map(unpacked_owner, page.owners)
                await visit([(BlobId(blob), owner) for blob, owner in zip(page.blobs, owners, strict=True)])
                number, is_done = number + 1, page.done
                await pacing.rest()

    async def name_of(self, owner: Owner) -> str:
        """See the port; what has no name to be found now is said by its shard."""
        try:
            async with linked(self._shard, self._connect) as link:
                return (await link.ask(m.NameRoot(packed_owner(owner)), m.RootNamed)).name
        except LakeError:
            return f"an object of names shard {self._shard}"
