"""Requests to names that are in several shards: the buckets of a request, its parts, and answers put together.  Pure.

    one bucket    asked where the bucket is
    two buckets   Rename, Copy: asked where both are
    batch         names in many buckets: a part for each shard, whose results are put back in the order of the names

All other requests are asked at the first shard, or have a way of their own (`engine.head.client_names`).

Rules kept here:
- A batch that is too long, or whose lists do not go together, is not divided: the shard that gets it refuses it whole.
- Numbers of leases say which shard has given them; those of the first shard stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from engine.format.group_parts import FIRST_SHARD
from engine.requests.answers import failure_of
from lakefs.errors import BucketNotFound, LakeError, SessionLost
from lakefs.ids import NamesShard
from lakefs.limits import BATCH_MAX, DELETE_BATCH
from lakefs.wire import messages as m

Batch = m.OpenObjects | m.StatNames | m.DeleteNames | m.BindBlobs
TwoBuckets = m.Rename | m.Copy
Result = m.NameResult | m.OpenResult
BUCKET_OF: Final[dict[type[m.Request], Callable[[Any], str]]] = {
    **dict.fromkeys(
        (
            *(m.ListNames, m.ListVersions, m.MakeFolder, m.MakeSymlink, m.RemoveFolder, m.SetAttributes, m.Exchange),
            *(m.UploadCreate, m.UploadList, m.UploadAbort, m.UploadParts),
        ),
        attrgetter("bucket"),
    ),
    **dict.fromkeys((m.BucketCreate, m.BucketRemove, m.BucketSet), attrgetter("name")),
    m.BindPart: attrgetter("put.bucket"),
    m.BindUpload: attrgetter("complete.bucket"),
    m.BindCopy: attrgetter("change.bucket"),
}
"""Returns the bucket of a request that is about one."""
_LISTS: Final[dict[type[m.Request], tuple[str, ...]]] = {
    m.OpenObjects: ("names", "versions"),
    m.StatNames: ("names", "versions"),
    m.DeleteNames: ("names", "versions", "conditions"),
    m.BindBlobs: ("changes", "sizes", "chunk_counts"),
}
"""The lists of a batch, which go together; the first has all items."""
BATCHES: Final = tuple(_LISTS)
_BATCH_ANSWERS: Final = m.NameResults, m.OpenResults
_LEASE_BITS: Final = 48
"""A number that names give for a lease is below 1 << 48; shards are counted above it, values of keys at 1 << 62."""
_BUCKET_NOT_FOUND: Final = BucketNotFound.wire_code
_SESSION_LOST: Final = SessionLost.wire_code


class Wanted(NamedTuple):
    """A bucket of a request; `makes`: the request makes it if it is missing."""

    bucket: str
    makes: bool


# --- requests ----------------------------------------------------------------------------------------


def wanted_by(request: m.Request) -> Wanted:
    """Return the bucket of a request that is about one (`BUCKET_OF`)."""
    bucket = BUCKET_OF[type(request)](request)
    if isinstance(request, m.MakeFolder):
        return Wanted(bucket, request.create_bucket)
    if isinstance(request, m.BindCopy):
        return Wanted(bucket, request.change.create_bucket)
    return Wanted(bucket, isinstance(request, m.BucketCreate))


def buckets_of(request: Batch) -> set[str]:
    """Return the buckets of a batch."""
    if isinstance(request, m.BindBlobs):
        return {change.bucket for change in request.changes}
    return {bucket for bucket, _ in request.names}


def wanted_by_batch(request: Batch) -> list[Wanted]:
    """Return the bucket of each item of a batch; none if it is not to be divided."""
    lists = [getattr(request, name) for name in _LISTS[type(request)]]
    count = len(lists[0])
    if count > (DELETE_BATCH if isinstance(request, m.DeleteNames) else BATCH_MAX):
        return []
    if any(len(each) not in (0, count) for each in lists):
        return []
    if isinstance(request, m.BindBlobs):
        return [Wanted(change.bucket, change.create_bucket) for change in request.changes]
    return [Wanted(bucket, makes=False) for bucket, _ in request.names]


def part_of(request: Batch, indexes: Sequence[int]) -> Batch:
    """Return the request for some items of a batch."""
    lists = {name: getattr(request, name) for name in _LISTS[type(request)]}
    if len(indexes) == len(next(iter(lists.values()))):
        return request
    some = {name: [values[index] for index in indexes] for name, values in lists.items() if values}
    return msgspec.structs.replace(request, **some)


# --- answers -----------------------------------------------------------------------------------------


def results_of(shard: NamesShard, answer: m.Message) -> Sequence[Result]:
    """Return the results of a shard's answer to a batch, as the head's client gets them."""
    if isinstance(answer, m.NameResults):
        return answer.results
    assert isinstance(answer, m.OpenResults), "a batch has results"
    return answer.results if shard == FIRST_SHARD else [_with_lease_of(shard, result) for result in answer.results]


def answer_of(request: Batch, results: Sequence[Result]) -> m.Message:
    """Return the answer to a batch with these results, one for each item."""
    if isinstance(request, m.OpenObjects):
        return m.OpenResults([result for result in results if isinstance(result, m.OpenResult)])
    return m.NameResults([result for result in results if isinstance(result, m.NameResult)])


def failed_result(request: Batch, error: LakeError) -> Result:
    """Return the result of an item whose part of the batch was refused."""
    failure = failure_of(error)
    return m.OpenResult(None, failure) if isinstance(request, m.OpenObjects) else m.NameResult(failure=failure)


def has_succeeded(answer: m.Message) -> bool:
    """Return True if no result of a batch is a failure."""
    assert isinstance(answer, _BATCH_ANSWERS), "a batch has results"
    for result in answer.results:  # noqa: SIM110 - a third of the time for the usual one
        if result.failure is not None:
            return False
    return True


def without_bucket(results: Iterable[Result]) -> list[int]:
    """Return the indexes of results that say that there is no bucket."""
    return [
        index
        for index, result in enumerate(results)
        if result.failure is not None and result.failure.wire_code == _BUCKET_NOT_FOUND
    ]


def not_accepted(results: Iterable[m.NameResult]) -> list[int]:
    """Return the indexes of results that were refused as the answers of members were too old (SessionLost)."""
    return [
        index
        for index, result in enumerate(results)
        if result.failure is not None and result.failure.wire_code == _SESSION_LOST
    ]


def not_to_repeat(result: Result) -> Result:
    """Return a result without stamps: a bucket that is missing may be made where no stamp of the result turns."""
    return msgspec.structs.replace(result, stamps=b"") if result.stamps else result


def merged_buckets(answers: Iterable[m.Buckets]) -> m.Buckets:
    """Return the buckets of all shards in byte order.

    One that two shards have listed was removed from one and made in the other in between: the later one counts.
    """
    found: dict[str, m.BucketStat] = {}
    for answer in answers:
        for stat in answer.buckets:
            other = found.get(stat.name)
            if other is None or other.created_ns < stat.created_ns:
                found[stat.name] = stat
    return m.Buckets(sorted(found.values(), key=lambda stat: stat.name.encode()))


def highest(answers: Iterable[m.AnswersAccepted]) -> m.AnswersAccepted:
    """Return the answers of members that all of these shards accept."""
    listed = list(answers)
    return m.AnswersAccepted(max(each.generation for each in listed), max(each.epoch for each in listed))


# --- leases ------------------------------------------------------------------------------------------


def leases_by_shard(leases: Iterable[int]) -> dict[NamesShard, list[int]]:
    """Return the numbers as their shards have given them."""
    found: dict[NamesShard, list[int]] = {}
    for lease in leases:
        shard = NamesShard(lease >> _LEASE_BITS)
        found.setdefault(shard, []).append(lease - (shard << _LEASE_BITS))
    return found


def _with_lease_of(shard: NamesShard, result: m.OpenResult) -> m.OpenResult:
    opened = result.opened
    if opened is None or not opened.lease:
        return result
    assert opened.lease < 1 << _LEASE_BITS, "a number of the names"
    numbered = msgspec.structs.replace(opened, lease=opened.lease + (shard << _LEASE_BITS))
    return msgspec.structs.replace(result, opened=numbered)
