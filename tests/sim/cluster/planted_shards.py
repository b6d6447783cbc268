"""Rules of a lake with two names shards weakened on purpose, as `tests.sim.cluster.planted`: run as that is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Final

import trio

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.lake_state import LakeState
from engine.format.group_parts import FIRST_SHARD
from engine.head import names_routes
from engine.head.client_names import ClientNames
from engine.head.head_clients import HeadClient, HeadSession
from engine.head.head_copies import HeadCopies, copied_attributes
from engine.head.names_link import end_leases
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_gc.names_by_requests import NamesByRequests
from engine.lake_gc.names_port import ShardNames
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.metadata.pacing import Pacing
from engine.requests import bucket_assigning
from engine.requests.handlers import Handler
from engine.sessions.references import Client
from engine.upkeep.roots import Visit
from lakefs.errors import BucketNotFound, LakeError
from lakefs.ids import NamesShard, RingEpoch
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from tests.sim.cluster.planted import main
from tests.sim.cluster.weakening import Weakening, instead
from tests.sim.replicas.planted import reads_without_the_lease

# --- gc and epochs -----------------------------------------------------------------------------------


def _the_first_shard_alone_is_walked() -> AbstractContextManager[Any]:
    original = LakeGc._walk

    async def walk(self: LakeGc, shards: Sequence[ShardNames], *rest: Any) -> None:
        await original(self, shards[:1], *rest)

    return instead(LakeGc, "_walk", walk)


def _the_first_shard_alone_joins() -> AbstractContextManager[Any]:
    original = LakeGc._join

    async def join(self: LakeGc, shards: Sequence[ShardNames], *rest: Any) -> None:
        await original(self, shards[:1], *rest)

    return instead(LakeGc, "_join", join)


def _shards_are_counted_before_the_generation() -> AbstractContextManager[Any]:
    begin_gc, names_shards = LakeState.begin_gc, LakeState.names_shards
    counted: list[int] = []

    async def begin(self: LakeState) -> Any:
        counted[:] = [await names_shards(self)]
        return await begin_gc(self)

    async def count(self: LakeState) -> int:
        return counted.pop() if counted else await names_shards(self)

    stack = ExitStack()
    stack.enter_context(instead(LakeState, "begin_gc", begin))
    stack.enter_context(instead(LakeState, "names_shards", count))
    return stack


def _other_shards_are_not_asked_to_refuse() -> AbstractContextManager[Any]:
    async def retiring(self: LakeUpkeep, epoch: RingEpoch, shards: int) -> None:
        await trio.lowlevel.checkpoint()
        self._gate.retire_below(epoch)

    return instead(LakeUpkeep, "_retiring", retiring)


def _cut_off_walks_are_whole() -> AbstractContextManager[Any]:
    original = NamesByRequests.walk

    async def walk(self: NamesByRequests, visit: Visit, pacing: Pacing) -> None:
        with suppress(LakeError):
            await original(self, visit, pacing)

    return instead(NamesByRequests, "walk", walk)


# --- buckets -----------------------------------------------------------------------------------------


def _buckets_are_made_without_records() -> AbstractContextManager[Any]:
    original = BucketShards.making

    def making(self: BucketShards, bucket: str) -> None:
        if self._shard == FIRST_SHARD:  # else all new buckets are made there, where they are looked for
            original(self, bucket)

    return instead(BucketShards, "making", making)


def _records_are_removed_too_soon() -> AbstractContextManager[Any]:
    """Remove a bucket's record as soon as its removal is decided, and not yet durable."""

    async def releasing(
        buckets: BucketShards,
        handler: Handler,
        client: Client,
        request: m.BucketRemove,
        body: Body,
        descriptors: Sequence[int],
    ) -> Reply:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_release_at_once, buckets, request.name)
            reply = await handler(client, request, body, descriptors)
            nursery.cancel_scope.cancel()
        return reply

    return instead(bucket_assigning, "_releasing", releasing)


async def _release_at_once(buckets: BucketShards, name: str) -> None:
    while name in buckets._assigned:  # noqa: ASYNC110 - on a clock that jumps
        await trio.sleep(0.001)
    with trio.CancelScope(shield=True):
        await buckets.release(name)


def _missing_buckets_are_believed() -> AbstractContextManager[Any]:
    original = ClientNames._place_after

    async def place_after(self: ClientNames, error: LakeError, asked: NamesShard, bucket: str) -> NamesShard:
        if isinstance(error, BucketNotFound):
            raise error
        return await original(self, error, asked, bucket)

    stack = ExitStack()
    stack.enter_context(instead(ClientNames, "_place_after", place_after))
    stack.enter_context(instead(names_routes, "without_bucket", lambda results: []))
    return stack


# --- copies ------------------------------------------------------------------------------------------


def _copies_offer_nothing() -> AbstractContextManager[Any]:
    async def bind(self: HeadCopies, client: HeadClient, request: m.Copy, stat: m.ObjectStat) -> m.Message:
        session = self._binds.references.begin_session(client)
        assert isinstance(session, HeadSession)
        attributes = copied_attributes(stat, request)
        change = m.NameChange(
            request.to_bucket, request.to_key, stat.blob, attributes, request.condition, request.create_bucket
        )

        async def hold() -> tuple[int, int]:
            await trio.lowlevel.checkpoint()
            return stat.size_bytes, stat.chunk_count

        def request_for(held: tuple[int, int], answered: m.Answered) -> m.BindCopy:
            return m.BindCopy(answered, change, *held, stat.symlink_target)

        _, answer = await self._binds.bind(client, session, hold, request_for)
        self._binds.references.end_session(session.identifier)
        assert answer is not None
        return answer

    return instead(HeadCopies, "_bind", bind)


def _sources_of_copies_are_not_leased() -> AbstractContextManager[Any]:
    original = HeadCopies._open

    async def opened(self: HeadCopies, client: HeadClient, request: m.Copy) -> tuple[m.ObjectStat, int]:
        stat, lease = await original(self, client, request)
        await end_leases(client.names.call, [lease])
        return stat, 0

    return instead(HeadCopies, "_open", opened)


OVER_SHARDS: Final = [
    Weakening("gc walks the first names shard only", _the_first_shard_alone_is_walked).in_scene(
        "cycles over two names shards"
    ),
    Weakening("a names shard has not joined when it is walked", _the_first_shard_alone_joins).in_scene(
        "a put to another names shard outlives cycles"
    ),
    Weakening("names shards are counted before the generation", _shards_are_counted_before_the_generation).in_scene(
        "a names shard is added during a cycle"
    ),
    Weakening("epochs are retired that another names shard accepts", _other_shards_are_not_asked_to_refuse).in_scene(
        "epochs over two names shards"
    ),
    Weakening("a bucket is made without its record", _buckets_are_made_without_records).in_scene("buckets come and go"),
    Weakening("a bucket's record is removed before its removal is durable", _records_are_removed_too_soon).in_scene(
        "a removal of a bucket is lost"
    ),
    Weakening("heads believe that a bucket is missing", _missing_buckets_are_believed).in_scene("buckets come and go"),
    Weakening("a copy to another names shard offers nothing", _copies_offer_nothing).in_scene(
        "a copy between the walks of two names shards"
    ),
    Weakening("the source of a copy is not leased", _sources_of_copies_are_not_leased).in_scene(
        "a copy to another names shard is slow"
    ),
    Weakening("a former leader of another names shard is read", reads_without_the_lease).in_scene(
        "two replicas of another names shard lead", first=3
    ),
    Weakening("a walk that another names shard cut off counts as whole", _cut_off_walks_are_whole).in_scene(
        "a former leader of a names shard goes on", first=1
    ),
]


if __name__ == "__main__":
    raise SystemExit(main(OVER_SHARDS, "planted_shards"))
