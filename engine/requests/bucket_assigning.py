"""Buckets of one names shard of several: requests that make one have it assigned to the shard first.

A decision that would make a bucket which is not assigned to these names ends with BucketUnassigned, and changes
nothing.  Then the bucket is assigned, and it is decided again.  `engine.coordinator.bucket_shards` is the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from engine.requests.handlers import Handler
from engine.sessions.references import Client
from engine.tables.merged_tables import BucketRule
from engine.tables.views import BucketUnassigned
from lakefs.errors import EngineBusy
from lakefs.limits import BATCH_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

_MAKES: Final = (m.BindBlobs, m.BindCopy, m.BucketCreate, m.Rename, m.Copy, m.MakeFolder)
"""Requests that may make buckets."""
_ATTEMPTS_MAX: Final = BATCH_MAX + 3
"""Each name of a batch may be in a bucket of its own; and buckets are removed while others make them."""


class BucketAssigner(BucketRule, Protocol):
    """The buckets of one names shard."""

    async def assign(self, bucket: str) -> None:
        """Assign a bucket to this shard.  BucketElsewhere; errors of the coordinator."""
        ...

    async def release(self, bucket: str) -> None:
        """Let a bucket, whose removal is durable, be made in any shard, unless it was assigned again."""
        ...


def assign_buckets(handlers: dict[type[m.Request], Handler], buckets: BucketAssigner) -> None:
    """Let those handlers that make or remove buckets assign and release them."""
    for request in _MAKES:
        handlers[request] = partial(_assigning, buckets, handlers[request])
    handlers[m.BucketRemove] = partial(_releasing, buckets, handlers[m.BucketRemove])


async def _assigning(
    buckets: BucketAssigner,
    handler: Handler,
    client: Client,
    request: m.Request,
    body: Body,
    descriptors: Sequence[int],
) -> Reply:
    for _ in range(_ATTEMPTS_MAX):
        try:
            return await handler(client, request, body, descriptors)
        except BucketUnassigned as missing:
            await buckets.assign(missing.bucket)
    raise EngineBusy("buckets were made and removed again and again meanwhile; try again")


async def _releasing(
    buckets: BucketAssigner,
    handler: Handler,
    client: Client,
    request: m.BucketRemove,
    body: Body,
    descriptors: Sequence[int],
) -> Reply:
    reply = await handler(client, request, body, descriptors)
    await buckets.release(request.name)
    return reply
