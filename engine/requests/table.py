"""The handlers of each request of `lakefs.wire.messages`, in groups, and the services that are made of them.

The other modules of this package hold the handlers by subject (`put`, `names`, `open`, ...) and mark them
(`engine.requests.handlers`); `engine.requests.dispatch` calls them.  What each group stands on is its argument: only
those that take a `Store` have segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.chunks.manifests import HeldBlobs
from engine.format.sizes import DEFAULT_STORE_SIZES
from engine.requests.about import AboutRequests, MoreStatus
from engine.requests.bind import BindGate, BindRequests
from engine.requests.bucket_assigning import BucketAssigner, assign_buckets
from engine.requests.commit import BlobHolder, CommitRequests, EmptyBlobs
from engine.requests.dispatch import Dispatch, Group
from engine.requests.keyed import KeyedRequests, SpaceRequests
from engine.requests.keyed_load import KeyedLoads
from engine.requests.keyed_put import KeyedPuts
from engine.requests.keyed_read import KeyedReads
from engine.requests.lake_spaces import LakeSpaceRequests
from engine.requests.lent import LendingStore, LentRequests
from engine.requests.load_ranges import Loads
from engine.requests.local_clients import SegmentRequests, StampRequests, TierRequests, TierStore
from engine.requests.locate import Locates
from engine.requests.names import NameRequests
from engine.requests.open import Reads
from engine.requests.opening import OpenRequests
from engine.requests.put import Puts
from engine.requests.put_objects import ObjectPuts
from engine.requests.read_chunks import ChunkReads
from engine.requests.sessions import LeaseRequests, SessionRequests
from engine.requests.shards import ShardRequests
from engine.requests.slots import SlotPayloads
from engine.requests.turns import TurnRequests
from engine.requests.upkeep import UpkeepRequests
from engine.requests.uploads import UploadRequests
from engine.store.keyed_store import KeyedStore
from engine.store.names_store import NamesStore
from engine.store.store import Store
from lakefs.wire import messages as m

BOUND_BY_HEADS: Final = (m.BindBlobs, m.BindPart, m.BindUpload, m.BindCopy, m.AcceptedAnswers)
"""Requests of heads to the names of their lake."""
OF_THE_COORDINATOR: Final = (
    m.CoordinatorRange,
    m.CoordinatorTransact,
    m.CoordinatorWatch,
    m.CoordinatorLease,
    m.CoordinatorKeepAlive,
    m.CoordinatorRevoke,
)
"""Requests of a lake's processes to its coordinator, which is with the names."""
OF_REPLICAS: Final = (m.OpenCheckpoint, m.ReadCheckpoint)
"""Requests of a replica of a lake's names to the one that leads."""
OF_TURNS: Final = (m.OpenTurns, m.FollowTurns, m.CloseTurns, m.JoinTurns)
"""Requests of heads that repeat the stamps of a lake's names."""
OF_NAMES_SHARDS: Final = (
    *(m.JoinGeneration, m.RefuseEpochs, m.BeginRoots, m.NextRoots, m.NameRoot),
    *(m.CheckNames, m.ReadNamedChunks),
)
"""Requests of the leader of names shard 0 to those of the others."""
_NOT_SERVED: Final = (
    *(m.Watch, m.ChangeMember, m.SetLake, m.AddNamesShard, m.OpenKeyHomes),
    *(*BOUND_BY_HEADS, *OF_THE_COORDINATOR, *OF_REPLICAS, *OF_TURNS, *OF_NAMES_SHARDS),
)
_SERVED: Final = [request for request in m.REQUESTS.values() if request not in _NOT_SERVED]
"""`Dispatch.watch` serves Watch, which has more than one reply."""


# --- groups ------------------------------------------------------------------------------------------


def about(store: NamesStore, more_status: MoreStatus | None = None) -> Group:
    """Greeting, state, sync; sessions and leases: each process serves them."""
    references = store.references
    return Group([AboutRequests(store, more_status), SessionRequests(references), LeaseRequests(references)])


def names(store: NamesStore, blobs: BlobHolder, part_bytes_min: int, gate: BindGate | None = None) -> Group:
    """Names, buckets, versions, access keys, uploads, commits, stamps.  `blobs` looks at what names are bound to.

    `gate`: heads are served, which look at that themselves.
    """
    uploads = UploadRequests(store, blobs, part_bytes_min)
    parts: list[object] = [NameRequests(store), CommitRequests(store, blobs), uploads, StampRequests(store)]
    return Group(parts if gate is None else [*parts, BindRequests(store, gate, uploads)])


def turns(store: NamesStore) -> list[Group]:
    """Turns of stamps for heads, where names have them."""
    if store.metadata.turns is None:
        return []
    requests = TurnRequests(store.metadata.turns)
    return [Group([requests], ends=[requests.disconnected])]


def opens(store: NamesStore) -> Group:
    """Objects opened by name, where there is no content."""
    return Group([OpenRequests(store)])


def lending(store: LendingStore) -> Group:
    """Memory of clients: lent, or registered for RDMA."""
    lent = LentRequests(store)
    return Group([lent], ends=[lent.disconnected])


def tier(store: TierStore) -> Group:
    """Memory in front of the segments, opened by clients on this machine."""
    return Group([TierRequests(store)])


def content(store: Store) -> Group:
    """Chunks: stored for sessions, located, read, pinned, loaded into memory of clients."""
    puts = Puts(store, SlotPayloads(store))
    segments = SegmentRequests(store)
    return Group(
        [puts, Locates(store), ChunkReads(store), Loads(store), segments],
        bodies={m.StoreChunks: puts.receive},
        ends=[puts.disconnected, segments.disconnected],
    )


def objects(store: Store) -> Group:
    """Names and content at once: small objects put, objects opened with the places of their bytes."""
    puts = ObjectPuts(store, SlotPayloads(store))
    return Group([puts, Reads(store)], bodies={m.PutObjects: puts.receive})


def spaces(store: KeyedStore) -> Group:
    """Spaces of keys: opened, listed, removed."""
    return Group([SpaceRequests(store)])


def keyed(store: Store) -> Group:
    """Values under keys: matched, put, loaded, removed."""
    puts = KeyedPuts(store)
    return Group([KeyedRequests(store), puts, KeyedLoads(store, Loads(store))], bodies={m.KeyedPut: puts.receive})


def shards(store: Store) -> Group:
    """Shards of a lake's chunks, its spaces and values; refused unless the store is a member of one."""
    requests = ShardRequests(store)
    keys = KeyedReads(store, ChunkReads(store))
    return Group([requests, LakeSpaceRequests(store), keys], bodies={m.StoreShards: requests.receive})


def upkeep(store: Store) -> Group:
    """Gc and compaction, checks, scrub."""
    return Group([UpkeepRequests(store)])


# --- services ----------------------------------------------------------------------------------------


class Service(Dispatch):
    """One whole engine: every request."""

    def __init__(self, store: Store) -> None:
        groups = (
            about(store),
            names(store, HeldBlobs(store.chunks, store.manifests), store.sizes.part_bytes_min),
            content(store),
            objects(store),
            lending(store),
            tier(store),
            spaces(store),
            keyed(store),
            shards(store),
            upkeep(store),
        )
        super().__init__(store, groups, _SERVED)


class NamesService(Dispatch):
    """Names and spaces without content: a process that keeps no segment.  `blobs` looks at what names are bound to.

    `gate`: those who connect are heads of the lake, and are believed what they say of content.  `upkeep` and
    `more_status`: requests for the upkeep of that lake, and its part of the status.  `coordinator`: requests to the
    lake's coordinator (`engine.coordinator.coordinator_requests`), for those who connect.  `checkpoints`: requests of
    other replicas of the names (`engine.group_log.checkpoint_requests`).  `buckets`: those of a names shard.
    `more`: other requests that its owner serves.
    """

    def __init__(
        self,
        store: KeyedStore,
        blobs: BlobHolder | None = None,
        *,
        part_bytes_min: int = DEFAULT_STORE_SIZES.part_bytes_min,
        gate: BindGate | None = None,
        upkeep: Group | None = None,
        more_status: MoreStatus | None = None,
        coordinator: Group | None = None,
        checkpoints: Group | None = None,
        buckets: BucketAssigner | None = None,
        more: Sequence[Group] = (),
    ) -> None:
        groups = [
            about(store, more_status),
            names(store, blobs or EmptyBlobs(), part_bytes_min, gate),
            opens(store),
            spaces(store),
            *turns(store),
        ]
        groups += [*(group for group in (upkeep, coordinator, checkpoints) if group is not None), *more]
        super().__init__(store, groups, offers="names are kept here, without content; this process does not serve")
        if buckets is not None:
            store.metadata.use_bucket_rule(buckets)
            assign_buckets(self._handlers.by_request, buckets)
